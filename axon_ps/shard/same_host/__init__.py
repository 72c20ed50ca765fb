"""Workers and shard servers of one host read and map each other's memory: no chunk goes through a socket."""
