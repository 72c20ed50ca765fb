"""Clients of the coordinator, for members and operators: the session, which survives broken streams, and calls."""
