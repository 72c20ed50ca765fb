"""Collectives of several ranks on several hosts: one backend inside nodes, another across them."""
