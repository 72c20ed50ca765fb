"""Callers, and revoked credentials."""
