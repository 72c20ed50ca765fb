"""Hostile peers and files: connections of HTTP/2 and of bulk calls, servers, checkpoint directories."""
