"""`Executor`: performs one rank's actions of one step in order, and measures them.

Owns: nothing beyond the step. Refuses: to decide the order (`schedule`), to compute (`stage`), to move (`channel`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from axon_ps.parallel.pipeline.channel import Channel, Edge, StageMessage
from axon_ps.parallel.pipeline.schedule import Action, ActionKind
from axon_ps.parallel.pipeline.stage import LossFunction, PipelineStage, Tensors
from axon_ps.parallel.pipeline.timeline import ActionSpan


@dataclass(kw_only=True)
class Step:
    """The data and the results of a step, on one rank.

    Attributes:
        table: the rank's actions.
        inputs: by microbatch; on the rank of the first stage.
        targets: by microbatch; on the rank of the last stage. None = the loss function takes none.
        loss_weights: factor of each microbatch in the loss; on the rank of the first stage.
        loss_fn: None = inference.
        loss: sum over the microbatches; on the rank of the last stage.
        outputs: of inference, by microbatch; on the rank of the last stage.
        spans: the times of the actions.
        peak: the most microbatches that were in memory at once.
        peak_by_stage: the same of each stage.
    """

    table: Sequence[Action]
    inputs: Sequence[Tensors] = ()
    targets: Sequence[Any] | None = None
    loss_weights: Sequence[float] = ()
    loss_fn: LossFunction | None = None
    loss: Tensor | None = None
    outputs: dict[int, Tensors] = field(default_factory=dict)
    spans: list[ActionSpan] = field(default_factory=list)
    peak: int = 0
    peak_by_stage: dict[int, int] = field(default_factory=dict)

    def release(self) -> None:
        """Drop the batch, but not the measurements."""
        self.inputs, self.targets = (), None


class StageFailed(Exception):
    """A stage of this rank has failed with `cause`. It never leaves the pipeline."""

    def __init__(self, description: str, cause: BaseException) -> None:
        super().__init__(f"{description}: {type(cause).__name__}: {cause}")
        self.description = description
        self.error = cause


class Executor:
    """Runs steps.

    Args:
        stages: this rank's, by number.
        num_stages: number of stages of all ranks.
        rank: this rank in the pipeline's group.
        channel: the edges to other stages.
    """

    def __init__(self, stages: Mapping[int, PipelineStage], num_stages: int, rank: int, channel: Channel) -> None:
        self._stages = stages
        self._last = num_stages - 1
        self._rank = rank
        self._channel = channel

    def run(self, step: Step) -> None:
        """Do all actions.

        Raises:
            StageFailed: a stage of this rank failed.
            PeerFailed: a stage of another rank failed.
            AxonError: the group is over.

        After an error: other ranks have been notified only if it is an `AxonError`. Gradients are undefined.
        """
        step.peak_by_stage = dict.fromkeys(self._stages, 0)
        try:
            self._channel.expect(self._expected(step.table))
            for action in step.table:
                message = self._incoming(step, action)
                try:
                    self._perform(step, action, message)
                except Exception as error:
                    description = (
                        f"stage {action.stage} on rank {self._rank} of the pipeline failed in {action.description}"
                    )
                    raise StageFailed(description, error) from error
        finally:
            for stage in self._stages.values():
                stage.clear()

    def _perform(self, step: Step, action: Action, message: StageMessage | None) -> None:
        begin_s, begin_cpu_s = time.monotonic(), time.thread_time()
        result = self._compute(step, action, message)
        end_cpu_s, end_s = time.thread_time(), time.monotonic()
        step.spans.append(ActionSpan(self._rank, action, begin_s, end_s, end_cpu_s - begin_cpu_s))
        edge = _leaving(action)
        if result is not None and edge is not None and 0 <= edge.boundary < self._last:
            self._channel.send(edge, result)

    def _incoming(self, step: Step, action: Action) -> StageMessage | None:
        edge = _arriving(action)
        if edge is None or edge.boundary >= self._last:
            return None
        if edge.boundary < 0:
            inputs = step.inputs[action.microbatch]
            return StageMessage(inputs, (False,) * len(inputs), step.loss_weights[action.microbatch])
        return self._channel.receive(edge)

    def _compute(self, step: Step, action: Action, message: StageMessage | None) -> StageMessage | None:
        stage, number = self._stages[action.stage], action.microbatch
        if action.kind is ActionKind.FORWARD:
            assert message is not None
            result = self._forward(step, action, message)
            step.peak_by_stage[action.stage] = max(step.peak_by_stage[action.stage], stage.live)
            step.peak = max(step.peak, sum(s.live for s in self._stages.values()))
            return result
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            stage.backward_weight(number)
            return None
        grads = message.tensors if message is not None else None
        split = action.kind is ActionKind.BACKWARD_INPUT
        return StageMessage((stage.backward_input if split else stage.backward)(number, grads))

    def _forward(self, step: Step, action: Action, message: StageMessage) -> StageMessage | None:
        stage, number, last = self._stages[action.stage], action.microbatch, action.stage == self._last
        if step.loss_fn is None:
            outputs = stage.infer(message.tensors)
            if last:
                step.outputs[number] = outputs
            return StageMessage(outputs, (False,) * len(outputs), message.loss_weight)
        split = any(a.kind is ActionKind.BACKWARD_WEIGHT for a in step.table)
        outputs = stage.forward(number, message.tensors, message.needs_grad, split=split)
        if last:
            target = step.targets[number] if step.targets is not None else None
            loss = stage.loss(number, outputs, target, step.loss_fn, message.loss_weight)
            step.loss = loss if step.loss is None else step.loss + loss
            return None
        needs_grad = tuple(y.requires_grad for y in outputs)
        return StageMessage(tuple(y.detach() for y in outputs), needs_grad, message.loss_weight)

    def _expected(self, table: Iterable[Action]) -> Counter[Edge]:
        edges = (_arriving(action) for action in table)
        return Counter(e for e in edges if e is not None and 0 <= e.boundary < self._last)


def _arriving(action: Action) -> Edge | None:
    """Return the edge on which an action's message arrives.

    Microbatches arrive over boundary -1. Nothing arrives over the last one: backward begins there at the loss.
    """
    if action.kind is ActionKind.FORWARD:
        return Edge(False, action.stage - 1)
    return None if action.kind is ActionKind.BACKWARD_WEIGHT else Edge(True, action.stage)


def _leaving(action: Action) -> Edge | None:
    """Return the edge on which an action's result leaves."""
    if action.kind is ActionKind.FORWARD:
        return Edge(False, action.stage)
    return None if action.kind is ActionKind.BACKWARD_WEIGHT else Edge(True, action.stage - 1)
