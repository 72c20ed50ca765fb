"""The carriers of calls: each has a client's end and a server's end of calls. See `rpc.calls` for their promises."""
