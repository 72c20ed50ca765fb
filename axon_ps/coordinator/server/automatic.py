"""Automatic checkpoints: written when they are due, verified, removed when they are old, restored after a loss.

Owns: these actions, one after the other, and their log lines. Refuses: to decide when a checkpoint is due
(`coordinator.checkpoint_schedule`), which ones remain (`retention`) and the effects of a restore on the job
(`core.checkpoints.restores`).

Invariants:
- The newest checkpoint is the one written last, independent of its version: after a restore of an older one, later
  steps come from that.
- A checkpoint is passed over only for a reason that is logged.
- A job that has lost everything before its first checkpoint begins again, as it would with a new state.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy, CheckpointSchedule
from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Action
from axon_ps.coordinator.core.kv import KVResult
from axon_ps.coordinator.server import manifests, retention
from axon_ps.coordinator.server.shell import Shell
from axon_ps.errors import AxonError, Busy, CheckpointError, CheckpointNotFound, InvalidRequest
from axon_ps.host import priority
from axon_ps.wire.events import CheckpointReply

if TYPE_CHECKING:
    from axon_ps.storage.manifest import Manifest

_ArgumentT = TypeVar("_ArgumentT")

_WRITTEN = "axon_ps/checkpoints/written"
"""Key under which the job stores the URI of a complete checkpoint."""

_logger = logging.getLogger(__name__)

Save = Callable[[str, str], Awaitable[CheckpointReply]]
"""Writes a checkpoint: its URI, and the JSON that is saved with it."""


class AutomaticCheckpoints:
    """The automatic checkpoints of one job.

    Args:
        shell: the coordinator.
        policy: the directory, the times and the number of checkpoints.
        save: writes a checkpoint.
    """

    def __init__(self, shell: Shell, policy: CheckpointPolicy, save: Save) -> None:
        self._shell = shell
        self._policy = policy
        self._save_to = save
        self._log = shell.checkpoints
        self._caller = Caller(job=shell.state.config.job, incarnation="")
        self._schedule = CheckpointSchedule(policy, self._version, shell.now())
        self._models = self._epochs
        self._began = False
        self._remembered = False
        self._background = ThreadPoolExecutor(1, "axon_ps-checkpoints", initializer=priority.lower)
        self._refused: dict[str, str] = {}  # by URI, the time of creation: these are not tried again
        self._log.next = lambda: self._schedule.next(self._version, shell.now())

    async def run(self) -> None:
        """Write, verify, remove and restore checkpoints until cancelled."""
        try:
            await self._run()
        finally:
            self._background.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except Exception as error:
                retry_s = self._schedule.failed(self._shell.now())
                level = logging.INFO if isinstance(error, Busy) else logging.ERROR
                known = isinstance(error, AxonError)
                _logger.log(level, "%s; trying again after %.0f s", error, retry_s, exc_info=not known)
                if not isinstance(error, Busy):
                    self._log.failed(str(error) if known else repr(error))
            await self._shell.changed(self._schedule.wait_s(self._shell.now()))

    async def _step(self) -> None:
        if not self._schedule.may_try(self._shell.now()):
            return
        if not self._began:
            await self._begin()
        if why := self._shell.state.assembly.lost_parameters:
            with self._log.doing(f"restoring: {why}"):
                await self._restore(why)
        elif self._models != self._epochs:
            self._models = self._epochs
            self._schedule.restart(self._version)
        elif self._schedule.should_write(self._version, self._shell.now()):
            await self._save()

    @property
    def _epochs(self) -> list[tuple[int, int]]:
        """The models, and the number of restores of each."""
        return [(number, epoch) for number, epoch, _ in self._shell.state.models.position]

    @property
    def _version(self) -> int:
        return sum(version for _, _, version in self._shell.state.models.position)

    async def _begin(self) -> None:
        """Find the newest checkpoint, and remove the files that killed processes have left."""
        found = await asyncio.to_thread(retention.newest, self._policy.directory)
        if found is not None:
            now = datetime.datetime.now(datetime.UTC)
            age = now - (datetime.datetime.fromisoformat(found.created) if found.created else now)
            self._log.written(manifests.info_of(found), took_s=0.0, age_s=age.total_seconds())
        self._began = True
        if self._policy.writes:
            await self._in_background(retention.remove_old, self._policy)

    async def _save(self) -> None:
        version = self._version
        uri = retention.uri_of(self._policy.directory, version)
        with self._log.doing(f"writing {uri}"):
            await self._save_to(uri, "")
        with self._log.doing(f"verifying {uri}"):
            await self._in_background(retention.verify, uri)
        self._schedule.written(version, self._shell.now())
        if not self._remembered:
            await self._remember(_WRITTEN, uri)
            self._remembered = True
        _logger.info("checkpoint %s is complete and verified", uri)
        with self._log.doing("removing the oldest"):
            await self._in_background(retention.remove_old, self._policy)

    async def _in_background(self, work: Callable[[_ArgumentT], None], argument: _ArgumentT) -> None:
        """Do background work in a thread of low priority."""
        await asyncio.get_running_loop().run_in_executor(self._background, work, argument)

    async def _restore(self, why: str) -> None:
        """Restore the newest checkpoint that can be restored; log those that are passed over.

        Raises:
            CheckpointNotFound: none can be restored.
            AxonError: the restore was broken off: a server was lost again, or a user restored another checkpoint.
        """
        candidates = await asyncio.to_thread(self._candidates)
        for found in reversed(candidates):
            _logger.warning("%s: restoring %s, version %d", why, found.uri, found.version)
            try:
                fitting = await asyncio.to_thread(manifests.find, found.uri, self._shell.state.models.specs)
                await self._shell.call(
                    lambda call, fitting=fitting: self._shell.state.restores.restore(  # type: ignore[misc]
                        call, fitting.resumes, self._shell.now()
                    )
                )
            except (CheckpointError, InvalidRequest) as error:
                self._refuse(found.uri, found.created, error)
                continue
            _logger.warning("the job goes on from %s, version %d", found.uri, found.version)
            return
        directory = self._policy.directory
        if not self._refused and await self._may_begin_again():
            _logger.warning("%s, and no checkpoint was written to %s yet: the job begins again", why, directory)
            self._shell.perform(self._shell.state.restores.begin_again(self._shell.now()))
            return
        anew = self._shell.state.config.begin_anew
        raise CheckpointNotFound(
            f"{why}, and {directory} has no checkpoint that can be restored"
            + (f"; to begin anew, {anew}" if anew else "")
        )

    async def _may_begin_again(self) -> bool:
        """Return True if nothing is lost by beginning again: there was never a checkpoint, nor any other restore.

        A directory without checkpoints is not a proof of that: it may be on a disk that is not mounted.
        """
        state = self._shell.state
        return (
            self._policy.writes
            and state.assembly.lost_everything
            and not state.models.values_replaced
            and not await self._recall(_WRITTEN)
        )

    async def _remember(self, key: str, value: str) -> None:
        """Store a value with the job, durably."""

        def put(call: int) -> list[Action]:
            self._shell.state.kv(self._caller).put(call, key, value.encode(), own=True)
            return self._shell.state.flush()

        await self._shell.call(put)

    async def _recall(self, key: str) -> str:
        """Return the stored value; empty if there is none."""

        def get(call: int) -> list[Action]:
            self._shell.state.kv(self._caller).get(call, key)
            return self._shell.state.flush()

        found: KVResult = await self._shell.call(get)
        return found.value.decode() if found.found else ""

    def _candidates(self) -> list[Manifest]:
        """Return the checkpoints that may be restored, oldest first: the job's first one, then its own."""
        from axon_ps.storage.manifest import read_manifest

        found = retention.written(self._policy.directory, lambda uri, error: self._refuse(uri, "", error))
        if resume := self._shell.state.config.resume:
            try:
                first = read_manifest(resume)
                if first.uri not in {manifest.uri for manifest in found}:
                    found = [first, *found]
            except CheckpointError as error:
                self._refuse(resume, "", error)
        return [manifest for manifest in found if self._refused.get(manifest.uri) != manifest.created]

    def _refuse(self, uri: str, created: str, error: AxonError) -> None:
        if self._refused.get(uri) != created:
            self._refused[uri] = created
            _logger.error("checkpoint %s is passed over: %s", uri, error)
            self._log.failed(f"{uri} is passed over: {error}")
