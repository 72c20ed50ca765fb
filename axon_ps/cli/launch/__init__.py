"""The parts of `axon-ps run`: services and workers as child processes, their lines on one terminal, restarts."""
