"""Connectivity: the coordinator's with its members, and the members' with each other. Pure."""
