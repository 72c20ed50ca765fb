"""Target: the worker's own half, with servers that answer anything.

The job is a real one of this process. The replies to its worker and its shard servers are exchanged on the way. Each
call of the worker has to end in time, with a result or an error of our tree. The gathered parameters may then be
anything, since a worker cannot check them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from google.protobuf.message_factory import GetMessageClass

from axon_ps.errors import AxonError
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.findings import Case, Findings, LoggedTracebacks, where
from axon_ps_lab.fuzz.grown import Grower
from axon_ps_lab.fuzz.targets.services import CLOCK, END_S, _on_errors
from axon_ps_lab.fuzz.targets.small_job import SmallJob, small_job
from axon_ps_lab.fuzz.targets.tapped import METHODS, Tap

TIMEOUT_S: Final = 0.15
"""Deadline of a call of the worker."""

LIMIT_S: Final = 4 * TIMEOUT_S + END_S
"""Seconds that a call may take: it may make several RPCs with deadline `TIMEOUT_S`, one after the other."""

MOST: Final = 24
"""The most replies of a call that are exchanged."""

LIFE_ROUNDS: Final = 300
"""Rounds after which a new job begins."""


class _Sent:
    """The messages that were sent in place of replies, in one call of the worker."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.replies: list[tuple[str, int]] = []
        self._counts: Counter[str] = Counter()

    def reply(self, path: str, data: bytes) -> tuple[str, int]:
        """Return the path and kind of a reply, and the number of earlier ones of both.

        Streams of several members have the same path, and their replies come in any order, so a number alone is no key.
        """
        message = GetMessageClass(METHODS[path].output_type).FromString(data)
        kinds = [message.WhichOneof(o.name) or "" for o in message.DESCRIPTOR.oneofs]
        name = "#".join((path, *kinds[:1]))
        self._counts[name] += 1
        return name, self._counts[name] - 1

    def add(self, reply: tuple[str, int], message: bytes) -> bytes:
        """Record the message as sent in place of that reply, and return it."""
        self.messages.append(message)
        self.replies.append(reply)
        return message


class WorkerHalf:
    """See the module.

    Args:
        findings: gets the findings.
    """

    name = "worker"

    def __init__(self, findings: Findings) -> None:
        self.messages = 0
        self.jobs = 0
        self.ends: Counter[str] = Counter()
        self._findings = findings
        self._recent: deque[Case] = deque(maxlen=16)
        self._rounds = 0
        self._sent = _Sent()
        self._name = ""
        self._names: dict[str, str] = {}
        self._stack = ExitStack()
        self._logged = LoggedTracebacks()
        self._job: SmallJob | None = None
        self._tap = Tap()

    def close(self) -> None:
        """End the job; replies are not exchanged meanwhile."""
        self._tap.reply = None
        self._stack.close()
        self._job = None

    def run(self, entropy: Entropy) -> None:
        """Make a call of the worker; some of the replies to it are exchanged."""
        job = self._opened()
        name = entropy.pick(list(CALLS))
        left, sent = 1 + entropy.below(MOST), _Sent()

        def exchanged(path: str, data: bytes) -> bytes:
            nonlocal left
            kind = METHODS[path].output_type
            reply = sent.reply(path, data)
            if left <= 0 or entropy.once_in(4):
                return data
            left -= 1
            job.facts.seeds[kind.full_name] = [data]
            return sent.add(reply, Grower(job.facts).message(kind, entropy))

        self._attempt(job, name, exchanged, sent)

    def replay(self, case: Case) -> None:
        """Make the call of a file, with the replies of the file."""
        job = self._opened()
        case, sent = case.among(job.names()), _Sent()
        messages = dict(zip(case.replies, case.messages, strict=True))

        def exchanged(path: str, data: bytes) -> bytes:
            reply = sent.reply(path, data)
            return sent.add(reply, messages[reply]) if reply in messages else data

        self._attempt(job, case.what, exchanged, sent)

    def _attempt(self, job: SmallJob, name: str, exchanged: Callable[[str, bytes], bytes], sent: _Sent) -> None:
        """Make a call whose replies are exchanged, and check its result."""
        self._sent, self._name, self._names = sent, name, job.names()
        self._tap.reply = exchanged
        began_s = CLOCK.now_s
        over = self._perform(job, name)
        self._tap.reply = None
        took_s = CLOCK.now_s - began_s
        self._rounds += 1
        self.messages += len(sent.messages)
        if took_s > LIMIT_S:
            self._findings.add(f"hang: {name} took {took_s:.0f} s", self._cases())
        for location, text in self._logged.take():
            self._findings.add(f"traceback: {location}", self._cases(), text)
        self._recent.append(self._cases()[-1])
        if self._rounds % LIFE_ROUNDS == 0 or (over and not self._is_well(job)):
            self.close()

    def _cases(self) -> list[Case]:
        """Return the previous calls, and this one."""
        this = Case(self.name, self._name, tuple(self._sent.messages), self._names, tuple(self._sent.replies))
        return [*self._recent, this]

    def _perform(self, job: SmallJob, name: str) -> bool:
        """Make a call; returns True if the world may be unusable after it."""
        try:
            CALLS[name](job)
            self.ends["result"] += 1
        except AxonError as error:
            self.ends[type(error).__name__] += 1
            return True
        except (Exception, concurrent.futures.CancelledError, asyncio.CancelledError) as error:
            self._findings.add(f"{name}: {where(error)}", self._cases(), _traceback(error))
            return True
        return False

    def _is_well(self, job: SmallJob) -> bool:
        """Return True if the job still works when replies are not exchanged."""
        try:
            job.world.kv_get("a")
            return job.step() or job.step()
        except AxonError:
            return False
        except Exception as error:
            self._findings.add(f"training after {self._name}: {where(error)}", self._cases(), _traceback(error))
            return False

    def _opened(self) -> SmallJob:
        if self._job is None:
            self._stack.enter_context(self._logged)
            self._job = self._stack.enter_context(small_job(self._tap, "", TIMEOUT_S))
            self._job.world._loop.run(_on_errors(self._findings, self._recent))
            self.jobs += 1
        return self._job


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))[-3000:]


