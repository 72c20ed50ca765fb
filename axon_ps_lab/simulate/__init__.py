"""Forecasts for a cluster that is not rented yet: step time, bytes, memory, goodput and cost of a model on it.

The inputs are a file that describes model and cluster (`scenario`), and the costs of this library on such machines
(`profile`). The plan of slices, the sizes of messages and the memory of slices are computed by the library's own code
(`axon_ps.sharding`). The steps run in virtual time (`step`), in which transfers and compute share lines and processors
(`fluid`).
"""
