"""A program's own small state in a checkpoint: schedulers, random generators, counters, the position of a loader.

    model.save_checkpoint(uri, optimizer, state={"scheduler": scheduler, "epoch": 3}, rank_state={"rng": RandomState()})

The state may have objects with `state_dict()` and `load_state_dict()` (the protocol `Stateful` of
torch.distributed.checkpoint), `torch.Generator`s, and plain values. `state` is the first worker's. Each worker has a
`rank_state` of its own. Nothing is pickled: a worker's file has the tensors in safetensors, and the rest as JSON.

Note: [Encoding]
    JSON has lists, strings, numbers and objects with strings as keys. Everything else is an object whose first key
    begins with "$": {"$tensor": 3}, {"$tuple": [...]}, {"$dict": [[key, value], ...]}. A function or a class is
    {"$kept": "its name"}: on load the object's own one stays.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import AxonError, CheckpointCorrupt, InvalidRequest
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.storage.checkpoint import FileEntry, TensorSpec, create_file, described
from axon_ps.storage.contents import TREE, open_state
from axon_ps.storage.files import open_store
from axon_ps.storage.manifest import MAX_STATE_BYTES, STATE_PREFIX
from axon_ps.texts import check_values_of_json, value_of_json
from axon_ps.types import NUMBERS, Array, DType

_DTYPES: Final = {TORCH_DTYPES[dtype]: dtype for dtype in NUMBERS}
_MOST_DEEP: Final = 64
_ENTRY_BYTES: Final = 512
_KINDS: Final = "biufc"
"""The kinds of numpy's dtypes that are numbers."""


class RandomState:
    """The random generators of this process: torch's (of the CPU and the current GPU), Python's, numpy's."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all of them."""
        state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the states of all of them."""
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])


def save(
    uri: str, group: ProcessGroup, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None
) -> dict[int, FileEntry]:
    """Write this worker's file. Every worker of the group calls it. Only the first worker's `state` is written.

    Returns:
        By rank, the file of each worker that has written one.

    Raises:
        InvalidRequest: a value cannot be saved, or there is too much; or another worker could not save its own.
        CheckpointError: this worker's file could not be written.
    """
    if not _on_any(group, state is not None or rank_state is not None):
        return {}
    entry, error = None, None
    try:
        shared = dict(state or {}) if group.rank == 0 else {}
        if shared or rank_state:
            entry = _write(uri, group.rank, {"state": _values(shared), "rank_state": _values(rank_state or {})})
    except Exception as caught:  # the others must not wait for this worker's entry
        error = caught
    answers = "" if error is not None else "{}" if entry is None else json.dumps(vars(entry))
    entries = _exchange(group, answers)
    if error is not None:
        raise error
    if failed := [rank for rank, text in enumerate(entries) if not text]:
        raise InvalidRequest(f"the checkpoint {uri} is not written: worker {failed[0]} could not save its own state")
    return {
        rank: FileEntry(**found)
        for rank, text in enumerate(entries)
        if (found := value_of_json(text, f"the entry of worker {rank}"))
    }


def load(
    uri: str,
    files: Mapping[int, FileEntry],
    rank: int,
    state: MutableMapping[str, Any] | None,
    rank_state: MutableMapping[str, Any] | None,
) -> None:
    """Load saved state into objects and mappings: that of the first worker, and that of this rank.

    Raises:
        InvalidRequest: the checkpoint lacks one of them.
        CheckpointError: a file cannot be read, or is altered.
    """
    if state:
        _load(_read(uri, files.get(0)).section("state"), state, f"the checkpoint {uri}")
    if rank_state and files and rank not in files:
        warnings.warn(
            f"the checkpoint {uri} has the own state of {len(files)} workers, and none of worker {rank}: its objects "
            "stay as they are",
            stacklevel=4,
        )
    elif rank_state:
        _load(_read(uri, files.get(rank)).section("rank_state"), rank_state, f"the checkpoint {uri} for worker {rank}")


def plain(value: Any) -> Any:
    """Encode a value as JSON. Tensors of one element become numbers. Other tensors, and functions, are left out."""
    encoder = Encoder(lambda tensor, path: tensor.item() if tensor.numel() == 1 else {"$kept": "a tensor"})
    return encoder.encode(value, "optimizer")


def from_plain(tree: Any) -> Any:
    """Decode JSON that `plain` returned. Left-out values are None."""
    return Decoder(lambda _: None, "the optimizer's groups").decode(tree, lambda: None)


# ---------------------------------------------------------------------- objects


def _values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to write, by name."""

    def value_of(given: Any) -> Any:
        if isinstance(given, torch.Generator):
            return given.get_state()
        return given.state_dict() if _is_stateful(given) else given

    return {name: value_of(given) for name, given in state.items()}


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _load(section: Section, into: MutableMapping[str, Any], where: str) -> None:
    if missing := [name for name in into if name not in section.tree]:
        there = ", ".join(map(repr, section.tree)) or "none"
        raise InvalidRequest(f"{where} has no state {missing[0]!r}; it has {there}")
    decoded = {name: section.decode(name, _now(current)) for name, current in into.items()}  # all, before one is set
    for name, value in decoded.items():
        current = into[name]
        if isinstance(current, (torch.Generator, torch.Tensor, RandomState)):
            with _damage_named(where):
                _set(current, value)
        elif _is_stateful(current):
            current.load_state_dict(value)
        else:
            into[name] = value


