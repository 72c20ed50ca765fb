"""Value types that every package shares: dtypes, roles, members, decisions; pure data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from axon_ps.errors import InvalidRequest
from axon_ps.texts import suggestion

Array = NDArray[Any]
Hyper = Mapping[str, float]


INT8_BLOCK_NUMEL = 256
"""Numbers in one element of `DType.INT8_BLOCK`."""

_STORAGE: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),
    "f16": np.dtype(np.float16),
    "f64": np.dtype(np.float64),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
    "f8_e4m3": np.dtype(np.uint8),
    "f8_e5m2": np.dtype(np.uint8),
    "f8_e4m3fnuz": np.dtype(np.uint8),
    "f8_e5m2fnuz": np.dtype(np.uint8),
    "f8_e8m0": np.dtype(np.uint8),
    "f4_x2": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "u16": np.dtype(np.uint16),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    "c32": np.dtype([("real", "<f2"), ("imag", "<f2")]),
    "c64": np.dtype(np.complex64),
    "c128": np.dtype(np.complex128),
    "int8_block": np.dtype([("scale", "<f4"), ("quants", "i1", (INT8_BLOCK_NUMEL,))]),
}

_SPELLINGS: dict[str, tuple[str, ...]] = {
    "f32": ("float32", "fp32"),
    "bf16": ("bfloat16",),
    "f16": ("float16", "fp16", "half"),
    "f64": ("float64", "fp64", "double"),
    "i64": ("int64",),
    "i32": ("int32",),
    "u8": ("uint8",),
    "f8_e4m3": ("float8_e4m3fn", "float8_e4m3"),
    "f8_e5m2": ("float8_e5m2",),
    "f8_e4m3fnuz": ("float8_e4m3fnuz",),
    "f8_e5m2fnuz": ("float8_e5m2fnuz",),
    "f8_e8m0": ("float8_e8m0fnu",),
    "f4_x2": ("float4_e2m1fn_x2",),
    "i8": ("int8",),
    "i16": ("int16",),
    "u16": ("uint16",),
    "u32": ("uint32",),
    "u64": ("uint64",),
    "c32": ("complex32",),
    "c64": ("complex64",),
    "c128": ("complex128",),
}
"""Other names of the dtypes, torch's first."""


class DType(enum.Enum):
    """An element type on the wire. `.numpy` is its storage in numpy: bf16 has no numpy type and is held as uint16.

    An element of INT8_BLOCK is `INT8_BLOCK_NUMEL` numbers: their scale, f32, and an int8 for each; see
    `compress.int8_block`. An element of F4_X2 is two numbers. All others are one number each. Tensors are sent between
    ranks in those of `NUMBERS`. A parameter may also have one of the others, and then travels as its bits.

    Attributes:
        numpy: the numpy dtype that stores one element (uint16 for BF16, fields "scale" and "quants" for INT8_BLOCK).
        itemsize: bytes of one element.
        is_float: whether it is a floating-point number.
        spellings: the names by which users may give it.
        torch_name: the first of them: torch's, except of INT8_BLOCK.
    """

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F64 = "f64"
    I64 = "i64"
    I32 = "i32"
    U8 = "u8"
    BOOL = "bool"
    INT8_BLOCK = "int8_block"
    F8_E4M3 = "f8_e4m3"
    F8_E5M2 = "f8_e5m2"
    F8_E4M3FNUZ = "f8_e4m3fnuz"
    F8_E5M2FNUZ = "f8_e5m2fnuz"
    F8_E8M0 = "f8_e8m0"
    F4_X2 = "f4_x2"
    I8 = "i8"
    I16 = "i16"
    U16 = "u16"
    U32 = "u32"
    U64 = "u64"
    C32 = "c32"
    C64 = "c64"
    C128 = "c128"

    def __init__(self, name: str) -> None:
        self.numpy = _STORAGE[name]
        self.itemsize: int = self.numpy.itemsize
        self.is_float = name in ("f32", "bf16", "f16", "f64")
        self.spellings = (*_SPELLINGS.get(name, ()), name)
        self.torch_name = self.spellings[0]


NUMBERS = (DType.F32, DType.BF16, DType.F16, DType.F64, DType.I64, DType.I32, DType.U8, DType.BOOL)
"""The dtypes of tensors that ranks send and reduce."""

