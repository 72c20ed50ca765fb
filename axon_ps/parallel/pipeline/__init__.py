"""Pipeline parallel: a model cut into stages that work on different microbatches at the same time.

schedule   who computes what in which order: pure
timeline   when it was, or would be, computed; the bubble: pure
memory     how many microbatches a stage holds: pure
stage      a stage's forward and backward
channel    what travels between stages
executor   one rank's actions of one step
ties       parameters that several stages share
pipeline   `Pipeline`, the public class
dcp        its optimizer for torch.distributed.checkpoint
"""

from axon_ps.parallel.pipeline.dcp import OptimizerState
from axon_ps.parallel.pipeline.memory import PipelineMemoryStats
from axon_ps.parallel.pipeline.pipeline import Pipeline
from axon_ps.parallel.pipeline.schedule import PipelineSchedule
from axon_ps.parallel.pipeline.stage import PipelineStage
from axon_ps.parallel.pipeline.timeline import Timeline, ideal_bubble, simulate

__all__ = [
    "OptimizerState",
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "Timeline",
    "ideal_bubble",
    "simulate",
]
