"""A member's and an operator's end of the coordinator: the session, which survives broken streams, and unary calls."""
