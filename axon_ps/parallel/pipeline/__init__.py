"""Pipeline parallel: a model cut into stages that work on different microbatches at the same time.

schedule   the order of each rank's computations: pure
timeline   the times of computations, recorded or simulated; the bubble: pure
memory     the number of microbatches that a stage holds: pure
stage      a stage's forward and backward
channel    messages between stages
executor   one rank's actions of one step
lifecycle  the end of a step on all ranks, and of the pipeline
ties       parameters that several stages share
pipeline   `Pipeline`, the public class
dcp        a pipeline's optimizer for torch.distributed.checkpoint
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
