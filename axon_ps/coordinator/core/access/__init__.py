"""Whose credentials hold no more."""
