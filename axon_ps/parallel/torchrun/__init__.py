"""`torchrun --rdzv-backend=axon`: torchrun's agents meet at the job's coordinator, so any of them may die."""
