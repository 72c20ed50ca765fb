"""The coordinator: it tracks the live members, gives out ranks, and decides which training steps count.

core       state machines without clock, threads or I/O, which make the decisions
server     sessions, calls, time and durable state; performs the decisions and serves the protocol on a port
client     a member's end of its session, calls, and the operator's end
proxy      a host's proxy: the sessions and calls of its members over one stream
messages   conversions between the session's messages and the values of the core, for both ends
"""
