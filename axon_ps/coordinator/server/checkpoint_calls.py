"""The calls that write a checkpoint, load one, or replace a model's values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, Generic, TypeVar

from axon_ps.coordinator.server import manifests
from axon_ps.coordinator.server.shell import Shell
from axon_ps.errors import AxonError, Busy, InvalidRequest, Misuse
from axon_ps.wire.events import CheckpointReply, SnapshotFile

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """Callers with the same key share one task. It is cancelled when none of them waits any more."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[T]] = {}
        self._callers: dict[asyncio.Task[T], int] = {}

    async def run(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the task of `key`, or raise its error. `begin` starts it if none is running."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(begin())
            task.add_done_callback(lambda _: self._running.pop(key))
        self._callers[task] = self._callers.get(task, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._callers[task] -= 1
            if not self._callers[task]:
                del self._callers[task]
                task.cancel()


class CheckpointCalls:
    """The checkpoints that callers order; see `Snapshots.save`, `Restores.restore` and `Restores.replace`.

    Args:
        shell: performs the orders, and has the log of them.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._saves = SharedCalls[CheckpointReply]()

    async def save(
        self, uri: str, extra_json: str, states: Sequence[SnapshotFile] = (), *, background: bool = False
    ) -> CheckpointReply:
        """Have the servers write their slices, then write the manifest. Equal calls at the same version are one.

        Args:
            uri: the checkpoint's directory.
            extra_json: a JSON object for the caller of a restore.
            states: files that are there already.
            background: whether it may take longer, so that steps are slowed less.
        """
        state, extra = self._shell.state, manifests.check_extra(extra_json)

        async def save() -> CheckpointReply:
            log, began_s = self._shell.checkpoints, self._shell.now()
            try:
                attached = state.restores.attached()
                snapshot = await self._shell.call(lambda call: state.snapshots.save(call, uri, background=background))
                with log.doing(f"writing {uri}"):
                    info = await asyncio.to_thread(
                        manifests.complete, state.config.job, snapshot, extra, attached, states
                    )
            except AxonError as error:
                if not isinstance(error, (Busy, Misuse)):  # these are the caller's errors
                    log.failed(str(error))
                raise
            log.written(info, self._shell.now() - began_s)
            return info

        return await self._saves.run((uri, extra_json, tuple(states), state.models.position), save)

    async def restore(self, uri: str, models: tuple[str, ...]) -> CheckpointReply:
        """Read the manifest, check its files, then have the servers load their slices of `models` (empty = all).

        If the job has values, which a damaged checkpoint would destroy, all files are read here first.
        """
        state = self._shell.state
        with self._shell.checkpoints.doing(f"checking {uri}"):
            found = await asyncio.to_thread(
                manifests.find_complete, uri, state.models.specs, models, read=state.assembly.has_values
            )
        await self._shell.call(lambda call: state.restores.restore(call, found.resumes, self._shell.now()))
        return found.info

    async def replace(self, models: tuple[str, ...]) -> CheckpointReply:
        """Have the values of a model uploaded.

        Raises:
            InvalidRequest: not exactly one model is named.
        """
        if len(models) != 1:
            raise InvalidRequest(f"one model is replaced at a time, by its name; {len(models)} are named")
        state, (name,) = self._shell.state, models
        reply: CheckpointReply = await self._shell.call(
            lambda call: state.restores.replace(call, self._shell.now(), name)
        )
        return reply
