"""Samples that a replica trains on, and their order. Pure: it needs no framework, no world and no file."""

from axon_ps.data.elastic import ElasticBatch, SamplePlan
from axon_ps.data.permutation import Permutation
from axon_ps.data.sampler import DistributedSampler

__all__ = ["DistributedSampler", "ElasticBatch", "Permutation", "SamplePlan"]
