"""Messages between stages: tensors of any number, shape and dtype, and the error of a stage that failed.

Owns: one first-in-first-out edge for each direction of each boundary between stages on different ranks, with a thread
at each end, and a queue for neighbours on one rank. So ranks compute while messages travel. Refuses: to know what
messages are for.

A message is a header of fixed size that describes the tensors, and then each tensor. So shapes may change at any
time. One message per edge is received ahead of its use, so a rank has one microbatch's inputs in memory beside its
activations.

Invariant: a receiver gets its message, or the error of its sender: see `Channel.poison`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from axon_ps.collectives import arrays
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import WorkQueue
from axon_ps.parallel.pipeline.exchange import HEADER_BYTES, pack, unpack

_QUEUE_CLOSE_S = 5.0


class Edge(NamedTuple):
    """One direction over the boundary between stage `boundary` and the next one."""

    backward: bool
    boundary: int

    @property
    def sender(self) -> int:
        """The stage that sends on it."""
        return self.boundary + self.backward

    @property
    def receiver(self) -> int:
        """The stage that receives on it."""
        return self.boundary + (not self.backward)

    @property
    def tag(self) -> int:
        """The tag of its messages."""
        return 2 * self.boundary + self.backward


@dataclass(frozen=True)
class StageMessage:
    """The message of a stage to a neighbour.

    Attributes:
        tensors: outputs, or gradients of those outputs that need one.
        needs_grad: True for each output that needs a gradient; empty with gradients.
        loss_weight: the microbatch's factor in the loss.
    """

    tensors: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...] = ()
    loss_weight: float = 1.0


class PeerFailed(Exception):
    """Another rank's stage has failed. The text names the stage and the error. It never leaves the pipeline."""


class Channel:
    """One rank's ends of all edges.

    Args:
        group: the pipeline's own group; None = all stages are here.
        owner: the rank of each stage.
        devices: the devices on which this rank's stages compute, by stage.
    """

    def __init__(self, group: ProcessGroup | None, owner: Sequence[int], devices: dict[int, torch.device]) -> None:
        self._group = group
        self._rank = group.rank if group is not None else 0
        self._owner = owner
        self._devices = devices
        self._queues: dict[Edge, deque[StageMessage]] = {}
        self._work_queues: dict[Edge, WorkQueue] = {}
        self._receiving: dict[Edge, Future[StageMessage]] = {}
        self._expected: Counter[Edge] = Counter()
        self._sending: list[Future[None]] = []
        self._sent = False

    def expect(self, counts: Counter[Edge]) -> None:
        """Set the number of messages that this rank will receive on each edge in the next step."""
        self._expected = Counter({e: n for e, n in counts.items() if not self._is_local(e)})
        for edge in self._expected:
            self._begin_receive(edge)

    def send(self, edge: Edge, message: StageMessage) -> None:
        """Send a message in the background.

        Raises:
            InvalidRequest: a tensor has a dtype that cannot be sent, or there are too many tensors.
        """
        if self._is_local(edge):
            self._queues.setdefault(edge, deque()).append(message)
            return
        fields = [[str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type != "cpu"] for t in message.tensors]
        header = pack({"tensors": fields, "grads": list(message.needs_grad), "loss_weight": message.loss_weight})
        flats = [arrays.flatten(t.detach().contiguous(), writable=False) for t in message.tensors]
        self._dispatch(edge, [header, *flats])

    def receive(self, edge: Edge) -> StageMessage:
        """Return the next message of an edge; block until it is there.

        Raises:
            PeerFailed: the sender failed, or another rank failed that the sender waited for.
            AxonError: the group is over.
        """
        if self._is_local(edge):
            return self._queues[edge].popleft()
        message = self._receiving.pop(edge).result()
        self._begin_receive(edge)
        return message

    def poison(self, text: str) -> None:
        """Send an error on every edge from this rank to another one, behind the messages sent already."""
        for boundary in range(len(self._owner) - 1):
            for edge in (Edge(False, boundary), Edge(True, boundary)):
                if self._owner[edge.sender] == self._rank and not self._is_local(edge):
                    self._dispatch(edge, [pack({"error": text})])

    def flush(self) -> None:
        """Block until all messages have left.

        Raises:
            AxonError: a message could not be sent.
        """
        sending, self._sending = self._sending, []
        for work in sending:
            work.result()

    def close(self) -> None:
        """End the threads. The group must have ended the operations under way. Repeated calls do nothing."""
        queues, self._work_queues = self._work_queues, {}
        for queue in queues.values():
            queue.close(_QUEUE_CLOSE_S)
        self._receiving.clear()
        self._sending.clear()
        self._queues.clear()

    def _is_local(self, edge: Edge) -> bool:
        return self._owner[edge.sender] == self._owner[edge.receiver]

    def _work_queue(self, edge: Edge) -> WorkQueue:
        queue = self._work_queues.get(edge)
        if queue is None:
            queue = self._work_queues[edge] = WorkQueue(f"axon-ps-stage-{edge.sender}-{edge.receiver}")
        return queue

    def _dispatch(self, edge: Edge, buffers: Sequence[Any]) -> None:
        group, to = self._group, self._owner[edge.receiver]
        assert group is not None

        def transmit() -> None:
            for buffer in buffers:
                group.send(buffer, to, tag=edge.tag)

        self._sending = [work for work in self._sending if not work.done() or work.exception() is not None]
        self._sending.append(self._work_queue(edge).submit(transmit))

    def _begin_receive(self, edge: Edge) -> None:
        if self._expected[edge] > 0:
            self._expected[edge] -= 1
            self._receiving[edge] = self._work_queue(edge).submit(lambda: self._receive_message(edge))

    def _receive_message(self, edge: Edge) -> StageMessage:
        group, source = self._group, self._owner[edge.sender]
        assert group is not None
        header = np.empty(HEADER_BYTES, np.uint8)
        group.recv(header, source, tag=edge.tag)
        fields = unpack(header)
        if "error" in fields:
            raise PeerFailed(fields["error"])
        device = self._devices[edge.receiver]
        tensors = []
        for name, shape, on_device in fields["tensors"]:
            # A tensor is received into the kind of memory that it was sent from. The stage then moves it to its device.
            where = device if on_device == (device.type != "cpu") else torch.device("cuda" if on_device else "cpu")
            tensor = torch.empty(shape, dtype=getattr(torch, name), device=where)
            group.recv(tensor, source, tag=edge.tag)
            if where.type == "cuda":  # another stream than this thread's will use it
                torch.cuda.current_stream(where).synchronize()
            tensors.append(tensor)
        return StageMessage(tuple(tensors), tuple(fields["grads"]), fields["loss_weight"])
