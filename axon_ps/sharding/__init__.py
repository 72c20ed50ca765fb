"""Cutting of a model: layout (parameters into units), plan (units into slices on shard servers). Pure."""
