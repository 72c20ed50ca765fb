"""A rank's end of the servers' collectives: a stream to each server, read and written at the same time."""
