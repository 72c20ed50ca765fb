"""`torchrun --rdzv-backend=axon`: a rendezvous of torchrun's agents at the job's coordinator."""
