"""Bulk connections: streaming calls over sockets of their own, negotiated over gRPC.

The RPC `Bulk.Open` names a port and a capability; a call that moves much data connects there, shows it, and carries
the same messages as the call of gRPC would, to the same servicer, with the same statuses. One call uses a connection at
a time. What both ends of gRPC's C core do with each byte is left to the kernel: *measured* on loopback, both ends,
a stream of messages of 1 MiB takes 0.45 CPU seconds a GB in place of 1.0.

The stream of that RPC stays open. When it breaks, because the peer died, froze or was cut off (gRPC pings it),
the bulk calls of that client end with it. Who calls, what that caller may call, and when its credentials end are those
of that stream: see `server`.

gRPC remains the contract: a client or server without this, or between which the port cannot be reached, uses gRPC for
the same calls.

    connection   a socket: frames in and out, in the time that the event loop has
    hangups      which sockets their peers have closed, also behind data that nobody has read yet
    client       a client's calls, and the negotiation
    server       the listener, and a servicer's end of a call

Note: [The frames of a bulk connection]
    A frame is a byte that says its kind, its length (u32, little-endian), and that many bytes. The client begins with
    HELLO, a `BulkHello`, and the server answers with an empty HELLO, or hangs up: then it is no bulk call. MESSAGE is a
    message of the call, as gRPC would carry it; END, of the client, means that no more will come; STATUS, a
    `BulkStatus`, is the server's last frame. Whoever closes the connection before that cancels the call.
"""
