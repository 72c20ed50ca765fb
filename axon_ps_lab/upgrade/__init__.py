"""The rolling upgrade from the oldest axon_ps of this protocol version, which comes from the history."""
