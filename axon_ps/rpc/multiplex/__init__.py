"""Many calls over one stream: what a host's members ask of one server costs it one connection and one stream.

- `frames`: what waits to be written; equal messages for several calls are one frame.
- `server`: performs the calls of a stream, by the handlers of a service.
- `client`: makes them.
- `callers`: who makes one, as a message.

A call here has what one of gRPC has: messages both ways in order, a status with an `ErrorDetail`, cancellation, and who
makes it; not deadlines, which are its caller's.
"""
