"""A rank's side of the servers' collectives: a stream to each server, read and written at the same time."""
