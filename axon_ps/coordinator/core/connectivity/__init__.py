"""Connections of the coordinator with its members, and of the members with each other. Pure."""
