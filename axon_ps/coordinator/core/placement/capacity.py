"""Checks that the shard servers have enough memory, made before anything is durable. Pure.

When servers join, and with every heartbeat, they report the bytes that they can still allocate and their bytes in RAM.
Servers of one machine share the available memory (`ServerMemory.pool`), so they are counted together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.errors import Busy, MemberLost
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.memory import format_bytes, placed_bytes, slice_sizes
from axon_ps.sharding.placement import Placement
from axon_ps.types import OptimizerSpec
from axon_ps.wire.events import ServerMemory

WHAT_TO_DO = (
    "start more shard servers (--shards), on machines with more memory, register a smaller model or an optimizer with "
    "less state, or let servers use more (--memory-gb)"
)


class ServerCapacity:
    """The memory of the shard servers, and the part that the models take.

    Args:
        models: the models of the job.
        servers: the live shard servers.
        replicas: of the job.
    """

    def __init__(self, models: Models, servers: Iterable[RosterEntry], replicas: int) -> None:
        self._models = models
        self._replicas = replicas
        self._servers = {s.member.rank: s for s in servers}

    def sizes(
        self, model: Model, spec: JobSpec | None = None, optimizer: OptimizerSpec | None = None
    ) -> tuple[int, ...]:
        """Return the bytes of each slice of a model, with its own spec and optimizer unless others are given."""
        r = model.registration
        spec = spec or r.spec
        assert spec is not None
        return slice_sizes(spec, optimizer or r.optimizer, model.holders.num_shards, self._replicas)

    def check(
        self,
        changes: Mapping[int, tuple[Model, Placement]],
        what: str,
        spec: JobSpec | None = None,
        optimizer: OptimizerSpec | None = None,
    ) -> None:
        """Check that the servers can hold changed models, beside the others.

        Args:
            changes: by number, the models that change, and their future placements.
            what: the change as a noun phrase, for the error.
            spec, optimizer: of the changed models, if not their own.
        """
        needed: Counter[int] = Counter()
        for model, placement in changes.values():
            needed.update(placed_bytes(placement, self.sizes(model, spec, optimizer)))
        taken = self._taken({m.number for m, _ in changes.values()})
        short = []
        for ranks, free in self._pools():
            wanted = sum(needed[rank] for rank in ranks)
            if wanted and sum(taken[rank] for rank in ranks) + wanted > free:
                short += [self._describe(rank, needed[rank], taken[rank], free, len(ranks)) for rank in ranks]
        if short:
            raise Busy(f"{what} is refused, nothing has changed: {'; '.join(short)}; {WHAT_TO_DO}")

    def check_there(self, placement: Placement, what: str) -> None:
        """Check that all servers of a placement are live, and so have reported their memory."""
        if missing := sorted(placement.servers - self._servers.keys()):
            raise MemberLost(
                f"{what} has to wait: shard server {format_ranks(missing)} is not there to say whether it can hold it"
            )

    def full(self, model: Model) -> frozenset[int]:
        """Return the ranks of the servers without free memory for the largest slice of a model."""
        largest, taken, found = max(self.sizes(model), default=0), self._taken(set()), set[int]()
        for ranks, free in self._pools():
            if sum(taken[rank] for rank in ranks) + largest > free:
                found.update(ranks)
        return frozenset(found)

    def _taken(self, without: set[int]) -> Counter[int]:
        """Return the bytes that every server holds, or is to hold, of the models that fit."""
        taken: Counter[int] = Counter()
        for model in self._models.registered:
            placement = model.holders.parameters.placement
            if model.number not in without and not model.holders.out_of_memory and placement is not None:
                taken.update(placed_bytes(placement, self.sizes(model)))
        return taken

    def _pools(self) -> Iterable[tuple[list[int], int]]:
        """Yield for each pool of memory its servers, and the bytes that they can have together."""
        pools: defaultdict[str, dict[int, ServerMemory]] = defaultdict(dict)
        for rank, entry in self._servers.items():
            if (memory := entry.newest_memory) is not None:
                pools[memory.pool or entry.member.incarnation][rank] = memory
        for servers in pools.values():
            available = min(m.available_bytes for m in servers.values())
            yield sorted(servers), available + sum(m.resident_bytes for m in servers.values())

    def _describe(self, rank: int, needed: int, held: int, free: int, sharing: int) -> str:
        beside = f" beside the {format_bytes(held)} of other models" if held else ""
        sharers = f", which {sharing} servers of its machine share" if sharing > 1 else ""
        return (
            f"shard server {rank} would need {format_bytes(needed)}{beside} and can have {format_bytes(free)}{sharers}"
        )
