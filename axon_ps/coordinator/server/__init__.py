"""The coordinator as a process: sessions, calls, time, durable state and checkpoints around the core."""
