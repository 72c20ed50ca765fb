"""A rank's side of the servers' collectives: a stream for each stripe, read and written at the same time."""