COLLECTIVE_DTYPES = (*NUMBERS, DType.INT8_BLOCK)
"""The dtypes that collectives take."""

ELEMENTS = tuple(dtype for dtype in DType if dtype is not DType.INT8_BLOCK)
"""The dtypes that a parameter can have."""

FLOATS = tuple(dtype for dtype in NUMBERS if dtype.is_float)
"""The dtypes in which models can compute."""

WIRE_DTYPES = (DType.F32, DType.BF16, DType.F16)
"""The dtypes in which parameters and gradients travel, and in which models are exported."""

_BY_SPELLING = {spelling: dtype for dtype in ELEMENTS for spelling in dtype.spellings}


def parse_dtype(
    given: object, what: str = "dtype", among: Sequence[DType] = WIRE_DTYPES, also: Sequence[str] = ()
) -> DType:
    """Return the dtype that was given.

    Args:
        given: a dtype of ours, torch's or numpy's, or one of `DType.spellings` in any case, also with "torch." before.
        what: the name of the argument or value, for the message.
        among: the dtypes that are accepted.
        also: the other values that the caller accepts, for the message.

    Raises:
        InvalidRequest: it is not one of these dtypes.
    """
    value = given.value if isinstance(given, DType) else given
    name = str(value).lower().removeprefix("torch.")
    found = _BY_SPELLING.get(name)
    if found is not None and found in among:
        return found
    accepted = ", ".join([*(dtype.torch_name for dtype in among), *also])
    known = [*(spelling for dtype in among for spelling in dtype.spellings), *also]
    meant = "" if found else suggestion(name, known, min_similarity=0.7)  # a known name is not misspelt
    raise InvalidRequest(f"{what} is {value!r}; use one of {accepted}{meant}")


_Member = TypeVar("_Member", bound=enum.Enum)


def parse_member(given: object, of: type[_Member], what: str, also: Sequence[str] = ()) -> _Member:
    """Return the member of an enum that was given, as YAML and torch's programs give it.

    Args:
        given: a member, its name or value ("full_shard"; case does not count, nor "-" for "_"), or a member of an enum
            of torch's with the name of one of ours.
        of: the enum.
        what: the name of the argument, for the message.
        also: the other values that the caller accepts, for the message.

    Raises:
        InvalidRequest: it is not one of them.
    """
    if isinstance(given, of):
        return given
    by_name = {_plain(name): member for name, member in of.__members__.items()}
    values = {member.value if isinstance(member.value, str) else member.name.lower(): member for member in of}
    by_name |= {_plain(value): member for value, member in values.items()}
    is_torchs = type(given).__module__.startswith("torch.") and not isinstance(given, type)
    name = getattr(given, "name", None) if is_torchs else given
    meant = ""
    if isinstance(name, str) and not isinstance(name, enum.Enum):
        if (found := by_name.get(_plain(name))) is not None:
            return found
        meant = suggestion(_plain(name), by_name)
    accepted = ", ".join([*values, *also])
    raise InvalidRequest(f"{what} is {given!r}; use one of {accepted} ({of.__name__}){meant}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


BUFFERS: Final = "buffers/"
"""The beginning of the key of a model's buffers among the attachments of checkpoints. Its name follows."""


class BackendName(enum.StrEnum):
    """The backends by name; public as `axon_ps.Backend`. A string is accepted wherever a name is expected.

    AUTO is the backend that fits the ranks' hosts.
    """

    AUTO = "auto"
    SHM = "shm"
    GRPC = "grpc"
    HIERARCHICAL = "hierarchical"
    GLOO = "gloo"
    NCCL = "nccl"
    MOCK = "mock"


Backend = BackendName
"""Its public name, `axon_ps.Backend`."""


class ReduceOp(enum.Enum):
    """Operations that combine the contributions of several ranks. `MEAN` and torch's `AVG` are names of `AVERAGE`."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"  # floating-point types only
    MEAN = AVG = AVERAGE
    BAND = "band"  # bitwise: integers and bool only
    BOR = "bor"
    BXOR = "bxor"


class Role(enum.Enum):
    """The roles of a job's members."""

    WORKER = "worker"
    SHARD = "shard"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One live process of the job.

    Attributes:
        role: worker or shard server.
        rank: stable for the life of the process. Workers and shard servers are numbered apart.
        incarnation: random id of this life of the process, 32 hex digits.
        node: the host (or container) it runs on. Workers of one node share it.
        address: "host:port" where a shard server listens; empty for workers.
        local_rank: position among the workers of its node.
        replica: position of the replica this worker contributes to, dense from 0; -1 for shard servers, and for workers
            whose replica lacks another one (`Grouping.rows`).
        joined: the generation in which it became a member.
    """

    role: Role
    rank: int
    incarnation: str
    node: str
    address: str = ""
    local_rank: int = 0
    replica: int = -1
    joined: int = 0

    @property
    def id(self) -> str:
        """The name of this process as a member: a process that was lost and came back has another id than before.

        Other processes store their state of a member (its memory, groups and messages) under this name, so that it ends
        with the membership.
        """
        return f"{self.incarnation}@{self.joined}"


@lru_cache(maxsize=8)
def _checked_rows(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return rows that can be, as the same object for equal ones: they are compared often, and may be long."""
    ranks = [rank for row in rows for rank in row]
    if len({len(row) for row in rows}) > 1 or not all(rows):
        raise InvalidRequest(f"replicas have {sorted({len(row) for row in rows})} workers; give all the same")
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < MAX_RANKS for rank in ranks):
        raise InvalidRequest(
            f"replicas of the ranks {rows[:_ROWS_NAMED]} ...: each rank is in one of them, from 0 to {MAX_RANKS - 1}"
        )
    return rows


