"""The history of the job since this coordinator leads, in bounded memory: for the page and `axon-ps top`. Pure."""
