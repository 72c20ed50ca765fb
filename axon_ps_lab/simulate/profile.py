"""The costs of this library on a machine: measured there by `axon-ps doctor --measure`, read by `axon-ps simulate`.

Owns: the profile's form as JSON, and `DEFAULT`, measured on two cores of an AMD EPYC at 2.6 GHz.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from axon_ps.errors import InvalidRequest
from axon_ps.texts import value_of_json


@dataclass(frozen=True, kw_only=True)
class WireCost:
    """Processor seconds for an element that is sent in some form over sockets.

    Attributes:
        worker_gather_s: seconds of the worker, for an element of an AllGather.
        server_gather_s: seconds of the shard server, for an element of an AllGather.
        worker_push_s: seconds of the worker, for an element of a ReduceScatter.
        server_push_s: seconds of the shard server, for an element of a ReduceScatter, the sum included.
        server_encode_s: seconds of the shard server, for an element that a step commits, without the optimizer's
            arithmetic; a version is encoded once for all workers.
    """

    worker_gather_s: float
    server_gather_s: float
    worker_push_s: float
    server_push_s: float
    server_encode_s: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of this library on a machine.

    Attributes:
        cores: the machine's cores.
        worker_call_s: seconds of the worker for a gather or push of a unit from one server, without its elements.
        server_call_s: seconds of the shard server for the same.
        decision_s: seconds from the last vote to the decision at a worker, without the line's round trip.
        update_s: seconds of a shard server for an element that an optimizer updates, by the optimizer's name.
        wires: costs by form: "float32", "bfloat16", "float16", "int8", "int4".
    """

    cores: int
    worker_call_s: float
    server_call_s: float
    decision_s: float
    update_s: Mapping[str, float]
    wires: Mapping[str, WireCost]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a profile from a file.

        Raises:
            InvalidRequest: the file cannot be read, or is not a profile.
        """
        try:
            return cls.of(value_of_json(path.read_text(encoding="utf-8"), "it"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"the profile {str(path)!r} cannot be read: {error}; `axon-ps doctor --measure {path}` writes one"
            ) from error

    @classmethod
    def of(cls, values: Any) -> Self:
        """Make a profile from JSON values.

        Raises:
            InvalidRequest: a value is missing, or is not a positive number.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or names - values.keys():
            missing = ", ".join(sorted(names - (values.keys() if isinstance(values, dict) else set())))
            raise InvalidRequest(f"a profile has {', '.join(sorted(names))}; missing here: {missing}")
        costs = {field.name for field in fields(WireCost)}
        wires = {}
        for wire, cost in _mapping(values["wires"], "wires").items():
            if _mapping(cost, f"wires.{wire}").keys() != costs:
                raise InvalidRequest(f"wires.{wire} of a profile has {', '.join(sorted(costs))}; it has {sorted(cost)}")
            wires[wire] = WireCost(**{name: _number(value, f"wires.{wire}.{name}") for name, value in cost.items()})
        updates = _mapping(values["update_s"], "update_s")
        return cls(
            cores=_count(values["cores"], "cores"),
            worker_call_s=_number(values["worker_call_s"], "worker_call_s"),
            server_call_s=_number(values["server_call_s"], "server_call_s"),
            decision_s=_number(values["decision_s"], "decision_s"),
            update_s={name: _number(value, f"update_s.{name}") for name, value in updates.items()},
            wires=wires,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the argument of `of`."""
        return asdict(self)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise InvalidRequest(f"{what} of a profile is {value!r}; it must be an object with a value by name")
    return value


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{what} of a profile is {value!r}; it must be an integer above 0")
    return value


def _number(value: Any, what: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise InvalidRequest(f"{what} of a profile is {value!r}; it must be a number above 0")
    return float(value)


DEFAULT: Final = Profile(
    cores=2,
    worker_call_s=0.00024,
    server_call_s=0.00012,
    decision_s=0.0011,
    update_s={
        "adagrad": 3.3e-10,
        "adam": 5.1e-10,
        "adamw": 5.1e-10,
        "lion": 3.4e-10,
        "rmsprop": 3.6e-10,
        "sgd": 2.1e-10,
    },
    wires={
        "float32": WireCost(
            worker_gather_s=8.9e-10,
            server_gather_s=1.1e-09,
            worker_push_s=1.1e-09,
            server_push_s=1.1e-09,
            server_encode_s=6.5e-10,
        ),
        "bfloat16": WireCost(
            worker_gather_s=5.3e-10,
            server_gather_s=5.7e-10,
            worker_push_s=6.7e-10,
            server_push_s=7.4e-10,
            server_encode_s=5.7e-10,
        ),
        "float16": WireCost(
            worker_gather_s=6e-10,
            server_gather_s=5.8e-10,
            worker_push_s=7.5e-10,
            server_push_s=8.3e-10,
            server_encode_s=6.1e-10,
        ),
        "int8": WireCost(
            worker_gather_s=6.1e-10,
            server_gather_s=3.8e-10,
            worker_push_s=1e-09,
            server_push_s=8.4e-10,
            server_encode_s=9.1e-10,
        ),
        "int4": WireCost(
            worker_gather_s=9.2e-10,
            server_gather_s=2.6e-10,
            worker_push_s=1.8e-09,
            server_push_s=1.1e-09,
            server_encode_s=1.6e-09,
        ),
    },
)
"""Medians of eight runs, *measured* on two cores of an AMD EPYC at 2.6 GHz that also ran other work."""