MAX_RANKS = 1 << 14
"""Ranks of workers that a `Grouping` may name are below it; a job has no more members of a role."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The workers that make a replica together, each with a part of its gradient. By default each worker is one.

    Attributes:
        by_node: the workers of a node.
        size: with `by_node`, those whose ranks have the same quotient by `size`; 0 = all. So a replica stays the same
            when a worker of another one is lost.
        rows: the ranks of each replica's workers: the columns of a mesh; empty = not by ranks. Of such a replica all
            workers are needed. If one is missing, the others are in no replica.

    Raises:
        InvalidRequest: a size without `by_node`, rows beside it, or rows that are empty, unequally long, or share a
            rank; a rank is out of range.
    """

    by_node: bool = False
    size: int = 0
    rows: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0 or (self.size and not self.by_node) or (self.rows and self.by_node):
            raise InvalidRequest(
                f"replicas are formed by_node={self.by_node}, size={self.size} and {len(self.rows)} rows; a size goes "
                "with by_node, and rows without it"
            )
        if self.rows:
            object.__setattr__(self, "rows", _checked_rows(self.rows))

    def __str__(self) -> str:
        """Return the replicas in words, as in errors."""
        if self.rows:
            named = ", ".join(map(str, self.rows[:_ROWS_NAMED]))
            return f"the workers of ranks {named}" + (" ..." if len(self.rows) > _ROWS_NAMED else "")
        if self.size:
            return f"each {self.size} workers of a node by rank"
        return "the workers of each node" if self.by_node else "each worker"

    def incomplete(self, ranks: Collection[int]) -> list[tuple[int, ...]]:
        """Return the rows that lack one of their workers, given the ranks of the live ones."""
        return [row for row in self.rows if not all(rank in ranks for rank in row)]

    def gap(self, row: tuple[int, ...], ranks: Collection[int]) -> str:
        """Return the workers that a row lacks, as text, given the ranks of the live ones."""
        missing = ", ".join(str(rank) for rank in row if rank not in ranks)
        return f"rank {missing} of ranks {row}, which make a replica together, is missing"

    def row_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a worker's replica; empty if replicas are not by ranks, or it is in none."""
        return next((row for row in self.rows if rank in row), ())


EACH_WORKER: Final = Grouping()
"""Every worker is a replica."""

EACH_NODE: Final = Grouping(by_node=True)
"""The workers of every node are a replica."""

_ROWS_NAMED: Final = 4


