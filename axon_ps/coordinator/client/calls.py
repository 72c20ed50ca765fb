"""The coordinator's unary methods that members and operators call: barriers, the key-value store, checkpoints.

`Calls` is the common base of their clients. A member's calls are delayed until its session is up, so a restart of the
coordinator is a pause. A call is retried until its deadline after errors that make this safe; `status` never is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from axon_ps.coordinator.messages import checkpoint_from_proto, files_to_proto, status_from_proto
from axon_ps.errors import AxonError, Broken, Closed, GenerationChanged, MemberLost, NotLeader, Unreachable
from axon_ps.rpc.deadlines import Deadline, retry
from axon_ps.rpc.service import Stub
from axon_ps.sharding.job import JobSpec
from axon_ps.types import OptimizerSpec
from axon_ps.wire import codec
from axon_ps.wire.events import CheckpointReply, Registered, SnapshotFile, Status
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, placement_pb2, status_pb2

DEFAULT_TIMEOUT_S = 60.0
"""Deadline of a call that does not depend on other members."""

ANSWER_S = 2.0
"""Seconds after its deadline in which a call may be answered: the coordinator's error names the missing members."""

RETRY_IDEMPOTENT = (Broken, GenerationChanged)
"""After these an idempotent call is retried: the connection broke, or this process was not a member."""

NOT_BEGUN = (Unreachable, NotLeader)
"""After these errors the call was not begun, so every call can be retried."""

_RETRY_ANY = (*NOT_BEGUN, GenerationChanged)
"""Likewise, also if this process was not a member."""


