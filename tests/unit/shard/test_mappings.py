"""A unit is mapped if it is one slice on this host, in the job's dtype; its mapping lives as long as its memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axon_ps.compress.int8 import Int8
from axon_ps.host.shared_memory import PAGE_BYTES
from axon_ps.shard.client.mappings import Mappings
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.policy import Asynchronous
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType
from engine_driver import job_of, layout_of

SPEC = job_of(layout_of([100]))


class Servers:
    """Servers that lease one memory, or none; as routes, retries and transfers see them."""

    def __init__(self, spec: JobSpec, slices: int = 1) -> None:
        self.spec, self.slices = spec, slices
        self.memory: Array | None = np.zeros(PAGE_BYTES + 400, np.uint8)
        self.asked = 0

    async def transfer(self, unit: int, *_: Any) -> Any:
        return self.spec, [None] * self.slices, partial(SimpleNamespace, end=100)

    async def locate(self) -> Array | None:
        self.asked += 1
        return self.memory

    async def call(self, do: Any, *_: Any) -> Array | None:
        return await do()  # type: ignore[no-any-return]


def mapped(servers: Servers, mappings: Mappings, dtype: DType = DType.F32) -> Any:
    return asyncio.run(
        mappings.map(0, dtype=dtype, min_version=0, context=None, timeout_s=None)  # type: ignore[arg-type]
    )


def of(servers: Any) -> Mappings:
    return Mappings(servers, servers, servers)


def test_a_mapping_is_made_once_for_each_memory() -> None:
    servers = Servers(SPEC)
    mappings = of(servers)
    first = mapped(servers, mappings)
    assert first.values.size == 100
    assert mapped(servers, mappings) is first
    servers.memory = np.zeros(PAGE_BYTES + 400, np.uint8)
    second = mapped(servers, mappings)
    assert second is not first
    mappings.clear()
    assert mapped(servers, mappings) is not second


def test_a_unit_that_the_server_does_not_lease_is_gathered() -> None:
    servers = Servers(SPEC)
    servers.memory = None
    assert mapped(servers, of(servers)) is None
    assert servers.asked == 1


@pytest.mark.parametrize(
    "servers",
    [
        pytest.param(Servers(SPEC, slices=2), id="two slices"),
        pytest.param(Servers(replace(SPEC, precision=WirePrecision(param=DType.BF16))), id="another dtype"),
        pytest.param(Servers(replace(SPEC, precision=WirePrecision(param_compression=Int8()))), id="compressed"),
        pytest.param(Servers(replace(SPEC, policy=Asynchronous())), id="asynchronous"),
    ],
)
def test_a_unit_that_cannot_be_mapped_is_not_asked_for(servers: Servers) -> None:
    assert mapped(servers, of(servers)) is None
    assert servers.asked == 0
