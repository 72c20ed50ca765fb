"""Calls, as clients make them and servers perform them, over any carrier of messages.

protocol   the two ends of a call, `ClientCall` and `ServerCall`, and the `Carrier` of calls
status     the end of a call: a code, a text, an error          ending   a call's end on one side: the first status
queue      messages in one direction
method     a servicer's method: the answer to a call, and to every error

`rpc.carriers` has the carriers, and `rpc.multiplex` calls over a call. `tests/unit/rpc/test_call_contract.py` holds
each of them to the same promises:

- Messages come in order. A half-close comes after them, as `EOF`.
- A call ends once, on both sides, with the status that came first. Messages that were sent before it can still be
  read, unless the client has cancelled the call.
- Either side ends a call at any time. The other side learns of it, also while it waits, and also if the peer has died.
- A writer waits for a reader that is far behind; `rpc.multiplex` ends the call instead.
- `asyncio.CancelledError` comes only to a task that is cancelled itself.
"""
