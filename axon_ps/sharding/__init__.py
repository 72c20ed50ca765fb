"""The layout of a model (parameters in units) and its plan (units cut into slices on shard servers). Pure."""
