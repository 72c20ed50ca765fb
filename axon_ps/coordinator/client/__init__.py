"""Clients of the coordinator, for members and operators: calls, and a session that is opened again after it breaks."""