# ---------------------------------------------------------------------- calls of a worker


def _gather(job: SmallJob) -> None:
    spec = job.world.steps.view.spec
    assert spec is not None
    out = np.empty(spec.layout.units[0].numel, np.float32)
    job.world.steps.parameters.gather(0, out).wait()


def _subscribe(job: SmallJob) -> None:
    from axon_ps.coordinator.client.operator import OperatorClient
    from axon_ps.rpc.deadlines import Deadline
    from axon_ps.shard.client.subscriber import ModelSubscriber

    async def pull() -> None:
        world = job.world
        async with OperatorClient(
            world._coordinator.address, security=world._worker.config.security, job=job.job_name
        ) as o:
            subscriber = ModelSubscriber(
                lambda: o.describe("", timeout_s=TIMEOUT_S), job=job.job_name, security=world._worker.config.security
            )
            try:
                await subscriber.pull(0, 1, Deadline(TIMEOUT_S))
            finally:
                await subscriber.close()

    with job._tap.installed():
        job.world._loop.run(pull(), 3 * TIMEOUT_S)


def _collective(job: SmallJob) -> None:
    from axon_ps.aggregation.client.client import Buffers, GroupHandle
    from axon_ps.reduction.call import Call, Operation
    from axon_ps.types import DType, ReduceOp

    world = job.world
    job.sequence += 1
    me = world.view.me()
    group = GroupHandle(name="fuzz", rank=0, ranks=(0,), members=(me.id,))
    call = Call(sequence=job.sequence, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(500,), op=ReduceOp.SUM)
    buffers = Buffers(
        source=np.ones(500, np.float32), target=np.zeros(500, np.float32), source_starts=(0,), target_starts=(0,)
    )
    with job._tap.installed():
        world._loop.run(world._connections.collectives.collective(group, call, buffers, TIMEOUT_S), 3 * TIMEOUT_S)


def _status(job: SmallJob) -> None:
    world = job.world
    world._loop.run(world._coordinator.status(timeout_s=TIMEOUT_S), 3 * TIMEOUT_S)


def _train(job: SmallJob) -> None:
    for _ in range(4):
        job.step()


CALLS: Final[dict[str, Callable[[SmallJob], Any]]] = {
    "step": lambda job: job.step(),
    "train": _train,
    "gather": _gather,
    "subscribe": _subscribe,
    "collective": _collective,
    "kv_get": lambda job: job.world.kv_get("a"),
    "kv_add": lambda job: job.world.kv_add("n", 1),
    "agree": lambda job: job.world.agree("x", 1),
    "barrier": lambda job: job.world.barrier(timeout_s=TIMEOUT_S),
    "statistics": lambda job: job.world.server_statistics(0, TIMEOUT_S),
    "status": _status,
}
