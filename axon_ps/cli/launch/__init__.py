"""What `axon-ps run` is made of: services and workers as child processes, their lines on one terminal, restarts."""
