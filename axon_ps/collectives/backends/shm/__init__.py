"""Collectives of processes on one host, through memory that they share."""
