"""Checkpoints that need nobody: written when they are due, verified, removed when they are old, restored after a loss.

Owns: doing so, one thing after the other, and saying so in the log. Refuses: to decide when one is due
(`core.checkpoints.schedule`) and what a restore does to the job (`core.checkpoints.restores`).

Invariants:
- Only checkpoints that were written here are removed: directories named `step-N`; and the newest that verifies, never.
- The newest is the one that was written last, whatever its version: who restored an older one wants what came of that.
- A checkpoint is passed over only for a reason that is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from axon_ps.coordinator.core.checkpoints.schedule import CheckpointPolicy, CheckpointSchedule
from axon_ps.coordinator.core.events import CheckpointReply
from axon_ps.coordinator.core.state import Caller
from axon_ps.coordinator.server import manifests
from axon_ps.coordinator.server.shell import Shell
from axon_ps.errors import AxonError, Busy, CheckpointError, CheckpointNotFound, InvalidRequest

if TYPE_CHECKING:
    from axon_ps.storage.manifest import Manifest

_PREFIX = "step-"
_logger = logging.getLogger(__name__)

Save = Callable[[Caller, str, str], Awaitable[CheckpointReply]]
"""Writes a checkpoint: for whom, where, and what is saved with it, as JSON."""


class AutomaticCheckpoints:
    """The checkpoints of one job that nobody asks for.

    Args:
        shell: the coordinator.
        policy: where, when and how many.
        save: writes one.
    """

    def __init__(self, shell: Shell, policy: CheckpointPolicy, save: Save) -> None:
        self._shell = shell
        self._policy = policy
        self._save_to = save
        self._caller = Caller(job=shell.state.config.job, incarnation="")
        self._schedule = CheckpointSchedule(policy, self._version, shell.now())
        self._models = self._epochs
        self._refused: dict[str, str] = {}  # by URI, when it was made: not tried again in vain

    async def run(self) -> None:
        """Do so until cancelled."""
        while True:
            try:
                await self._step()
            except Exception as error:
                retry_s = self._schedule.failed(self._shell.now())
                level = logging.INFO if isinstance(error, Busy) else logging.ERROR
                _logger.log(
                    level, "%s; trying again after %.0f s", error, retry_s, exc_info=not isinstance(error, AxonError)
                )
            await self._shell.changed(self._schedule.wait_s(self._shell.now()))

    async def _step(self) -> None:
        if not self._schedule.may_try(self._shell.now()):
            return
        if why := self._shell.state.lost_parameters:
            await self._restore(why)
        elif self._models != self._epochs:
            self._models = self._epochs
            self._schedule.restart(self._version)
        elif self._schedule.due(self._version, self._shell.now()):
            await self._save()

    @property
    def _epochs(self) -> list[tuple[int, int]]:
        """Which models there are, and how often each was restored."""
        return [(number, epoch) for number, epoch, _ in self._shell.state.position]

    @property
    def _version(self) -> int:
        return sum(version for _, _, version in self._shell.state.position)

    async def _save(self) -> None:
        version = self._version
        uri = f"{self._policy.directory.rstrip('/')}/{_PREFIX}{version:010d}"
        await self._save_to(self._caller, uri, "")
        await asyncio.to_thread(_verify, uri)
        self._schedule.written(version, self._shell.now())
        _logger.info("checkpoint %s is complete and verified", uri)
        await asyncio.to_thread(_remove_old, self._policy)

    async def _restore(self, why: str) -> None:
        """Restore the newest checkpoint that can be; what is passed over is logged.

        Raises:
            CheckpointNotFound: none can.
            AxonError: the restore was broken off: a server was lost again, or somebody restored something else.
        """
        for found in reversed(await asyncio.to_thread(self._candidates)):
            _logger.warning("%s: restoring %s, version %d", why, found.uri, found.version)
            try:
                fitting = await asyncio.to_thread(manifests.find, found.uri, self._shell.state.specs)
                await self._shell.call(
                    lambda call, fitting=fitting: self._shell.state.restore(  # type: ignore[misc]
                        call, self._caller, fitting.resumes, self._shell.now()
                    )
                )
            except (CheckpointError, InvalidRequest) as error:
                self._refused[found.uri] = found.created
                _logger.error("checkpoint %s is passed over: %s", found.uri, error)
                continue
            _logger.warning("the job goes on from %s, version %d", found.uri, found.version)
            return
        raise CheckpointNotFound(f"{why}, and {self._policy.directory} has no checkpoint that can be restored")

    def _candidates(self) -> list[Manifest]:
        """The checkpoints that may be restored, oldest first."""

        def damaged(uri: str, error: AxonError) -> None:
            if self._refused.setdefault(uri, "") == "":
                _logger.error("checkpoint %s is passed over: %s", uri, error)

        found = _written(self._policy.directory, damaged)
        return [manifest for manifest in found if self._refused.get(manifest.uri) != manifest.created]


def newest(directory: str) -> str:
    """The checkpoint in the directory to begin with; empty when there is none.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    found = _written(directory)
    return found[-1].uri if found else ""


def _written(directory: str, damaged: Callable[[str, AxonError], None] | None = None) -> list[Manifest]:
    """The complete checkpoints in a directory, in the order in which they were written."""
    from axon_ps.storage.manifest import list_checkpoints

    return sorted(list_checkpoints(directory, damaged), key=lambda manifest: manifest.created)


def _verify(uri: str) -> None:
    """Read a checkpoint that was just written; one that is damaged is no checkpoint any more.

    Raises:
        CheckpointError: it is damaged.
    """
    from axon_ps.storage.manifest import read_manifest, remove, verify

    try:
        verify(uri)
    except CheckpointError:
        remove(read_manifest(uri))
        raise


def _remove_old(policy: CheckpointPolicy) -> None:
    """Remove what was written here and is older than those that remain."""
    from axon_ps.storage.manifest import remove

    ours = [m for m in _written(policy.directory) if m.uri.rpartition("/")[2].startswith(_PREFIX)]
    for manifest in ours[: -policy.limit]:
        remove(manifest)
