"""How a bucket of gradients is averaged over the ranks: as it is, or compressed."""
