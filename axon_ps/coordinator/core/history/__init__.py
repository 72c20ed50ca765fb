"""The job's history under this leader, in bounded memory: for the page and `axon-ps top`. Pure."""
