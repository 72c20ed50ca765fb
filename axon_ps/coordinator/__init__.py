"""The coordinator: who is alive, who has which rank, what the job is made of, and which training steps count.

core       decides: state machines without clock, threads or I/O
server     performs what they decided: sessions, calls, time, durable state; serves the protocol on a port
client     a member's end of its session, calls, and the operator's end
messages   between the session's messages and the values of the core, for both ends
"""
