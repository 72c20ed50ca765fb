"""The shard server: owns slices of parameters and optimizer state. Sans-IO engine, servicer, server, client."""
