"""Many calls over one stream: the calls of a host's members cost a server one connection and one stream.

- `frames`: the queue of frames to be written; equal messages for several calls are one frame.
- `server`: performs the calls of a stream, by the handlers of a service.
- `client`: makes them.
- `callers`: the caller of a call, as a message.

Like a gRPC call, a call here has messages both ways in order, a status with an `ErrorDetail`, cancellation, and a
caller. It has no deadline; its caller has one.
"""
