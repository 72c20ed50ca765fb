"""The compiled loops (numba): casts, int8, top-k, optimizers, copies past the caches. What they mean is said elsewhere.

Importing a module here loads numba, so whoever does it does so where the loop is needed.
"""
