"""One rank of `collectives.py`: runs the operations that the parent names, and reports their time.

    collectives_rank.py ADDRESS axon RANK N DIRECTORY    axon_ps, registered axon_ps, gloo and memcpy in one process
    collectives_rank.py ADDRESS mpi                      Open MPI, started by mpirun

The parent listens on a Unix socket; a rank that waits for a message uses no processor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any

import numpy as np

Operation = Callable[[], object]
TIMEOUT_S = 120.0


class AxonRank:
    """axon_ps and gloo over the same arrays; axon_ps over registered arrays, too."""

    def __init__(self, rank: int, n: int, directory: str) -> None:
        import torch
        import torch.distributed

        from axon_ps.collectives.backends.base import GroupContext
        from axon_ps.collectives.backends.shm.backend import SharedMemoryBackend
        from axon_ps.types import Member, Role

        dist: Any = torch.distributed  # torch does not export its stores
        torch.set_num_threads(1)
        self.rank, self.n, self.torch, self.dist = rank, n, torch, dist
        store = dist.FileStore(f"{directory}/store", n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
        members = tuple(Member(role=Role.WORKER, rank=r, incarnation=f"{r:032x}", node="here") for r in range(n))
        context = GroupContext(
            name="bench", rank=rank, ranks=tuple(range(n)), members=members, store=_Store(dist.PrefixStore("a", store))
        )
        self.backend = SharedMemoryBackend(context)
        self.sequence = 0

    def prepare(self, size_bytes: int) -> dict[tuple[str, str], Operation]:
        """Return the operations that can be measured with a full buffer of that size, by system and name."""
        from axon_ps.collectives.backends.base import Call, Request
        from axon_ps.collectives.backends.base import Operation as Op
        from axon_ps.types import DType, ReduceOp

        torch, dist, n, backend = self.torch, self.dist, self.n, self.backend
        numel = max(1, size_bytes // 4)
        share = numel // n
        counts = (share,) * n

        def run(operation: Any, counts: tuple[int, ...], data: Any, output: Any = None, op: Any = None) -> None:
            self.sequence += 1
            call = Call(sequence=self.sequence - 1, operation=operation, dtype=DType.F32, counts=counts, op=op)
            backend.run(Request(call=call, data=data, output=output), TIMEOUT_S)

        def ours(full: Any, part: Any) -> dict[str, Operation]:
            parts = full[: share * n]
            made: dict[str, Operation] = {"all_reduce": lambda: run(Op.ALL_REDUCE, (numel,), full, op=ReduceOp.SUM)}
            if share:
                made["all_gather"] = lambda: run(Op.ALL_GATHER, counts, part, parts)
                made["reduce_scatter"] = lambda: run(Op.REDUCE_SCATTER, counts, parts, part, ReduceOp.SUM)
            return made

        # numpy's memory for every system, Open MPI included: it asks for huge pages, which torch's does not.
        full, part, copy = (torch.from_numpy(np.zeros(m, np.float32) + 0) for m in (numel, max(1, share), numel))
        registered = backend.empty_shared((numel,), DType.F32), backend.empty_shared((share,), DType.F32)
        parts = full[: share * n]
        gloo: dict[str, Operation] = {"all_reduce": lambda: dist.all_reduce(full)}
        if share:
            pieces = list(parts.chunk(n))
            gloo["all_gather"] = lambda: dist.all_gather(pieces, part)
            gloo["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(part, parts)
        mine = part.numpy()[:share]
        result: dict[tuple[str, str], Operation] = {("gloo", op): f for op, f in gloo.items()}
        result |= {("axon", op): f for op, f in ours(full.numpy(), mine).items()}
        result |= {("registered", op): f for op, f in ours(*registered).items()}
        result["memcpy", "all_reduce"] = lambda: copy.copy_(full)
        return result

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        from axon_ps.collectives.backends.base import Call, Operation, Request

        self.sequence += 1
        call = Call(sequence=self.sequence - 1, operation=Operation.BARRIER)
        self.backend.run(Request(call=call), TIMEOUT_S)

    def close(self) -> None:
        """Leave both groups."""
        self.backend.close()
        self.dist.destroy_process_group()


class _Store:
    """torch's store with the interface of axon_ps's."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def wait(self, key: str, timeout_s: float) -> bytes:
        self._store.wait([key], timedelta(seconds=timeout_s))
        return bytes(self._store.get(key))

    def delete(self, key: str) -> None:
        self._store.delete_key(key)


class MpiRank:
    """Open MPI through mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.n = self.comm.Get_size()

    def prepare(self, size_bytes: int) -> dict[tuple[str, str], Operation]:
        """See `AxonRank.prepare`."""
        numel = max(1, size_bytes // 4)
        share = numel // self.n
        full, part = np.zeros(numel, np.float32) + 0, np.zeros(max(1, share), np.float32) + 0
        parts, mine = full[: share * self.n], part[:share]
        made: dict[tuple[str, str], Operation] = {
            ("openmpi", "all_reduce"): lambda: self.comm.Allreduce(self.mpi.IN_PLACE, full)
        }
        if share:
            made["openmpi", "all_gather"] = lambda: self.comm.Allgather(mine, parts)
            made["openmpi", "reduce_scatter"] = lambda: self.comm.Reduce_scatter_block(parts, mine)
        return made

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        self.comm.Barrier()

    def close(self) -> None:
        """Do nothing: mpi4py leaves by itself."""


def main() -> None:
    """Perform the parent's requests until it closes the connection."""
    address, system, *rest = sys.argv[1:]
    rank: Any = MpiRank() if system == "mpi" else AxonRank(int(rest[0]), int(rest[1]), rest[2])
    prepared: dict[tuple[str, str], Operation] = {}
    with Client(address, "AF_UNIX") as parent:
        parent.send("ready")
        while (word := parent.recv()) is not None:
            if word[0] == "prepare":
                prepared.clear()
                prepared = rank.prepare(word[1])
                parent.send(list(prepared))
                continue
            _, system, op, repetitions, warm = word
            operation = prepared[system, op]
            for _ in range(warm):
                operation()
            rank.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(repetitions):
                operation()
            parent.send(((time.perf_counter() - began) / repetitions, (time.process_time() - cpu) / repetitions))
            rank.barrier()
    rank.close()


if __name__ == "__main__":
    main()
