"""`NcclBackend`: collectives of GPUs through NCCL, on cupy arrays.

Owns: the order of calls on streams and communicators, and the end of calls. Ranks compare their calls by a small
all-gather before each collective. Refuses: to compose collectives of NCCL's operations (`calls`).

Invariants:
- Before a call the calling thread's current stream, on which the data was computed, is synchronized. The call runs on
  the group's own stream, which is synchronized after it. On the caller's stream, two ranks could enqueue the calls of
  two groups in opposite orders, and wait for each other for ever.
- NCCL matches calls by their order only. So one collective at a time runs on the group's communicator. Messages have
  tags and come from any thread, so they have communicators of their own, one for each direction between two ranks. Both
  ends agree in the group's store which message is next.
- A watchdog checks for NCCL's asynchronous errors and for the deadline, and aborts the communicators: NCCL itself would
  wait for ever, in the device or in the call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from axon_ps.collectives.backends import header, reason
from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.backends.nccl.calls import NcclCalls, address
from axon_ps.collectives.backends.nccl.messages import Messages
from axon_ps.collectives.backends.nccl.symbols import NCCL_DTYPES, NcclUniqueId, version_of
from axon_ps.collectives.backends.nccl.watchdog import Watchdog
from axon_ps.collectives.backends.request import Request, check_message
from axon_ps.collectives.cuda import load, load_nccl
from axon_ps.errors import AxonError, Closed, InvalidRequest, Misuse, NcclError, Timeout, again
from axon_ps.types import NUMBERS, Array, DType

_LATE_S = 0.5
_FAILED = b"failed: "


class _Late(Timeout):
    """The watchdog's error, until it is known which rank is missing."""


