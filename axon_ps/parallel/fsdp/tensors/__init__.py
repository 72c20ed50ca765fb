"""Parameters and gradients of sharded models, as torch's functions see them."""
