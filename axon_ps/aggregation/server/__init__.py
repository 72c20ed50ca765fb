"""The Collective RPC: clock, waits and protocol around the core."""
