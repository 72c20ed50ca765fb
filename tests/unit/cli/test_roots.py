"""Where the services that each command starts open checkpoints: not anywhere, where others than their user may ask."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axon_ps.cli.launch.console import Console
from axon_ps.cli.launch.perform import _Launcher
from axon_ps.cli.launch.plan import Launch
from axon_ps.cli.settings import load
from axon_ps.errors import ConfigurationError
from axon_ps.rpc.security import Security
from axon_ps.storage import roots
from axon_ps.worker.bootstrap.services import roots_of_shards

LOOPBACK, NETWORK = "127.0.0.1", "0.0.0.0"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("DIR", "ROOTS"):
        monkeypatch.delenv(f"AXON_PS_CHECKPOINT_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    roots.allow_roots(None)


def opens(place: str) -> bool:
    try:
        roots.check_allowed(place)
    except ConfigurationError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "options", "ordered", "anywhere"),
    [
        (LOOPBACK, {"token": "t"}, False, True),
        (LOOPBACK, {}, False, False),
        (NETWORK, {"token": "t"}, False, False),
        (NETWORK, {"token": "t", "checkpoint_roots": "/in"}, False, False),
        (LOOPBACK, {"token": "t"}, True, True),
        (NETWORK, {"token": "t"}, True, True),  # by itself, it opens what its coordinator orders
        (NETWORK, {"token": "t", "checkpoint_dir": "/in"}, True, False),
        (NETWORK, {"token": "t", "checkpoint_roots": "/in"}, True, False),
        (LOOPBACK, {"token": "t", "checkpoint_roots": "/in"}, True, False),
    ],
)
def test_a_service(host: str, options: dict[str, str], ordered: bool, anywhere: bool) -> None:
    load(**options).allow_roots(host, ordered=ordered)
    assert opens("/etc/axon") == anywhere
    if options.get("checkpoint_dir") or options.get("checkpoint_roots"):
        assert opens("/in/run")


def launch(**changes: Any) -> Launch:
    given: dict[str, Any] = dict.fromkeys(Launch.__dataclass_fields__, "")
    given |= {
        "nproc_per_node": 1,
        "nnodes": 2,
        "node_rank": 1,
        "shards": 2,
        "master_port": 1,
        "standby": 0,
        "proxy": False,
    }
    return Launch(**(given | changes))


def of_run(launch: Launch, **options: str) -> dict[str, str]:
    async def main() -> dict[str, str]:
        console = Console(io.StringIO(), io.StringIO(), colour=False)
        return dict(_Launcher(launch, load(**options), console)._roots())

    return asyncio.run(main())


def test_shard_servers_of_run_open_checkpoints_where_its_coordinator_does(here: Path) -> None:
    assert of_run(launch(host=LOOPBACK, token="t")) == {}, "only its own user can ask"
    among = launch(host=NETWORK, token="t", resume="/old/run")
    assert of_run(among, checkpoint_dir="/in") == {roots.VARIABLE: f"/in,/old/run,{here}"}
    assert of_run(among, checkpoint_roots="/mine") == {}, "they get that"


def test_shard_servers_that_workers_start_do_likewise(here: Path) -> None:
    assert roots_of_shards(LOOPBACK, Security(token="t"), {}) == {}
    assert roots_of_shards(NETWORK, Security(token="t"), {}) == {roots.VARIABLE: str(here)}
    among = {"AXON_PS_CHECKPOINT_DIR": "/in"}
    assert roots_of_shards(NETWORK, Security(token="t"), among) == {roots.VARIABLE: f"/in,{here}"}
    assert roots_of_shards(NETWORK, Security(token="t"), {roots.VARIABLE: "/mine"}) == {}
