"""A host's proxy of the coordinator: its members' sessions and calls go over one stream, the host's session.

The members of the host connect to it as if it were the coordinator. It makes no decisions and has no state of the job.

- `upstream`: the host's session with the leading coordinator.
- `server`: the server that the members connect to.
"""
