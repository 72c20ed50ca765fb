"""The compiled loops (numba): casts, int8, int4, top-k, optimizers, digests, copies past the caches.

`compress` and `optim` define their results. Importing a module here, except `arrays`, loads numba. So processes that
may not need a loop import it late.
"""
