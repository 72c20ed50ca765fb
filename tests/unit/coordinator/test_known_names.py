"""A job and its shard servers know the same optimizers and compressors, whichever of them comes first."""

from __future__ import annotations

import dataclasses

import pytest

from axon_ps.compress import Int8
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Role
from axon_ps.wire.events import KnownNames
from coordinator_driver import OPTIMIZER, SPEC, Driver, Peer

COMPRESSED = dataclasses.replace(SPEC, precision=WirePrecision(grad_compression=Int8()))


def server(d: Driver, *names: str) -> Peer:
    """A shard server that knows these optimizers and compressors."""
    peer = d.peer(Role.SHARD, "s")
    peer.known = KnownNames(optimizers=frozenset(names), compressors=frozenset(names))
    return peer


def test_a_registration_is_refused_while_a_server_does_not_know_its_optimizer() -> None:
    d = Driver(num_shards=2)
    worker, lacking = d.worker(), server(d, "sgd").join()
    server(d, "sgd", "adamw").join()
    with pytest.raises(InvalidRequest, match=r"^shard server 0 \(node s\) does not know optimizer 'adamw' .*--plugins"):
        d.register(worker)
    assert not d.state.status().registered, "what was refused has changed nothing"
    lacking.lose()
    server(d, "sgd", "adamw").join()
    assert d.register(worker).first


def test_a_registration_is_refused_while_a_server_does_not_know_its_compressor() -> None:
    d = Driver()
    worker, lacking = d.worker(), server(d, "adamw").join()
    with pytest.raises(InvalidRequest, match="compressor 'int8' of model 'policy'"):
        d.register(worker, COMPRESSED, None, name="policy")
    lacking.lose()
    server(d, "adamw", "int8").join()
    assert d.register(worker, COMPRESSED, name="policy").first


def test_a_server_that_does_not_know_the_jobs_optimizer_or_compressor_is_refused() -> None:
    d = Driver(num_shards=2)
    worker, first = d.worker(), server(d, "adamw", "int8").join()
    server(d, "adamw", "int8").join()
    d.register(worker, COMPRESSED)
    first.lose()
    generation = d.state.status().membership.generation
    for names, missing in (
        (["adamw"], "compressor 'int8'"),
        (["int8"], "optimizer 'adamw'"),
        (["sgd"], "optimizer 'adamw' and compressor 'int8'"),
    ):
        lacking = server(d, *names)
        refused = rf"the shard server at {lacking.address} \(node s\) .* {missing} of model"
        with pytest.raises(InvalidRequest, match=refused):
            lacking.join()
    assert d.state.status().membership.generation == generation
    server(d, "adamw", "int8").join()
    d.shard()  # one that lists nothing is not checked
    assert len(d.state.status().membership.shards) == 3


def test_a_server_is_checked_again_when_it_comes_back_to_a_restarted_coordinator() -> None:
    d = Driver()
    worker, known = d.worker(), server(d, "adamw").join()
    d.restart()
    worker.join()
    known.join()
    with pytest.raises(InvalidRequest, match="optimizer 'sgd'"):
        d.register(worker, SPEC, dataclasses.replace(OPTIMIZER, name="sgd"))
    d.register(worker)
    d.restart()
    known.known = KnownNames(optimizers=frozenset({"sgd"}), compressors=frozenset())
    known.join()
    assert isinstance(known.error, InvalidRequest)
    assert "optimizer 'adamw'" in str(known.error)