class NcclBackend(Backend):
    """The collectives of a group of GPUs, one for each rank.

    Args:
        unique_id: the id that `generate_unique_id` returned on one rank.
        rank: our position.
        world_size: number of ranks. All of them must make the backend together.
        device: index of our GPU.
        context: the group; None = the ranks share nothing but the unique id: messages then cannot be sent, and a
            time-out cannot name the missing ranks.

    Raises:
        NcclError: there is no GPU or no cupy, or NCCL failed.
        Timeout: some ranks did not make it in time.
    """

    name: ClassVar[str] = "nccl"
    dtypes = NUMBERS

    def __init__(
        self,
        unique_id: NcclUniqueId,
        rank: int,
        world_size: int,
        device: int = 0,
        *,
        context: GroupContext | None = None,
    ) -> None:
        super().__init__(context or mock_contexts(world_size, name="nccl")[rank])
        self.device = device
        self._has_store = context is not None
        self._cupy = load()
        self._nccl = load_nccl()
        self._lock = threading.Lock()
        self._error: AxonError | None = None
        self._settling = threading.Lock()
        self._sequence = -1
        self._comms: list[Any] = []
        comm = self._connect(unique_id, world_size, rank)
        self._calls = NcclCalls(self._cupy, self._nccl, comm, rank, world_size)
        with self._cupy.cuda.Device(device):
            self._own_stream = self._cupy.cuda.Stream(non_blocking=True)
        self._messages = Messages(self.context, self._connect_pair, self.generate_unique_id)
        self._watchdog = Watchdog(f"axon-ps-nccl-{self.context.name}"[:60], self._async_error, self._expire)

    @classmethod
    def create(cls, context: GroupContext, *, device: int | None = None) -> NcclBackend:
        """Make the backend of a group: its first rank makes the unique id, the others find it in the group's store.

        Args:
            context: the group. All ranks must make the backend together.
            device: index of our GPU; None = by our position among the workers of our node.

        Raises:
            NcclError: there is no GPU or no cupy, or NCCL failed.
            Timeout: some ranks did not come.
        """
        key = _id_key(context)
        if context.rank == 0:
            try:
                unique_id = cls.generate_unique_id()
            except AxonError as error:
                context.store.put(key, _FAILED + str(error).encode())
                raise
            context.store.put(key, unique_id.value)
        else:
            value = context.store.wait(key, context.timeout_s)
            if value.startswith(_FAILED):
                raise NcclError(f"rank {context.ranks[0]}: {value[len(_FAILED) :].decode()}")
            unique_id = NcclUniqueId(value)
        if device is None:
            device = context.members[context.rank].local_rank % cls.device_count()
        return cls(unique_id, context.rank, len(context.ranks), device, context=context)

    @classmethod
    def create_world(cls, devices: list[int]) -> list[NcclBackend]:
        """Make a backend for each of these GPUs of this process, by rank; each is for a thread of its own.

        Raises:
            NcclError: there is no GPU or no cupy, or NCCL failed.
        """
        unique_id = cls.generate_unique_id()
        made: dict[int, NcclBackend | Exception] = {}

        def make(context: GroupContext) -> None:
            try:
                made[context.rank] = cls(unique_id, context.rank, len(devices), devices[context.rank], context=context)
            except Exception as error:
                made[context.rank] = error

        threads = [threading.Thread(target=make, args=(c,)) for c in mock_contexts(len(devices), name="nccl")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        backends = [b for _, b in sorted(made.items()) if isinstance(b, NcclBackend)]
        errors = [b for b in made.values() if isinstance(b, Exception)]
        if errors:
            for backend in backends:
                backend.close()
            raise errors[0]
        return backends

    def sibling(self, context: GroupContext) -> NcclBackend:
        """See `Backend.sibling`; it is on our GPU.

        Raises:
            Misuse: the ranks share nothing but the unique id.
        """
        if not self._has_store:
            raise Misuse(
                "an NcclBackend made from a unique id alone has no sub-groups: give it a context, make it by "
                "NcclBackend.create_world, or ask a world for the group"
            )
        return type(self).create(context, device=self.device)

    @staticmethod
    def generate_unique_id() -> NcclUniqueId:
        """Make a new unique id, for one communicator.

        Raises:
            NcclError: there is no GPU or no cupy.
        """
        load()
        return NcclUniqueId.of(load_nccl().get_unique_id())

    @staticmethod
    def nccl_version() -> tuple[int, int, int]:
        """Return the version of NCCL: (major, minor, patch).

        Raises:
            NcclError: there is no GPU or no cupy.
        """
        load()
        return version_of(load_nccl().get_version())

    @staticmethod
    def device_count() -> int:
        """Return the number of GPUs that this process sees.

        Raises:
            NcclError: there is no GPU or no cupy.
        """
        return int(load().cuda.runtime.getDeviceCount())

    def synchronize(self) -> None:
        """Return when everything on the current stream of our GPU is done."""
        with self._cupy.cuda.Device(self.device):
            self._cupy.cuda.get_current_stream().synchronize()

    # ------------------------------------------------------------------ collectives

    def run(self, request: Request, timeout_s: float) -> None:
        """See `Backend.run`."""
        request.check(self.rank, self.world_size, self.dtypes)
        self._sequence = request.call.sequence
        with self._watched(timeout_s, str(request.call)):
            self._wait()  # for the data
            with self._own_stream:
                self._agree(request)
                self._calls.run(request)
                self._wait()

    @contextlib.contextmanager
    def _watched(self, timeout_s: float, what: str, peer: int = -1) -> Iterator[None]:
        """Run the body, which calls NCCL, on our device and under the watchdog, and turn its errors into ours."""
        if self._error is not None:
            with self._settling:
                raise again(self._error)
        try:
            with self._cupy.cuda.Device(self.device), self._watchdog.until(time.monotonic() + timeout_s):
                yield
            failure: BaseException | None = None
        except InvalidRequest:
            raise
        except Exception as error:
            failure = error
        if failure is None and self._error is None:
            return
        with self._settling:
            self._settle(failure, what, timeout_s, peer)
        assert self._error is not None
        raise again(self._error) from failure

    def _settle(self, failure: BaseException | None, what: str, timeout_s: float, peer: int) -> None:
        """Find out which error has ended the group, publish it, and abort."""
        if self._error is not None and not isinstance(self._error, _Late):
            return
        ended: AxonError
        if isinstance(self._error, _Late) or isinstance(failure, Timeout):
            ended = Timeout(f"{self._missing(peer)} did not come to {what} within {timeout_s:g} s")
        elif isinstance(failure, AxonError):
            ended = failure
        else:
            self._publish_late()
            found = reason.find(self.context, self.name, 2 * _LATE_S)
            ended = found or NcclError(f"NCCL failed in {what}: {failure}")
        reason.publish(self.context, self.name, ended)
        self.abort(ended)
        with self._lock:
            if isinstance(self._error, _Late):
                self._error = again(ended)

    def _agree(self, request: Request) -> None:
        """Exchange headers, and check that all ranks make the same call."""
        mine = self._cupy.asarray(header.encode(request, self.world_size))
        headers = self._calls.gather(mine)
        self._wait()
        if request.call.sequence == 0 and self._has_store and self.rank == 0:
            self.context.store.delete(_id_key(self.context))  # every rank has it
        header.check(list(headers.get().reshape(self.world_size, -1)), request.call, self.context)

    def _wait(self) -> None:
        """Return when all work that was enqueued on the current stream is done."""
        self._cupy.cuda.get_current_stream().synchronize()
        if self._error is not None:
            raise again(self._error)

    # ------------------------------------------------------------------ point to point

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`; it returns when the receiver has the message."""
        self._check_message(data, dtype, to, tag, receiving=False)
        with self._watched(timeout_s, f"a message with tag {tag}", to):
            self._messages.send(data, dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        self._check_message(data, dtype, source, tag, receiving=True)
        with self._watched(timeout_s, f"a message with tag {tag}", source):
            sender = self._messages.recv(data, dtype, source, tag, timeout_s)
        return sender

    def _check_message(self, data: Array, dtype: DType, peer: int, tag: int, *, receiving: bool) -> None:
        if dtype not in self.dtypes:
            raise InvalidRequest(f"nccl does not send {dtype.value}; use a backend for host memory")
        check_message(data, dtype, peer, tag, self.world_size, receiving=receiving)
        if peer == self.rank or self.world_size == 1:
            raise InvalidRequest(f"rank {self.rank} cannot exchange messages with itself")
        if not self._has_store:
            raise InvalidRequest("messages need a group's store; make the backend with NcclBackend.create(context)")

    def _connect_pair(self, unique_id: NcclUniqueId, end: int) -> Callable[[Array, DType], None]:
        """Return a function that moves messages in one direction between two ranks: end 0 sends, end 1 receives."""
        comm = self._connect(unique_id, 2, end)

        def move(array: Array, dtype: DType) -> None:
            stream = self._cupy.cuda.Stream(non_blocking=True)
            self._cupy.cuda.get_current_stream().synchronize()  # for the data
            one_way = comm.recv if end else comm.send
            one_way(address(array), array.size, NCCL_DTYPES[dtype], 1 - end, int(stream.ptr))
            stream.synchronize()

        return move

    # ------------------------------------------------------------------ errors, the end

    def _connect(self, unique_id: NcclUniqueId, world_size: int, rank: int) -> Any:
        """Make a communicator; all of its ranks must call this together."""
        made: list[Any] = []
        errors: list[Exception] = []

        def connect() -> None:
            try:
                given = unique_id.as_of(self._cupy.__version__)
                with self._cupy.cuda.Device(self.device):
                    made.append(self._nccl.NcclCommunicator(world_size, given, rank))
            except Exception as error:  # cupy's errors are its own
                errors.append(error)

        # NCCL waits for the other ranks for ever; after a time-out this thread is left behind.
        thread = threading.Thread(target=connect, name="axon-ps-nccl-join", daemon=True)
        thread.start()
        thread.join(self.context.timeout_s)
        if errors:
            name = self.context.name
            raise NcclError(f"NCCL cannot make group {name!r} on device {self.device}: {errors[0]}") from errors[0]
        if not made:
            raise Timeout(f"NCCL group {self.context.name!r} was not complete in {self.context.timeout_s:g} s")
        comm = made[0]
        with self._lock:
            self._comms.append(comm)
        return comm

    def _async_error(self) -> AxonError | None:
        with self._lock:
            if self._error is not None:
                return None
            try:
                for comm in self._comms:
                    comm.check_async_error()
            except Exception as error:  # cupy's errors are its own
                return NcclError(f"NCCL failed in group {self.context.name!r}: {error}")
        return None

    def _expire(self, error: AxonError | None) -> None:
        if error is None:
            error = _Late(f"a call of group {self.context.name!r} was not done in time")
            self._publish_late()
        self.abort(error)

    def _publish_late(self) -> None:
        """Publish that this rank came to the call, and that the others did not come in time."""
        with contextlib.suppress(AxonError):
            self.context.store.put(self._late_key(self.rank), b"late")

    def _late_key(self, rank: int) -> str:
        return f"nccl/{self.context.name}/late/{self._sequence}/{rank}"

    def _missing(self, peer: int) -> str:
        """Name the ranks that did not come. NCCL does not: ranks that timed out are in the store, others are not."""
        if peer >= 0:
            return f"rank {self.context.ranks[peer]}"
        if not self._has_store:
            return "some rank"
        deadline, missing = time.monotonic() + _LATE_S, []
        for position, rank in enumerate(self.context.ranks):
            if position != self.rank:
                try:
                    self.context.store.wait(self._late_key(position), max(0.01, deadline - time.monotonic()))
                except AxonError:
                    missing.append(rank)
        return f"rank {', '.join(map(str, missing))}" if missing else "some rank"

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`; it also ends calls that run on the device."""
        with self._lock:
            if self._error is not None:
                return
            self._error = again(error)
            comms = list(self._comms)
        # It may take a while, and our caller may be the thread that is notified of lost members.
        threading.Thread(target=self._abort_all, args=(comms,), name="axon-ps-nccl-abort", daemon=True).start()
        self._messages.abort(error)

    def _abort_all(self, comms: list[Any]) -> None:
        for comm in comms:
            with self._lock, contextlib.suppress(Exception):  # nothing else can be done about a communicator
                comm.abort()

    def close(self) -> None:
        """See `Backend.close`."""
        self._watchdog.close()
        with self._lock:
            comms, self._comms = self._comms, []
            healthy = self._error is None
            self._error = Closed(f"the backend of group {self.context.name!r} was closed")
        for comm in comms if healthy else []:
            with contextlib.suppress(Exception):
                comm.destroy()


def _id_key(context: GroupContext) -> str:
    return f"nccl/{context.name}/id"
