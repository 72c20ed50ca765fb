"""Checkpoints being written, and parameters being replaced. Pure."""
