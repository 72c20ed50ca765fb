"""A subscription to a model of a running job: its parameters, version by version, for processes outside the job.

An evaluator, an average of weights, a sampler or another job subscribes with the coordinator's address and a token. The
observer's token is enough. Values come straight from the shard servers, without the workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from axon_ps.coordinator.checkpoint_schedule import parse_every
from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.errors import Closed, ConfigurationError, InvalidRequest, Misuse
from axon_ps.host.malloc import retain_message_memory
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.shard.client.assembly import Values
from axon_ps.shard.client.subscriber import ModelSubscriber
from axon_ps.storage.checkpoint import TensorSpec, create_file
from axon_ps.storage.files import open_store
from axon_ps.storage.hf_directory import set_config_dtype
from axon_ps.types import Array, DType, Membership, parse_dtype
from axon_ps.wire.events import JobState
from axon_ps.worker.environment import job_of, security_of, worker_config

DEFAULT_TIMEOUT_S = 1800.0
"""Seconds that a pull may take by default."""
CONNECT_TIMEOUT_S = 60.0
"""Seconds until a coordinator must have answered for the first time. A wrong address is reported after that."""

_DESCRIBE_S = 10.0
_FILE = "model.safetensors"


class Saved(Protocol):
    """An object that saves itself in a directory: a configuration or a tokenizer of transformers."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write it there."""


class Weights(NamedTuple):
    """The parameters of a model at one version.

    Attributes:
        version: committed steps.
        parameters: by the name in the user's module, a read-only array in its shape; bf16 as uint16, as numpy has none.
            A raw parameter (`sharding.layout`) has its own dtype; float8 is uint8.
    """

    version: int
    parameters: Mapping[str, Array]


class Subscription:
    """The versions of one model, from the newest on; see `subscribe`. Iterate over it, or call `latest`.

    Its arrays are immutable, so arrays of an earlier version still have their values. An array that did not change is
    the same object in both versions. Use a subscription in one thread at a time, and make another for another thread.

    Args:
        model: name of the model; empty = the only one.
        coordinator: "host:port" of the coordinator, or several with commas between them.
        job: name of the job.
        security: TLS and token.
        dtype: as of `subscribe`.
        every: as of `subscribe`.
        changes: as of `subscribe`.
        timeout_s: as of `subscribe`.
        connect_timeout_s: as of `subscribe`.

    Raises:
        InvalidRequest: an argument is malformed.
    """

    def __init__(
        self,
        model: str,
        *,
        coordinator: str,
        job: str,
        security: Security,
        dtype: DType | str | None = None,
        every: int | str = 1,
        changes: bool = False,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float | None = CONNECT_TIMEOUT_S,
    ) -> None:
        self.model = model
        self._every, self._every_s = _interval(every)
        self._timeout_s = timeout_s
        self._pulled_s = float("-inf")
        self._address, self._security, self._job = coordinator, security, job
        self._operator: OperatorClient | None = None
        retain_message_memory()
        self._subscriber = ModelSubscriber(
            self._describe,
            job=job,
            security=security,
            dtype=None if dtype is None else parse_dtype(dtype),
            changes=changes,
            connect_timeout_s=connect_timeout_s,
        )
        self._loop = BackgroundLoop("axon-ps-subscription")

    def latest(self, timeout_s: float | None = None) -> Weights:
        """Pull the newest version, now.

        Args:
            timeout_s: most seconds for it; None = that of the subscription.

        Raises:
            Timeout: it was not all there in time. The message has the last reason.
            Unreachable: no coordinator has ever answered at the address.
            PermissionDenied: the token is not one of this job.
            Misuse: the model was released.
            Closed: the subscription was closed.

        After an error: the values pulled before are unchanged. Another attempt may be made.
        """
        return self._pull(-1, 1, timeout_s)

    def at(self, version: int, timeout_s: float | None = None) -> Weights:
        """Pull exactly one version: the present or a future one.

        Args:
            version: its number.
            timeout_s: most seconds for it, the wait for the version included; None = that of the subscription.

        Raises:
            InvalidRequest: the model is past that version.
            AxonError: as `latest`.
        """
        return self._pull(version, 1, timeout_s, exactly=True)

    def __iter__(self) -> Iterator[Weights]:
        return self

    def __next__(self) -> Weights:
        """Return the present version at first, later the next that `every` selects, once it is there.

        Raises:
            AxonError: as `latest`.
        """
        values = self._subscriber.values
        if values is None:
            return self.latest()
        if self._every_s:
            time.sleep(max(0.0, self._pulled_s + self._every_s - time.monotonic()))
        return self._pull(values.version + 1, max(1, self._every), None)

    @property
    def values(self) -> Values | None:
        """The weights that were pulled last, with the model's layout; None before."""
        return self._subscriber.values

    def export(self, directory: str | Path, *also: Saved) -> Path:
        """Write the weights pulled last as a directory that `from_pretrained` of transformers loads.

        Args:
            directory: the destination; `model.safetensors` in it is replaced atomically, when all of it is written.
            also: objects that save themselves there: the model's configuration, its tokenizer.

        Returns:
            The file with the parameters.

        Raises:
            Misuse: nothing was pulled yet.
            StorageFull: no space left.
            CheckpointError: it could not be written.
        """
        values = self._subscriber.values
        if values is None:
            raise Misuse("nothing was pulled yet that could be exported; call latest() first")
        parameters = values.parameters()
        dtypes = values.dtypes()
        tensors = [TensorSpec(name=name, dtype=dtypes[name], shape=array.shape) for name, array in parameters.items()]
        with create_file(open_store(str(directory)), _FILE, tensors, {"format": "pt"}) as writer:
            for name, array in parameters.items():
                writer.write(name, array)
        for one in also:
            one.save_pretrained(directory)
        set_config_dtype(open_store(str(directory)), dtypes.values())
        return Path(directory) / _FILE

    def statistics(self) -> dict[str, float]:
        """Return the numbers of pulls, received bytes and chunks, retries, and versions given up for newer ones."""
        names = ("pulls", "bytes_in", "chunks_in", "retries", "versions_given_up")
        return {name: float(self._subscriber.counters[name]) for name in names}

    def close(self) -> None:
        """Close its connections. Repeated calls do nothing."""
        try:
            self._loop.run(self._close(), _DESCRIBE_S)
        except Closed:
            return
        finally:
            self._loop.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pull(self, min_version: int, multiple_of: int, timeout_s: float | None, *, exactly: bool = False) -> Weights:
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        values = self._loop.run(self._subscriber.pull(min_version, multiple_of, deadline, exactly=exactly))
        self._pulled_s = time.monotonic()
        return Weights(values.version, values.parameters())

    async def _describe(self) -> tuple[JobState, Membership]:
        if self._operator is None:
            self._operator = OperatorClient(self._address, security=self._security, job=self._job)
        return await self._operator.describe(self.model, _DESCRIBE_S)

    async def _close(self) -> None:
        await self._subscriber.close()
        if self._operator is not None:
            await self._operator.close()


