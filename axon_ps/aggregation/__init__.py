"""Collectives that shard servers compute: ranks send what they have, servers combine it and send back what each wants.

core      operations on one server: who takes part, how data flows, messages between two ranks. No I/O
server    the Collective RPC around the core
client    a rank's end: an operation as stripes over all servers
"""
