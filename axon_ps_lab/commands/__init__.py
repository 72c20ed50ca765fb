"""The commands of `axon-ps` that belong to the laboratory."""
