"""Collectives that shard servers compute: ranks send data, servers combine it and send back results.

core operations on one server: participants, the flow of data, messages between two ranks. No I/O
server    the Collective RPC around the core
client    a rank's side: an operation as stripes over all servers
"""
