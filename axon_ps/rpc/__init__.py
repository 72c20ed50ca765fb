"""Transport of calls: channels, servers, security, deadlines, and the map between our errors and gRPC statuses.

security    addresses that may be bound, TLS and the job token
channels    connections to an address         server     a listening server with health and reflection
service     servicers and stubs built from the schema's descriptors, without generated gRPC code
stream      a client's end of a streaming call, which raises our errors · stream_pool (open streams) · shielded
status      the map between errors and statuses          health   asks a server for its own
calls       a call's two ends                 carriers   gRPC, sockets for bulk calls, calls inside a process
multiplex   calls over a call                 listener   a socket that accepts connections · http  the other endpoint
background_loop   the SDK's event loop        deadlines  deadlines and retries

No other package imports `grpc`. Nothing here uses the state of a job.
"""
