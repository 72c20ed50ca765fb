"""Registrations of models. In a job that resumes, a model's first layout comes with the manifest of the checkpoint."""

from __future__ import annotations

import asyncio

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Action
from axon_ps.coordinator.server import manifests
from axon_ps.coordinator.server.shell import Shell
from axon_ps.sharding.job import JobSpec
from axon_ps.types import OptimizerSpec
from axon_ps.wire.events import Registered


class Registering:
    """The registrations of a coordinator.

    Args:
        shell: performs them.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._one = asyncio.Lock()

    async def register(
        self,
        caller: Caller,
        spec: JobSpec | None,
        optimizer: OptimizerSpec | None,
        *,
        name: str,
        later: bool,
        timeout_s: float,
    ) -> Registered:
        """Register a layout or an optimizer. A layout is delayed while another worker's must come first.

        Args:
            caller, spec, optimizer, name, later: as of `Registrations.register`.
            timeout_s: seconds to wait for the other worker.

        Raises:
            Timeout: the other worker has not registered the model.
            AxonError: the registration is refused.
        """
        state, now = self._shell.state, self._shell.now
        limit_s = now() + timeout_s
        if spec is not None:
            await asyncio.to_thread(state.registrations.preparation(spec))

        def wait(call: int) -> list[Action]:
            return state.registrations.wait(call, caller, name, now(), max(0.0, limit_s - now()))

        while (reply := await self._register(caller, spec, optimizer, name, later=later)) is None:
            await self._shell.call(wait)
        return reply

    async def _register(
        self, caller: Caller, spec: JobSpec | None, optimizer: OptimizerSpec | None, name: str, *, later: bool
    ) -> Registered | None:
        state, resume = self._shell.state, None
        async with self._one:  # reading the manifest takes a while
            if spec is not None and state.registrations.wants_resume(caller, name):
                specs = {**state.models.specs, name: spec}
                resume = await asyncio.to_thread(manifests.begin, state.config.resume, specs, name)
            reply: Registered | None = await self._shell.call(
                lambda call: state.registrations.register(
                    call, caller, spec, optimizer, resume, now=self._shell.now(), name=name, later=later
                )
            )
        return reply
