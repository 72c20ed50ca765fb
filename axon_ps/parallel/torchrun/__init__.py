"""`torchrun --rdzv-backend=axon`: torchrun's agents meet at the job's coordinator, so none of them must survive."""
