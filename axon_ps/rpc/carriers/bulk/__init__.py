"""Bulk connections: streaming calls over sockets of their own, negotiated over gRPC.

The reply to the RPC `Bulk.Open` has a port and a capability. A call that moves much data connects to the port and shows
the capability. It has the same messages as the call over gRPC, the same servicer, and the same statuses. A connection
carries one call. The per-byte work of gRPC's C core at both ends is left to the kernel. *Measured* on loopback with
messages of 1 MiB: both ends together take less than half of the CPU time, 0.45 s a GB.

The stream of that RPC stays open. When it breaks, because the peer died, froze or was cut off (gRPC pings it),
the bulk calls of that client end with it. The caller's identity, its permissions and the end of its credentials are
those of that stream: see `server`.

gRPC remains the contract: a client or server without bulk connections uses gRPC for the same calls, and so does a pair
between which the port cannot be reached.

    connection   a socket: frames in and out, on an event loop
    hangups      detection of sockets that their peers have closed, also behind unread data
    client       a client's calls, and the negotiation
    server       the listener, and a servicer's end of a call

Note: [The frames of a bulk connection]
    A frame is a byte for its kind, its length (u32, little-endian), and that many bytes. The client begins with HELLO,
    a `BulkHello`. The server answers with an empty HELLO, or hangs up if the capability is not valid. MESSAGE is a
    message of the call, as in gRPC. END, from the client, means that no more messages come. STATUS, a `BulkStatus`, is
    the server's last frame. A side that closes the connection before that cancels the call.
"""
