"""The carriers of calls: each has a client's end and a server's end of calls. See `rpc.calls` for their promises.

grpc         the contract: every call can be made over it
bulk         sockets of their own for calls that move much data, negotiated over gRPC
in_process   calls inside one process, without sockets
"""
