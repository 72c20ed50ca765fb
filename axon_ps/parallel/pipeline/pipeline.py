"""`Pipeline`: a model in stages, over the ranks of a process group or in one process.

Owns: the agreement of the ranks, cutting batches into microbatches, shared parameters.
Refuses: the step itself, and its end; see `executor` and `lifecycle`.

`torch.distributed.pipelining` runs over axon_ps, too (`init_process_group("axon")`). `Pipeline` needs no default
process group. It takes batches and shapes that change, stages of any number per rank, ties and threads. If one rank
fails, it ends on all ranks. The orders of its schedules are the same, and splitting backward is torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from axon_ps.collectives.functional import as_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Closed, InvalidRequest, Misuse
from axon_ps.parallel.pipeline.channel import Channel, PeerFailed
from axon_ps.parallel.pipeline.division import cut, divide, even, single
from axon_ps.parallel.pipeline.exchange import agree, gather_timeline, spread
from axon_ps.parallel.pipeline.executor import Executor, StageFailed, Step
from axon_ps.parallel.pipeline.lifecycle import Lifecycle
from axon_ps.parallel.pipeline.memory import PipelineMemoryStats, peak
from axon_ps.parallel.pipeline.schedule import PipelineSchedule, actions, check, owners
from axon_ps.parallel.pipeline.stage import LossFunction, PipelineStage, StageModules, split_backward
from axon_ps.parallel.pipeline.ties import Tie, TiedParameters, find_ties
from axon_ps.parallel.pipeline.timeline import Timeline
from axon_ps.types import parse_member
from axon_ps.worker.world import World


class Pipeline(nn.Module):
    """A model cut into stages that work on different microbatches of a batch at the same time.

    Its parameters are those of this rank's stages: make an optimizer of them, and save them, on every rank. If
    `from_modules` made the pipeline, the state dicts of all ranks together are that of `nn.Sequential(*modules)`, for
    any cut. Else keys are `stages.<stage>.<name in the stage's module>`. No two ranks have the same keys.

    Args:
        stages: this rank's stages in order. ONE_F_ONE_B and GPIPE: neighbours, any number of them (at least one) on
            each rank; INTERLEAVED_ONE_F_ONE_B and ZERO_BUBBLE: as many on each rank, the i-th one being stage
            rank + i * ranks.
        num_microbatches: number of microbatches that a batch is cut into.
        schedule: the order of work; see `PipelineSchedule`.
        group: the ranks; None = all stages are in this process. With a group, making it is collective.
        loss_fn: for training: `loss_fn(output, target)`, or `loss_fn(output)` when `step` gets no target; a scalar.
        loss_reduction: `loss_fn`'s reduction of rows, "mean" or "sum". With it a step's loss and gradients are those
            of the full batch, also when microbatches are of unequal size.
        tied: the copies of each parameter that stages share, as (stage, name in its module); the same on every rank.

    Raises:
        InvalidRequest: the schedule does not exist for so many ranks, stages or microbatches, or (ZERO_BUBBLE) for this
            torch; or `loss_reduction` is neither.
        Disagreement: the ranks gave different arguments, or tied copies differ in shape or dtype.
        AttributeError: a stage has no parameter of a tied name.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        *,
        num_microbatches: int,
        schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
        group: ProcessGroup | World | None = None,
        loss_fn: LossFunction | None = None,
        loss_reduction: str = "mean",
        tied: Iterable[Tie] = (),
    ) -> None:
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise InvalidRequest(f'loss_reduction is {loss_reduction!r}; it must be "mean" or "sum"')
        group = None if group is None else as_group(group)
        self.schedule = parse_member(schedule, PipelineSchedule, "schedule")
        self.num_microbatches = num_microbatches
        self.rank = 0 if group is None else group.rank
        self._loss_fn = loss_fn
        self._is_mean = loss_reduction == "mean"
        self._last: Step | None = None
        ties = tuple(tuple((int(stage), str(name)) for stage, name in tie) for tie in tied)
        description = f"{self.schedule.value}, {num_microbatches} microbatches"
        counts = agree(group, len(stages), description, (loss_fn is None, loss_reduction, ties))
        check(self.schedule, len(counts), num_microbatches)
        self.owner = owners(self.schedule, counts)
        indices = [stage for stage, rank in enumerate(self.owner) if rank == self.rank]
        self._local = dict(zip(indices, stages, strict=True))
        self._register()
        self._group = None if group is None else group.new_group(range(group.world_size), backend=group.backend)
        self._channel = Channel(self._group, self.owner, {i: s.device for i, s in self._local.items()})
        self._lifecycle = Lifecycle(self._group, self._channel)
        if self.schedule is PipelineSchedule.ZERO_BUBBLE:
            split_backward()
        self._executor = Executor(self._local, self.num_stages, self.rank, self._channel)
        modules = {i: stage.module for i, stage in self._local.items()}
        self._ties = TiedParameters(ties, self.owner, modules, self._group)
        self._tied = ties

    @classmethod
    def from_modules(
        cls,
        modules: Iterable[nn.Module],
        num_stages: int,
        group: ProcessGroup | World | None = None,
        *,
        sizes: Sequence[int] | None = None,
        devices: Sequence[torch.device | str] | None = None,
        schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
        **options: Any,
    ) -> Pipeline:
        """Divide a sequence of modules into stages, of which this rank has its own.

        A parameter that modules of different stages share (the same object) stays shared.

        Args:
            modules: the full model in order (a `nn.Sequential`, say), the same on every rank; each takes the
                output of the one before, a tuple as separate arguments.
            num_stages: number of stages; at least one per rank.
            group: the ranks; None = all stages are in this process.
            sizes: modules by stage; None = as even as possible, the first stages have one more.
            devices: by stage; None = where the modules are.
            schedule: the order of work.
            options: `Pipeline`'s other arguments.

        Raises:
            InvalidRequest: the modules cannot be cut so.
        """
        if not isinstance(num_stages, int):
            raise InvalidRequest(
                f"num_stages is a {type(num_stages).__name__}; give how many stages the modules become, and the group "
                "after that: from_modules(modules, num_stages, group)"
            )
        schedule, group = (
            parse_member(schedule, PipelineSchedule, "schedule"),
            None if group is None else as_group(group),
        )
        ranks, rank = (1, 0) if group is None else (group.world_size, group.rank)
        divided = divide(modules, num_stages, ranks, schedule, sizes)
        owner = owners(schedule, even(num_stages, ranks))
        return cls(
            [PipelineStage(c, devices[i] if devices else None) for i, c in enumerate(divided) if owner[i] == rank],
            schedule=schedule,
            group=group,
            tied=(*find_ties(divided), *options.pop("tied", ())),
            **options,
        )

    # ------------------------------------------------------------------ stages and parameters

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return len(self.owner)

    @property
    def local_stages(self) -> tuple[int, ...]:
        """Numbers of this rank's stages."""
        return tuple(self._local)

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage: batches are needed here."""
        return 0 in self._local

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage: targets are needed here, and outputs are returned here."""
        return self.num_stages - 1 in self._local

    @property
    def counted_elsewhere(self) -> tuple[nn.Parameter, ...]:
        """Copies of shared parameters here that are not the first ones. A global norm must leave them out."""
        return self._ties.counted_elsewhere

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Return the key of each parameter here. A shared one has, on every rank, its first key in the model."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        for tie in self._tied:
            stage, name = tie[0]
            first = f"stages.{stage}.{name}" if hasattr(self, "stages") else name
            here = [(i, n) for i, n in tie if i in self._local]
            names.update((self._local[i].module.get_parameter(n), first) for i, n in here)
        return names

    # ------------------------------------------------------------------ use

    def step(self, batch: Any = None, target: Any = None) -> Tensor:
        """Run forward and backward of a batch, and add the gradients to `.grad`. Collective.

        Args:
            batch: a tensor [rows, ...] or a tuple of such; needed on the rank of the first stage, ignored elsewhere.
            target: the same for the loss function; needed on the rank of the last stage, if at all.

        Returns:
            The loss, on every rank: a scalar on the CPU without graph.

        Raises:
            Broken: a stage of another rank failed. The message names the stage, the rank, the action and the error.
            Misuse: there is no loss function.
            Exception: a stage of this rank failed with it. A note names the stage.
            InvalidRequest: this rank's batch or target cannot be cut. The other ranks get `Broken`.
            AxonError: a rank has died, or did not come in time; or the pipeline is over already.

        After an error: gradients are undefined, parameters are as before. With a group the pipeline is over, on every
        rank. Make another. The group that it was given can still be used, unless a rank has died.
        """
        self._lifecycle.check_open()
        if self._loss_fn is None:
            raise Misuse("this pipeline has no loss_fn; give one to train, or call it to infer")
        self._ties.begin()
        losses = self._run(batch, target, training=True)
        self._ties.reduce()
        last = next(loss for loss in losses if loss is not None)
        return torch.tensor(last, dtype=torch.float32, device="cpu")

    def forward(self, batch: Any = None, *, everywhere: bool = False) -> Any:
        """Infer the output of a batch, without a graph. Collective.

        Args:
            batch: as for `step`.
            everywhere: return the output on every rank.

        Returns:
            On the rank of the last stage that stage's output, with microbatches joined along the first dimension (a
            tensor, or a tuple of tensors); None elsewhere, unless `everywhere`.

        Raises:
            Exception: as `step`.

        After an error: as `step`.
        """
        self._run(batch, None, training=False)
        outputs, self._last_step().outputs = self._last_step().outputs, {}
        try:
            columns = zip(*(outputs[i] for i in sorted(outputs)), strict=True)
            output = tuple(torch.cat(column) for column in columns)
            if everywhere and self._group is not None:
                output = spread(self._group, output, self.owner[-1], next(iter(self._local.values())).device)
        except BaseException as error:  # the others may wait for the output
            self._lifecycle.break_off(error)
            raise
        return single(output) if output else None

    def memory_stats(self) -> PipelineMemoryStats:
        """Return how many microbatches this rank had in memory at once in the last `step` (or inference).

        Raises:
            Misuse: there was no step.
        """
        step = self._last_step()
        expected = 0 if step.loss_fn is None else peak(step.table)  # inference holds nothing
        return PipelineMemoryStats(peak_activations=step.peak, peak_by_stage=step.peak_by_stage, expected=expected)

    def timeline(self) -> Timeline:
        """Return the times of all ranks' computations in the last `step` (or inference), on every rank. Collective.

        Ranks on one host share a clock. Clocks of different hosts are compared by the times at which barriers return.
        The error of this comparison is about the time that a message takes.

        Raises:
            Misuse: there was no step.
        """
        spans = self._last_step().spans
        if self._group is None:
            return Timeline(tuple(spans), 1)
        return gather_timeline(self._group, spans)

    def close(self) -> None:
        """Free the pipeline's group and threads on this rank. Parameters stay. Repeated calls do nothing."""
        self._lifecycle.end(Closed("the pipeline was closed"))

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ a step

    def _run(self, batch: Any, target: Any, *, training: bool) -> list[float | None]:
        """Do a step; return the loss as each rank has it."""
        self._lifecycle.check_open()
        failure: StageFailed | PeerFailed | None = None
        table = actions(self.schedule, self.owner, self.rank, self.num_microbatches, training=training)
        step = self._last = Step(table=table, loss_fn=self._loss_fn if training else None)
        try:
            self._prepare(step, batch, target)
            self._executor.run(step)
        except (StageFailed, PeerFailed) as error:
            failure = error
        except BaseException as error:
            self._lifecycle.break_off(error)
            raise
        finally:
            step.release()
        loss = step.loss.item() if step.loss is not None and failure is None else None
        return self._lifecycle.conclude(loss, failure)

    def _prepare(self, step: Step, batch: Any, target: Any) -> None:
        """Cut this rank's batch and target into microbatches."""
        try:
            if self.is_first:
                step.inputs = cut("batch", batch, self.num_microbatches)
                rows = [microbatch[0].shape[0] for microbatch in step.inputs]
                step.loss_weights = [r / sum(rows) if self._is_mean else 1.0 for r in rows]
            if self.is_last and target is not None:
                targets = cut("target", target, self.num_microbatches)
                step.targets = [single(t) for t in targets] if isinstance(target, Tensor) else targets
        except Exception as error:
            raise StageFailed(
                f"rank {self.rank} of the pipeline was given a batch that it cannot use", error
            ) from error

    # ------------------------------------------------------------------ among ranks

    def _register(self) -> None:
        """Make the stages' modules this module's."""
        by_hand = nn.ModuleDict()
        for index, stage in self._local.items():
            if isinstance(stage.module, StageModules):
                for name, child in stage.module.named_children():
                    self.add_module(name, child)
            else:
                by_hand[str(index)] = stage.module
        if len(by_hand):
            self.stages = by_hand

    def _last_step(self) -> Step:
        if self._last is None:
            raise Misuse("the pipeline has not done a step yet")
        return self._last
