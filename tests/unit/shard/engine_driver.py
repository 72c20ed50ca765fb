"""The laboratory's driver of shard engines, by the name that the tests of this folder import."""

from axon_ps_lab.engine_driver import Servers, apply, cast_to, commit_of, job_of, layout_of, map_unit, one_group

__all__ = ["Servers", "apply", "cast_to", "commit_of", "job_of", "layout_of", "map_unit", "one_group"]
