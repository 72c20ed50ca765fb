"""Forecasts for a cluster that is not rented yet: step time, bytes, memory, goodput and cost of a model on it.

From a file that describes model and cluster (`scenario`), and what this library costs on such machines (`profile`). The
plan of slices, the sizes of what travels and the memory of slices are the code's own (`axon_ps.sharding`); the steps
are played in virtual time (`step`), where transfers and compute share lines and processors (`fluid`).
"""
