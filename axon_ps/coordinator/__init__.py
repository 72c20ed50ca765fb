"""The coordinator: who is alive, who has which rank, what the job is made of, and which training steps count.

`state` and the modules beside it decide (pure, no clock, no I/O); `shell` performs what they decided; `servicer` speaks
the protocol; `server` puts it on a port; `client` is the member's end of a session, `operator` the command line's.
"""
