"""The calls that a shard server takes: those of members, once it knows what their callers know.

A caller may have learned of a generation or placement before this server, which then waits for the news. The waits have
a limit, since a wrong caller may name a generation that never comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final

from axon_ps.aggregation.server.shell import check_job
from axon_ps.errors import Broken, Busy, GenerationChanged, InvalidRequest, Misuse, PermissionDenied
from axon_ps.rpc.limits import FENCE_S, MAX_NEWER
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.server.model_shell import ModelShell
from axon_ps.shard.server.subscriptions import Subscriptions
from axon_ps.shard.server.waiters import Waiters
from axon_ps.types import Member, Membership
from axon_ps.wire.v1.common_pb2 import CallContext

MAX_MEMBER_CALLS: Final = 1024
"""Gathers and pushes of one worker that may be under way at a time."""


class Fence:
    """The checks of calls against the membership and the models of a server.

    Args:
        job: name of the job. Calls for another one are refused.
        models: the models of the server, by number. The shell adds and removes them.

    Attributes:
        membership: the newest one; None before the first.
        released: names of the models that the job has released, by number.
    """

    def __init__(self, job: str, models: Mapping[int, ModelShell]) -> None:
        self.membership: Membership | None = None
        self.released: dict[int, str] = {}
        self._job = job
        self._models = models
        self._generation = 0
        self._servers: dict[str, Member] = {}
        self._waiters = Waiters()
        self._calls: Counter[str] = Counter()  # under way, by member

    def set_members(self, membership: Membership) -> None:
        """Set the current members. `wake` must follow once the models have them."""
        self.membership = membership
        self._generation = membership.generation
        self._servers = {m.incarnation: m for m in membership.shards}

    def wake(self) -> None:
        """Wake callers that wait for a change of the membership or of a model."""
        self._waiters.wake_all()

    async def worker(self, context: CallContext) -> tuple[ModelShell, Member]:
        """Return the model and the calling worker, once this server knows the caller's generation and placement.

        Raises:
            PermissionDenied: another job, or not a worker of the generation it names.
            GenerationChanged: the caller's generation is over.
            Misuse: the model was released.
            InvalidRequest: its generation or placement is too far ahead of the job's.
            Busy: there is no memory for the model here.
            Broken: this server has not learned of them in time, or the caller is of another state of the job.
        """
        model = await self._fence(context)
        member = model.members.get(context.incarnation)
        if member is None:
            raise PermissionDenied(
                f"incarnation {context.incarnation[:32]!r} is not a worker of generation {self._generation}"
            )
        return model, member

    async def server(self, context: CallContext) -> tuple[ModelShell, Member]:
        """Fence a call of another shard server; see `worker`.

        Raises:
            PermissionDenied: another job, or not a shard server of the generation it names.
            GenerationChanged: the caller's generation is over.
            Misuse: the model was released.
            InvalidRequest: its generation or placement is too far ahead of the job's.
            Busy: there is no memory for the model here.
            Broken: this server has not learned of them in time, or the caller is of another state of the job.
        """
        model = await self._fence(context)
        member = self._servers.get(context.incarnation)
        if member is None:
            raise PermissionDenied(
                f"incarnation {context.incarnation[:32]!r} is not a shard server of generation {self._generation}"
            )
        return model, member

    async def member(self, context: CallContext) -> Member:
        """Fence a call of a worker or a shard server, as `worker` does; return the caller."""
        await self._fence(context)
        server = self._servers.get(context.incarnation)
        return server if server is not None else (await self.worker(context))[1]

    def observed(self, context: CallContext) -> tuple[Subscriptions, ShardEngine]:
        """Return the subscriptions to a model, and its engine, for a caller that need not be a member.

        Raises:
            PermissionDenied: another job.
            Misuse: the model was released.
            Busy: this server does not know the model yet.
        """
        check_job(context, self._job)
        self._check_not_released(context.model)
        model = self._models.get(context.model)
        if model is None or not model.engine.configured:
            raise Busy(f"this shard server does not know model {context.model} yet; try again")
        return model.subscriptions, model.engine

    def _check_not_released(self, number: int) -> None:
        if number in self.released:
            name = self.released[number]
            raise Misuse(f"model {name!r} was released: its parameters are on the shard servers no more")

    async def _fence(self, context: CallContext) -> ModelShell:
        self._check_job(context)
        if not self._can_answer(context):
            await self._catch_up(context)
        self._check_not_released(context.model)
        if context.model in self._models and (missing := self._models[context.model].capacity.missing):
            raise Busy(missing)
        if context.generation < self._generation:
            raise GenerationChanged(
                f"generation {context.generation} is over; the current one is {self._generation}", self._generation
            )
        model = self._models[context.model]
        model.check_generation(context.generation)
        return model

    def _check_job(self, context: CallContext) -> None:
        check_job(context, self._job, "" if self.membership is None else self.membership.state_id)

    async def _catch_up(self, context: CallContext) -> None:
        """Wait until this server knows enough to serve or to refuse a call; see `rpc.limits.FENCE_S`.

        Raises:
            InvalidRequest: its generation or placement is too far ahead of the job's.
            Broken: this server has not learned of them in time.
        """
        model = self._models.get(context.model)
        placement = None if model is None else model.engine.placement
        for what, given, known in (
            ("generation", context.generation, self._generation),
            ("placement", context.placement, 0 if placement is None else placement.number),
        ):
            if given > known + MAX_NEWER:
                raise InvalidRequest(f"{what} {given} is none of this job's; this server knows {known}")
        while not self._can_answer(context):
            try:
                async with asyncio.timeout(FENCE_S):
                    while not self._can_answer(context):
                        await self._waiters.wait()
                        self._check_job(context)  # this server may have joined meanwhile
            except TimeoutError:
                if context.model in self._models and self._models[context.model].order.is_busy:
                    continue  # it knows them, and allocates memory
                raise Broken(
                    f"this server has not heard of generation {context.generation} and placement {context.placement} "
                    f"of model {context.model} within {FENCE_S:g} s; it knows generation {self._generation}"
                ) from None

    def calling(self, caller: str) -> MemberCall:
        """Count a call of an incarnation while the context lasts."""
        return MemberCall(self._calls, caller)

    def _can_answer(self, context: CallContext) -> bool:
        """Return True if this server knows enough to serve or to refuse a call."""
        if context.model in self.released or context.generation < self._generation:
            return True
        model = self._models.get(context.model)
        if model is not None and model.capacity.missing:
            return True
        if model is None or (placement := model.engine.placement) is None:
            return False
        return model.engine.generation >= context.generation and placement.number >= context.placement


class MemberCall:
    """The context of a call of a member.

    Args:
        calls: number of calls under way, by incarnation.
        caller: incarnation of the caller.

    Raises:
        Busy: the caller has too many calls under way.
    """

    __slots__ = ("_caller", "_calls")

    def __init__(self, calls: Counter[str], caller: str) -> None:
        self._calls, self._caller = calls, caller

    def __enter__(self) -> None:
        if self._calls[self._caller] >= MAX_MEMBER_CALLS:
            raise Busy(
                f"{self._caller[:32]!r} has {MAX_MEMBER_CALLS} gathers and pushes under way at this server, which is "
                "the most of a member; wait for some of them"
            )
        self._calls[self._caller] += 1

    def __exit__(self, *_: object) -> None:
        self._calls[self._caller] -= 1
        if not self._calls[self._caller]:
            del self._calls[self._caller]