def _now(current: Any) -> Callable[[], Any]:
    """Return a function that returns an object's present value. Functions in that value are kept."""
    return current.state_dict if _is_stateful(current) else lambda: current


@torch.no_grad()
def _set(current: torch.Generator | torch.Tensor | RandomState, value: Any) -> None:
    if isinstance(current, torch.Generator):
        current.set_state(value)
    elif isinstance(current, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a tensor takes the values of a {type(value).__name__}")
        current.copy_(value)
    else:
        current.load_state_dict(value)


# ---------------------------------------------------------------------- the encoding


class Encoder:
    """Values to JSON. See Note: [Encoding].

    Args:
        of_tensor: returns the JSON of a tensor, whose path is given for errors.
    """

    def __init__(self, of_tensor: Callable[[torch.Tensor, str], Any]) -> None:
        self._of_tensor = of_tensor

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Encode a value as JSON.

        Raises:
            InvalidRequest: it, or something in it, has no form in JSON.
        """
        if depth > _MOST_DEEP:
            raise InvalidRequest(f"{path} is nested deeper than {_MOST_DEEP}, or contains itself")

        def inner(item: Any, name: object) -> Any:
            return self.encode(item, f"{path}[{name!r}]", depth + 1)

        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value.detach(), path)
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            numbers = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
            return {"$array": [self._of_tensor(numbers, path), value.dtype.str, list(value.shape)]}
        if isinstance(value, (bytes, bytearray)):
            return {
                "$bytes": self._of_tensor(torch.frombuffer(bytearray(value) or bytearray(1), dtype=torch.uint8), path),
                "$length": len(value),
            }
        if isinstance(value, Counter):
            return {"$counter": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
        if isinstance(value, Mapping):
            if all(isinstance(k, str) and not k.startswith("$") for k in value):
                return {k: inner(v, k) for k, v in value.items()}
            return {"$dict": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [inner(item, index) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, (set, frozenset)):
            return {"$set": [inner(item, "item") for item in value]}
        if callable(value):
            return {"$kept": str(getattr(value, "__qualname__", type(value).__qualname__))}
        raise InvalidRequest(
            f"{path} is a {type(value).__qualname__}, for which a checkpoint has no safe form; give it state_dict() "
            "and load_state_dict(), of numbers, strings, lists, dicts and tensors"
        )


class Decoder:
    """JSON to values. See Note: [Encoding].

    Args:
        tensor: gives a tensor by its number.
        where: the source of the JSON, for errors.
    """

    def __init__(self, tensor: Callable[[Any], Any], where: str) -> None:
        self._tensor = tensor
        self._where = where

    def decode(self, tree: Any, current: Callable[[], Any]) -> Any:
        """Decode JSON. `current` returns the present value. Functions in that value are kept.

        Raises:
            CheckpointCorrupt: `Encoder` does not write such JSON.
        """
        theirs = list[Exception]()

        def now() -> Any:
            try:
                return current()
            except Exception as error:
                theirs.append(error)
                raise

        with _damage_named(self._where, theirs):
            return self._decode(tree, now, 0)

    def _decode(self, tree: Any, current: Callable[[], Any], depth: int) -> Any:
        if depth > _MOST_DEEP + 1:
            raise ValueError(f"a value is nested deeper than {_MOST_DEEP}")

        def inner(item: Any, key: Any) -> Any:
            return self._decode(item, _at(current, key), depth + 1)

        def plain(item: Any) -> Any:
            return self._decode(item, lambda: None, depth + 1)

        if isinstance(tree, list):
            return [inner(item, index) for index, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        kind = next(iter(tree), "")
        if not kind.startswith("$"):
            return {key: inner(item, key) for key, item in tree.items()}
        of = tree[kind]
        if kind == "$tensor":
            return self._tensor(of)
        if kind == "$kept":
            return current()
        if kind == "$float":
            return float(of)
        if kind == "$tuple":
            return tuple(inner(item, index) for index, item in enumerate(of))
        if kind == "$set":
            return {plain(item) for item in of}
        if kind in ("$dict", "$counter"):
            keys = [plain(key) for key, _ in of]
            pairs = {k: inner(v, k) for k, (_, v) in zip(keys, of, strict=True)}
            return pairs if kind == "$dict" else Counter(pairs)
        if kind == "$bytes":
            return bytes(plain(of).numpy().tobytes()[: tree["$length"]])
        if kind == "$array":
            numbers, dtype, shape = of
            raw = plain(numbers).numpy().tobytes()
            if np.dtype(dtype).kind not in _KINDS or min(shape, default=0) < 0:
                raise CheckpointCorrupt(f"{self._where} has an array of {dtype!r:.80}{shape!r:.80}")
            return np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()
        raise CheckpointCorrupt(f"{self._where} has a value of kind {kind!r:.80}, which this version does not know")


def _at(current: Callable[[], Any], key: Any) -> Callable[[], Any]:
    def value() -> Any:
        complete = current()
        try:
            return complete[key]
        except (KeyError, IndexError, TypeError):
            return None

    return value


# ---------------------------------------------------------------------- files


class Section:
    """One part of a worker's file.

    Args:
        tree: the JSON.
        decoder: decodes its values.

    Attributes:
        tree: JSON by name.
    """

    def __init__(self, tree: Mapping[str, Any], decoder: Decoder) -> None:
        self.tree = tree
        self._decoder = decoder

    def decode(self, name: str, current: Callable[[], Any]) -> Any:
        """Return the value of a name."""
        return self._decoder.decode(self.tree[name], current)


class StateFile:
    """The content of a worker's file.

    Args:
        tree: the JSON.
        tensors: the tensors by number.
        where: the file, for errors.
    """

    def __init__(self, tree: Mapping[str, Any], tensors: Mapping[int, torch.Tensor], where: str) -> None:
        self._tree = tree
        self._where = where
        self._decoder = Decoder(tensors.__getitem__, where)

    def section(self, name: str) -> Section:
        """Return a part of the file, by name.

        Raises:
            CheckpointCorrupt: there is none.
        """
        if not isinstance(tree := self._tree.get(name), dict):
            raise CheckpointCorrupt(f"{self._where} has no {name!r} of a worker's own state")
        return Section(tree, self._decoder)


def _write(uri: str, rank: int, value: Mapping[str, Any]) -> FileEntry:
    tensors: list[torch.Tensor] = []

    def of_tensor(tensor: torch.Tensor, path: str) -> Any:
        if tensor.dtype not in _DTYPES:
            raise InvalidRequest(f"{path} is a tensor of {tensor.dtype}; it may be of {', '.join(map(str, _DTYPES))}")
        tensors.append(tensor.cpu().contiguous())
        return {"$tensor": len(tensors) - 1}

    text = json.dumps(Encoder(of_tensor).encode(value, "state"), allow_nan=False).encode()
    check_values_of_json(text, f"the own state of worker {rank}")
    size_bytes = len(text) + sum(tensor.nbytes for tensor in tensors)
    if size_bytes > MAX_STATE_BYTES:
        raise InvalidRequest(
            f"the own state of worker {rank} has {size_bytes} bytes; at most {MAX_STATE_BYTES} are saved: large "
            "tensors belong into the model"
        )
    arrays: list[tuple[str, DType, tuple[int, ...], Array]] = [
        (TREE, DType.U8, (len(text),), np.frombuffer(text, np.uint8))
    ]
    for index, tensor in enumerate(tensors):
        dtype = _DTYPES[tensor.dtype]
        raw: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        arrays.append((str(index), dtype, tuple(tensor.shape), raw.view(dtype.numpy)))
    name = f"{STATE_PREFIX}{rank:05d}-{secrets.token_hex(4)}.safetensors"
    specs = [TensorSpec(name=key, dtype=dtype, shape=shape) for key, dtype, shape, _ in arrays]
    with create_file(open_store(uri), name, specs, {"format": "axon_ps_state"}) as writer:
        for key, _, _, array in arrays:
            writer.write(key, array)
    return writer.entry(name)


def _read(uri: str, entry: FileEntry | None) -> StateFile:
    if entry is None:
        raise InvalidRequest(f"the checkpoint {uri} has no state of its workers' own; load it without state=")
    with open_state(uri, entry) as (reader, tree), _damage_named(reader.name):
        tensors: dict[int, torch.Tensor] = {}
        for name, spec in reader.tensors.items():
            if name != TREE:
                array: Array = np.empty(math.prod(spec.shape), spec.dtype.numpy)
                reader.read_into(name, 0, array)
                raw = torch.from_numpy(array.view(np.uint8))
                tensors[int(name)] = raw.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
        return StateFile(tree, tensors, reader.name)


@contextlib.contextmanager
def _damage_named(where: str, theirs: Sequence[Exception] = ()) -> Iterator[None]:
    """Convert errors of torch, numpy and Python over a file's content to an error that names the file.

    Errors of ours, and those in `theirs`, stay as they are.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        if isinstance(error, AxonError) or error in theirs:
            raise
        raise CheckpointCorrupt(f"{where} is damaged: {described(error)}") from error


# ---------------------------------------------------------------------- between workers


def _on_any(group: ProcessGroup, mine: bool) -> bool:
    return bool(group.all_reduce(np.array([float(mine)], np.float32))[0])


def _exchange(group: ProcessGroup, text: str) -> list[str]:
    """Return every worker's text, by rank."""
    row = np.zeros(_ENTRY_BYTES, np.uint8)
    row[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    rows = group.all_gather(row).reshape(group.size, -1)
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


__all__ = ["RandomState", "from_plain", "load", "plain", "save"]
