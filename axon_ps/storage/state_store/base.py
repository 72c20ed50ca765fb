"""The interface of state stores, and the stores by name.

A store does not interpret the records. `coordinator.core.records` does. One coordinator owns a store at a time: either
no other can open it (`StateStore`), or one of those that have opened it leads (`SharedStateStore`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

from axon_ps.errors import ConfigurationError
from axon_ps.plugins import Registry

_SelfT = TypeVar("_SelfT", bound="StateStore")


@dataclass(frozen=True)
class Record:
    """One change: `key` gets `value`, or is removed when `value` is None."""

    key: str
    value: bytes | None


class StateStore(ABC):
    """Durable records. Methods are called one at a time, from one thread at a time.

    Attributes:
        name: the name it is registered by. `register` sets it.
        blocks: whether `apply` may block for long. Then an event loop calls it in a thread.
        is_shared: whether it is a `SharedStateStore`.
    """

    name: ClassVar[str]
    blocks: ClassVar[bool] = True
    is_shared: ClassVar[bool] = False

    @classmethod
    def open(cls, address: str) -> StateStore:
        """Open the store at an address: the part behind the name in `--state NAME:ADDRESS`."""
        return cls(address)  # type: ignore[call-arg]

    @abstractmethod
    def load(self) -> Mapping[str, bytes]:
        """Return everything stored; empty for a new job.

        Raises:
            AxonError: it could not be read.
            Closed: the store was closed.
        """

    @abstractmethod
    def apply(self, records: Sequence[Record]) -> None:
        """Make the changes durable, in order, all or none.

        Raises:
            StorageFull: no space left. Nothing was changed, and the same batch may be tried again.
            NotLeader: see `SharedStateStore`.
            AxonError: the store failed. Nothing was changed.
            Closed: the store was closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources. A repeated call is harmless."""

    @property
    def begin_anew(self) -> str:
        """The way to have the job begin anew, as text for people."""
        return "start its coordinator with another --state"

    def leads(self) -> bool:
        """Return True if this process may write, and so may announce its writes."""
        return True

    def has_standby(self, *, asked: bool = False) -> bool:
        """Return True if others could lead instead; if `asked`, others that members have just asked."""
        return False

    def __enter__(self: _SelfT) -> _SelfT:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class SharedStateStore(StateStore):
    """A store that several coordinators have open. One of them leads at a time. The others stand by until it does not.

    Call `campaign` until it is won, then `load`, then `apply`. A former leader writes nothing, even if it believes that
    it leads: `apply` raises `NotLeader`. After that only the next leader knows whether the last batch was written,
    since it loads the state.

    Attributes:
        address: this coordinator's address, for members that ask another coordinator; set before the first `campaign`.
    """

    is_shared = True
    address: str = ""

    @abstractmethod
    def campaign(self) -> str:
        """Try once to lead, and remain a candidate; returns the address of the leader, empty when we lead.

        Raises:
            Broken: the store cannot be reached; try again.
            StorageFull: the store has no space left.
            ConfigurationError: the store can never be reached, as it is configured.
            Closed: the store was closed.
        """

    @abstractmethod
    def leads(self) -> bool:
        """Return True if this process certainly leads at this moment; quick, from any thread."""

    @abstractmethod
    def resign(self) -> None:
        """Let another coordinator lead. Harmless when we do not lead; never raises."""

    @abstractmethod
    def refused(self) -> None:
        """Note that a member of the job has asked us while we do not lead; quick, from any thread."""

    @abstractmethod
    def has_standby(self, *, asked: bool = False) -> bool:
        """Return True if others stand by, as far as known; quick."""


_REGISTRY: Registry[StateStore] = Registry("state store")

register = _REGISTRY.register


def open_store(name: str, address: str) -> StateStore:
    """Open the store of a kind at an address.

    Args:
        name: "sqlite" (the address is a path), "memory" (it has none), "etcd" (see `etcd`), or the name of a plugin's
            store.
        address: where it is.

    Raises:
        InvalidRequest: there is no such kind of store.
        ConfigurationError: it cannot be opened.
    """
    return _REGISTRY.find(name).open(address)


def open_state(state: str, job: str) -> StateStore:
    """Open the store that `--state` names, for one job.

    Args:
        state: a path of an sqlite file, whose directory is made; "memory"; or "NAME:ADDRESS" of another kind.
        job: the job's name: in etcd each job has keys of its own.

    Raises:
        InvalidRequest: there is no such kind of store.
        ConfigurationError: it cannot be opened.
    """
    name, colon, address = state.partition(":")
    if name == "etcd" and "/" not in address.partition("?")[0]:
        location, mark, options = address.partition("?")
        address = f"{location}/axon_ps/{job}{mark}{options}"
    if state == "memory" or (colon and name.isidentifier()):
        return open_store(name, address)
    path = Path(state)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--state {path} cannot be made: {error.strerror}; give the path of a file that can"
        ) from error
    return open_store("sqlite", state)
