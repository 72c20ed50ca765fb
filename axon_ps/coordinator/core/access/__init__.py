"""Callers, and credentials that hold no more."""
