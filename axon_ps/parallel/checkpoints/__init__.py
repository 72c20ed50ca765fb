"""The content of a checkpoint beside parameters and the state of optimizers: buffers, and a program's own state."""
