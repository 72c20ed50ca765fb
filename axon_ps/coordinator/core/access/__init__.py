"""Who calls, and whose credentials hold no more."""
