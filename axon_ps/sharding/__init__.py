"""How a model is cut up: layout (parameters into units), plan (units into slices on shard servers). Pure."""