def _interval(every: int | str) -> tuple[int, float]:
    try:
        return parse_every(str(every))
    except ConfigurationError:
        raise InvalidRequest(f"every={every!r}: give versions, as 10, or a time, as '30s', '5m' or '2h'") from None


def subscribe(
    model: str = "",
    *,
    dtype: DType | str | None = None,
    every: int | str = 1,
    changes: bool = False,
    coordinator: str = "",
    job: str = "",
    security: Security | None = None,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    connect_timeout_s: float | None = CONNECT_TIMEOUT_S,
) -> Subscription:
    """Subscribe to a model of a running job, as a member of it or from anywhere else.

        with axon_ps.subscribe("policy", dtype="bf16", every=10) as subscription:
            for version, parameters in subscription:
                evaluate(version, parameters)

    All parameters of a version are of one committed step. A subscriber need not take every version: it gets the newest.
    A pull takes longer when a server dies or leaves, or when another coordinator becomes the leader.

    Args:
        model: its name in the job; empty = the only one. It may be registered later.
        dtype: of the arrays, as `types.parse_dtype` takes it; None = as the job sends parameters.
        every: after the first, iteration returns versions that are multiples of this (10, "10"), or the newest one
            after a time ("30s", "5m").
        changes: transfer only the elements that changed since the version before. The values are exact. This saves
            bytes where few of the bits change, as with bf16 and small steps, and costs the servers a comparison
            (docs/subscribe.md).
        coordinator: "host:port"; empty = as in the environment (`AXON_PS_COORDINATOR`).
        job: name of the job; empty = as in the environment.
        security: TLS and token, which may be the observer's; None = as in the environment.
        timeout_s: most seconds for a pull, the wait for a version included; None = without limit.
        connect_timeout_s: most seconds until a coordinator answers for the first time; None = as long as a pull.

    Raises:
        InvalidRequest: an argument is malformed.
        ConfigurationError: nothing names the coordinator, or a variable is malformed.
    """
    return Subscription(
        model,
        coordinator=coordinator or worker_config(os.environ).coordinator,
        job=job or job_of(os.environ),
        security=security_of(os.environ) if security is None else security,
        dtype=dtype,
        every=every,
        changes=changes,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
    )