class Calls(ABC):
    """Unary calls to a coordinator.

    Each also raises the errors of the connection, and `InvalidRequest` for a malformed argument.

    Attributes:
        retries: whether calls are retried if that is safe. Otherwise they fail at once.
    """

    retries = True

    @abstractmethod
    def context(self) -> common_pb2.CallContext:
        """Return the context of a call, which names the caller."""

    @abstractmethod
    async def _connected(self, deadline: Deadline) -> Stub:
        """Return the stub to call, as soon as there is a connection.

        Raises:
            Timeout: there is none before the deadline.
            AxonError: there will never be one.
        """

    @abstractmethod
    async def _reached(self, generation: int, deadline: Deadline) -> None:
        """Return once our session has received `generation` or a later one."""

    @property
    def _is_over(self) -> bool:
        """True if the connection was closed permanently, and not replaced by another one."""
        return True

    async def register(
        self,
        spec: JobSpec | None = None,
        optimizer: OptimizerSpec | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        *,
        name: str = "",
        later: bool = False,
    ) -> Registered:
        """Give a model of the job its layout or optimizer, or check ours against the one it has.

        Args:
            spec: layout, dtypes and policy.
            optimizer: the optimizer.
            timeout_s: seconds that it may take.
            name: of the model; empty = that of the first model without a name.
            later: the optimizer is to replace the model's with a later step: it is only checked.

        Raises:
            LayoutMismatch: the job has another one. The message has the first difference.
            InvalidRequest: it is invalid, or a shard server does not know the optimizer or a compressor.
            Misuse: an optimizer comes before any layout.
            Busy: the job can have no more models, or the shard servers have no memory for it.
            CheckpointError: the job is to resume from a checkpoint that cannot be read.
            MemberLost: a shard server that is to hold slices of the model did not come in time.
            Timeout: the worker whose layout counts has not registered it. The message names that worker.

        After an error: registering again is harmless.
        """
        request = coordinator_pb2.RegisterRequest(
            context=self.context(),
            spec=None if spec is None else codec.job_spec_to_proto(spec),
            optimizer=None if optimizer is None else codec.optimizer_to_proto(optimizer),
            name=name,
            later=later,
        )
        deadline = Deadline(timeout_s)

        def register() -> coordinator_pb2.RegisterRequest:
            request.timeout_s = deadline.remaining()
            return request

        again = (*RETRY_IDEMPOTENT, MemberLost)
        reply = await self._call("Register", register, deadline, again=again, waits=True)
        await self._reached(reply.generation, deadline)
        return Registered(
            first=reply.first,
            initialized=reply.initialized,
            version=reply.version,
            upload=reply.upload,
            generation=reply.generation,
            model=reply.model,
        )

    async def release(self, model: int, name: str, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bool:
        """Release a model, given by number and name; return False if it was released before.

        Raises:
            InvalidRequest: the model of that number has another name.
            Busy: a checkpoint is being written.

        After an error: it may be gone. Releasing it again is harmless.
        """
        request = coordinator_pb2.ReleaseRequest(context=self.context(), model=model, name=name)
        reply = await self._call("Release", lambda: request, Deadline(timeout_s), again=RETRY_IDEMPOTENT)
        return bool(reply.released)

    async def barrier(self, name: str, ranks: Sequence[int] = (), timeout_s: float | None = None) -> int:
        """Return when every worker in `ranks` (all workers, when empty) has called this with the same name.

        Returns:
            The generation in which it opened. Our membership is at least that one.

        Raises:
            Timeout: some have not come. The message names them.
            MemberLost: one of `ranks` was lost while we waited.
            GenerationChanged: `ranks` is empty, and the set of all workers has changed while we waited.
            Disagreement: the missing workers wait in a step for workers that wait here.
            InvalidRequest: the name is empty or too long, or this worker is not one of `ranks`.

        After an error: others may have passed. If the connection to the coordinator breaks, the call is retried. If
        the barrier had just opened, no other worker comes, and this one waits until the time-out.
        """
        deadline = Deadline(timeout_s)

        def arrive() -> coordinator_pb2.BarrierRequest:
            return coordinator_pb2.BarrierRequest(
                context=self.context(), name=name, ranks=ranks, timeout_s=deadline.remaining()
            )

        reply = await self._call("Barrier", arrive, deadline, again=(Broken,), waits=True)
        await self._reached(reply.generation, deadline)
        return int(reply.generation)

    async def kv_put(self, key: str, value: bytes, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Store a value, at most 1 MiB, under a key of 1 to 512 bytes.

        Raises:
            InvalidRequest: key or value has another size.
            Busy: the store is full.
        """
        await self._kv(coordinator_pb2.KV_OP_PUT, key, timeout_s, value=value)

    async def kv_get(self, key: str, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bytes | None:
        """Return the value of a key; None when there is none."""
        reply = await self._kv(coordinator_pb2.KV_OP_GET, key, timeout_s)
        return bytes(reply.value) if reply.found else None

    async def kv_wait(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of a key as soon as there is one.

        Raises:
            Timeout: it was not stored in time.
            Busy: too many calls are pending.
        """
        return bytes((await self._kv(coordinator_pb2.KV_OP_WAIT, key, timeout_s, waits=True)).value)

    async def kv_add(self, key: str, amount: int, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> int:
        """Add to a decimal integer (0 when absent) and return the sum.

        Raises:
            InvalidRequest: the stored value is not an integer, or the sum has more than 64 bits.
            Busy: the store is full.

        After an error: when it is `Broken` or `Timeout`, the amount may have been added. It is not added again.
        """
        return int((await self._kv(coordinator_pb2.KV_OP_ADD, key, timeout_s, amount=amount, again=_RETRY_ANY)).sum)

    async def kv_compare_and_set(
        self, key: str, expected: bytes, value: bytes, timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> bool:
        """Store `value` if the present one equals `expected` (empty = absent); return True if it was stored.

        After an error: when it is `Broken` or `Timeout`, it may have been stored.
        """
        return (await self.kv_swap(key, expected, value, timeout_s))[0]

    async def kv_swap(
        self, key: str, expected: bytes, value: bytes, timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> tuple[bool, bytes]:
        """Do `kv_compare_and_set`, and also return the value present afterwards (empty = absent)."""
        reply = await self._kv(
            coordinator_pb2.KV_OP_COMPARE_AND_SET, key, timeout_s, value=value, expected=expected, again=_RETRY_ANY
        )
        return bool(reply.found), bytes(reply.value)

    async def kv_first(self, key: str, value: bytes, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bytes:
        """Store a value (not empty) unless the key has one; return the value it has afterwards."""
        reply = await self._kv(coordinator_pb2.KV_OP_COMPARE_AND_SET, key, timeout_s, value=value, expected=b"")
        return bytes(reply.value)

    async def kv_delete(self, key: str, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bool:
        """Remove a key; return True if it existed.

        After an error: when it is `Broken` or `Timeout`, it may have been removed.
        """
        return bool((await self._kv(coordinator_pb2.KV_OP_DELETE, key, timeout_s, again=_RETRY_ANY)).found)

    async def save_checkpoint(
        self,
        uri: str,
        extra_json: str = "",
        timeout_s: float | None = None,
        *,
        states: Sequence[SnapshotFile] = (),
        background: bool = False,
    ) -> CheckpointReply:
        """Have the shard servers write the state at the current version; return when the manifest is written.

        Args:
            uri: directory or fsspec URI that every shard server and the coordinator reach.
            extra_json: a JSON object for the caller of a restore.
            timeout_s: seconds that it may take.
            states: files of workers' own state, which are written already.
            background: whether it may take longer, so that steps are slowed less.

        Raises:
            CheckpointError: it could not be written.
            MemberLost: a shard server is missing, or was lost before it had written its files.
            Misuse: there is nothing to save.
            InvalidRequest: `uri`, `extra_json` or `states` is malformed.
            Busy: another one is being written.

        After an error: there may be files at `uri`, but without a manifest they are not a checkpoint.
        """
        request = coordinator_pb2.SaveCheckpointRequest(
            context=self.context(),
            uri=uri,
            extra_json=extra_json,
            background=background,
            states=files_to_proto(states),
        )
        reply = await self._call("SaveCheckpoint", lambda: request, Deadline(timeout_s), again=NOT_BEGUN)
        return checkpoint_from_proto(reply)

    async def restore_checkpoint(
        self, uri: str, timeout_s: float | None = None, *, models: Sequence[str] = ()
    ) -> CheckpointReply:
        """Have the shard servers load a checkpoint; return when all have loaded it. The current steps abort.

        Args:
            uri: the checkpoint, or a directory of checkpoints (the newest complete one is taken).
            timeout_s: seconds that it may take.
            models: names of the models that go back to it; empty = all.

        Raises:
            CheckpointError: it cannot be read. If the manifest shows that, nothing has changed.
            InvalidRequest: it was saved from other models.
            Misuse: no worker has registered a layout yet.
            Busy: the shard servers have no memory for it. Nothing has changed.

        After an error: after `Broken` or `Timeout` the restore may still go on. `status` shows it.
        """
        request = coordinator_pb2.RestoreCheckpointRequest(context=self.context(), uri=uri, models=models)
        deadline = Deadline(timeout_s)
        reply = await self._call("RestoreCheckpoint", lambda: request, deadline, again=NOT_BEGUN)
        return checkpoint_from_proto(reply)

    async def drain(self, rank: int, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> int:
        """Have a shard server give up its slices while training goes on. Then it leaves and ends.

        Call it again for the progress. The server has left the job when `status` does not name it any more.

        Returns:
            The number of slices that it still holds.

        Raises:
            InvalidRequest: there is no such shard server, or no other could take its slices.
            Misuse: parameters are being set or restored.
        """
        request = placement_pb2.DrainRequest(context=self.context(), rank=rank)
        reply = await self._call("Drain", lambda: request, Deadline(timeout_s), again=RETRY_IDEMPOTENT)
        return int(reply.slices)

    async def status(self, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Status:
        """Return the status of the job."""
        request = status_pb2.StatusRequest(context=self.context())
        return status_from_proto(await self._call("Status", lambda: request, Deadline(timeout_s), again=()))

    async def _kv(
        self,
        op: coordinator_pb2.KVOp,
        key: str,
        timeout_s: float | None,
        *,
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        again: tuple[type[AxonError], ...] = RETRY_IDEMPOTENT,
        waits: bool = False,
    ) -> Any:
        deadline = Deadline(timeout_s)

        def ask() -> coordinator_pb2.KVRequest:
            return coordinator_pb2.KVRequest(
                context=self.context(),
                op=op,
                key=key,
                value=value,
                expected=expected,
                amount=amount,
                timeout_s=deadline.remaining() if waits else 0.0,
            )

        return await self._call("KV", ask, deadline, again=again, waits=waits)

    async def _call(
        self,
        method: str,
        request: Callable[[], Message],
        deadline: Deadline,
        *,
        again: tuple[type[AxonError], ...],
        waits: bool = False,
    ) -> Any:
        """Call until the call succeeds, fails with an error after which a retry is useless, or times out.

        `MemberLost` is an answer about another member, never about a broken connection of this one. So the call is
        retried after it only if `again` has it.
        """

        async def attempt() -> tuple[Any, AxonError | None]:
            try:
                stub = await self._connected(deadline)
            except AxonError as error:  # final, even if the error class is a temporary one
                return None, error
            timeout_s = deadline.remaining() + (ANSWER_S if waits else 0.0)
            try:
                return await stub.call(method, request(), timeout_s=timeout_s), None
            except MemberLost as error:
                if MemberLost in again:
                    raise
                return None, error
            except Closed as error:
                if self._is_over:
                    return None, error
                raise Broken(f"the connection was replaced before {method} was done") from error

        reply, final = await retry(attempt, until=deadline, on=again if self.retries else (), max_s=1.0)
        if final is not None:
            raise final
        return reply
