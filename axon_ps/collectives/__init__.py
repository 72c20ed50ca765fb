"""What workers do together: the world of a job, its groups, its steps. Torch-free; `parallel` builds on it."""
