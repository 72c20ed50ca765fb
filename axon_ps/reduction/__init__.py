"""Reductions: the contributions of several ranks become one array. See `axon_ps.reduction.ops`."""
