"""Local SGD and DiLoCo: many local steps, then one together. See `diloco`."""

from axon_ps.parallel.diloco.diloco import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