@dataclass(frozen=True, kw_only=True)
class ModelProgress:
    """The position of a model of the job.

    Attributes:
        model: its number.
        step: the step attempt under way.
        version: committed steps.
    """

    model: int
    step: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The members of one generation, each list sorted by rank.

    Attributes:
        generation: its number.
        step: the step attempt of the first model that this generation starts with.
        version: committed steps of the first model so far.
        workers: live workers.
        shards: live shard servers.
        num_replicas: the number of replicas that contribute gradients.
        complete: whether there are as many workers and shard servers as the job needs to make a step.
        waiting_for: the missing members when it is not complete, in words.
        finished: workers that left because they had finished, the newest last: their messages are still delivered.
        models: the progress of every model but the first. A model that is not among them has made no step.
        grouping: the workers that make a replica together. Models may differ in that (`numbered`).
        is_over: whether the job is over: the last of its workers left because it had finished.
        state_id: of the job's durable state. Another one numbers its generations anew.
    """

    generation: int
    step: int
    version: int
    workers: tuple[Member, ...]
    shards: tuple[Member, ...]
    num_replicas: int
    complete: bool
    waiting_for: str = ""
    finished: tuple[Member, ...] = ()
    models: tuple[ModelProgress, ...] = ()
    grouping: Grouping = EACH_WORKER
    is_over: bool = False
    state_id: str = ""

    def progress(self, model: int) -> tuple[int, int]:
        """Return (step, version) with which a model begins this generation."""
        if model == 0:
            return self.step, self.version
        return next(((p.step, p.version) for p in self.models if p.model == model), (1, 0))

    @property
    def first_worker(self) -> Member | None:
        """The worker of lowest rank in a replica; without a replica, of all workers. It saves and logs for all."""
        return next((m for m in self.workers if m.replica >= 0), self.workers[0] if self.workers else None)

    def sharing_samples(self, worker: Member) -> list[int]:
        """Return the ranks of the workers among whom the samples of a worker's replica are dealt.

        Those of a node compute with different samples. Those of a row have parts of the model, and the same samples.
        """
        if self.grouping.rows:
            return [worker.rank]
        return [m.rank for m in self.workers if m.replica == worker.replica]

    def why_no_replica(self, rank: int) -> str:
        """Return the reason why a worker is in no replica, as text."""
        row = self.grouping.row_of(rank)
        if not row:
            return f"worker {rank} is in no replica: these are {self.grouping}"
        return f"worker {rank} is in no replica: {self.grouping.gap(row, {m.rank for m in self.workers})}"

    def numbered(self, grouping: Grouping) -> Membership:
        """Return a copy with replicas numbered for a model that groups the workers in this way (see `numbered`)."""
        if grouping == self.grouping:
            return self
        workers, replicas = numbered(self.workers, grouping)
        return dataclasses.replace(self, workers=workers, num_replicas=replicas, grouping=grouping)


def numbered(workers: Iterable[Member], grouping: Grouping) -> tuple[tuple[Member, ...], int]:
    """Return workers, given by rank, with their local ranks and replicas, and the number of replicas.

    Replicas are numbered densely: by the lowest rank of each; rows of ranks in their order, without the incomplete
    ones. Workers of an incomplete row, and workers in no row, are in replica -1.
    """
    workers = tuple(workers)
    of_rank: dict[int, int] = {}
    if grouping.rows:
        ranks = {m.rank for m in workers}
        rows = (row for row in grouping.rows if all(rank in ranks for rank in row))
        of_rank = {rank: number for number, row in enumerate(rows) for rank in row}
    replica_of: dict[tuple[str, int], int] = {}
    on_node: dict[str, int] = {}
    found: list[Member] = []
    for m in workers:
        local_rank = on_node[m.node] = on_node.get(m.node, -1) + 1
        if grouping.rows:
            replica = of_rank.get(m.rank, -1)
        else:
            quotient = m.rank // grouping.size if grouping.size else 0
            key = (m.node, quotient) if grouping.by_node else (m.incarnation, 0)
            replica = replica_of.setdefault(key, len(replica_of))
        same = (m.local_rank, m.replica) == (local_rank, replica)
        found.append(m if same else dataclasses.replace(m, local_rank=local_rank, replica=replica))
    return tuple(found), len(set(of_rank.values())) if grouping.rows else len(replica_of)


def replica_of(worker: Member, workers: Sequence[Member], grouping: Grouping) -> tuple[Member, ...]:
    """Return the workers that make a replica with one of them, given by rank."""
    found = {m.rank: m.replica for m in numbered(workers, grouping)[0]}
    return tuple(m for m in workers if found[m.rank] == found.get(worker.rank))


class Outcome(enum.Enum):
    """The outcome of a step."""

    COMMIT = "commit"
    SKIP = "skip"  # non-finite, missing or unweighted gradients: nothing applied, the version stays
    ABORT = "abort"  # nothing applied, the version stays; `Decision.reason` says why


@dataclass(frozen=True, kw_only=True)
class ReplicaClock:
    """A replica that steps alone, and its clock: the number of its decided steps in a generation.

    Attributes:
        replica: the replica whose gradient it is.
        clock: its clock when it made the attempt.
        slowest_clock: of all replicas, after the decision.
    """

    replica: int
    clock: int
    slowest_clock: int


@dataclass(frozen=True, kw_only=True)
class CopyFrom:
    """A step that moves a model's values towards another's: (1 - weight) * its own + weight * the other's.

    Attributes:
        source: number of the other model.
        weight: above 0, at most 1.
        version: the version of the other that it takes, once decided; 0 before.
    """

    source: int
    weight: float
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The coordinator's decision on one step.

    Attributes:
        step: the attempt decided.
        generation: the generation it ran in.
        outcome: commit, skip or abort.
        version: the version after it.
        grad_norm: global L2 norm of the gradients, before clipping; NaN or inf when non-finite, 0 on abort.
        clip_factor: the factor of every gradient: it clips the gradient, and divides it by `weight`.
        hyper: per parameter group, the hyperparameters of this step.
        reason: the reason why it was skipped or aborted, in words.
        next_generation: of an abort because the membership changes: the generation that it changes to; else 0.
        replica_clock: the replica whose step it was; None = all replicas'.
        model: number of the model.
        copy: the copy from another model; None = it takes gradients.
        commit: of a commit or a skip, the values committed with it, by name; see `Vote.commit`.
        weight: sum of the votes' weights; 0 = they have none.
        traceparent: the coordinator's span of it; empty = the step is not traced.
        untouched: of a commit, numbers in the layout of the parameters that no worker had a gradient of, ascending.
            The optimizer leaves them alone: values, moments and counts of updates.
        optimizer: of a commit: it replaces the model's before the update; None = that stays.
        refused: of an abort because of the votes: the number of these in a row, with this one; else 0.
    """

    step: int
    generation: int
    outcome: Outcome
    version: int
    grad_norm: float = 0.0
    clip_factor: float = 1.0
    hyper: tuple[Hyper, ...] = ()
    reason: str = ""
    next_generation: int = 0
    replica_clock: ReplicaClock | None = None
    model: int = 0
    copy: CopyFrom | None = None
    commit: Mapping[str, str] = field(default_factory=dict)
    weight: float = 0.0
    traceparent: str = field(default="", compare=False)
    untouched: tuple[int, ...] = ()
    optimizer: OptimizerChange | None = None
    refused: int = 0

    def applies(self, hyper: Sequence[Hyper]) -> bool:
        """Return True if it commits gradients with these hyperparameters and unclipped, as speculation expects."""
        unclipped = self.outcome is Outcome.COMMIT and self.clip_factor == 1.0
        return unclipped and self.optimizer is None and self.hyper == tuple(hyper)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer that runs on the servers.

    Attributes:
        name: registry name ("adamw").
        groups: per parameter group, hyperparameter values by name (flags as 0.0 or 1.0).
        group_of: per parameter of the layout (by its index), the index of its group; -1 for those that no step moves.
        moments: hyperparameters of earlier steps, if they needed moments that those of `groups` do not need.
    """

    name: str
    groups: tuple[Hyper, ...]
    group_of: tuple[int, ...]
    moments: tuple[Hyper, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerChange:
    """A new optimizer for a model, which replaces the present one with a step.

    Attributes:
        spec: the new optimizer.
        retains_moments: whether it goes on with the moments that there are. Otherwise all of them begin anew.
    """

    spec: OptimizerSpec
    retains_moments: bool = False


NO_GRADIENTS: Final = "no worker has a gradient of any parameter: no backward reached one"
"""The reason of a step that torch's optimizers would not have made either."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of `optimizer.step()`.

    Attributes:
        committed: whether the parameters moved.
        version: committed steps so far.
        grad_norm: global L2 norm before clipping (0 when aborted).
        reason: the reason why it did not commit, in words.
    """

    committed: bool
    version: int
    grad_norm: float
    reason: str = ""
