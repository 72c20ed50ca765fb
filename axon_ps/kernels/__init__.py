"""The compiled loops (numba): casts, int8, int4, top-k, optimizers, copies past the caches.

`compress` and `optim` define their results. Importing a module here loads numba, so its users import it where the loop
is needed.
"""
