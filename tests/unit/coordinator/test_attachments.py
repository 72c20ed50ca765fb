"""What workers attach to checkpoints: stored whole or not at all, and given back by a restore with its epoch."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace

import pytest

from axon_ps.coordinator import attachments
from axon_ps.coordinator.attachments import Attachment, Header, block_keys, header_key
from axon_ps.coordinator.core import kv
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.core.kv import MAX_VALUE_BYTES, KeyValues
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.wire.events import FIRST_VALUES, UPLOADED
from coordinator_driver import Driver

OWN = "buffers/model 0"


def store(values: KeyValues, key: str, content: bytes) -> None:
    """As a worker does, one value after the other."""
    present = Header.of(values.peek(header_key(key)))
    for name, value in Attachment.made(key, content).beside(present).values(key):
        values.put(0, name, value)


@pytest.mark.parametrize("content", [b"", b"x", b"\x00" * (3 << 20), os.urandom((2 << 20) + 7)])
def test_content_comes_back_and_every_value_is_small_enough(content: bytes) -> None:
    values = KeyValues({}, Outbox())
    store(values, OWN, content)
    store(values, "other/1", b"1")
    found = attachments.stored(values)
    assert {key: a.content() for key, a in found.items()} == {OWN: content, "other/1": b"1"}
    assert all(len(part) <= MAX_VALUE_BYTES for part in found[OWN].blocks)


def test_until_its_header_is_stored_the_content_is_that_of_before() -> None:
    values = KeyValues({}, Outbox())
    store(values, OWN, b"first")
    for newer in (b"second", b"third"):
        before = attachments.stored(values)[OWN].content()
        present = Header.of(values.peek(header_key(OWN)))
        *blocks, header = Attachment.made(OWN, newer).beside(present).values(OWN)
        for name, value in blocks:
            values.put(0, name, value)
            assert attachments.stored(values)[OWN].content() == before
        values.put(0, *header)
        assert attachments.stored(values)[OWN].content() == newer


def test_what_is_too_large_or_damaged_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'buffers/model 0' has .* bytes compressed|too much"):
        Attachment.made(OWN, os.urandom(attachments.MAX_BYTES + (1 << 20)))
    made = Attachment.made(OWN, b"content")
    for blocks in ([zlib.compress(b"other")], [b"no such format"], []):
        with pytest.raises(InvalidRequest):
            replace(made, blocks=blocks).content()
    for header in (b"[]", b"{", b'{"blocks": -1}', b'{"blocks": 1000}', b'{"slot": 2}', b'{"unknown": 1}'):
        with pytest.raises(InvalidRequest, match="header of an attachment is damaged"):
            Header.of(header)


def test_a_bomb_does_not_unpack() -> None:
    bomb = Attachment(header=Header(blocks=1), blocks=[zlib.compress(b"\x00" * (attachments.MAX_PLAIN_BYTES + 2), 1)])
    with pytest.raises(InvalidRequest):
        bomb.content()


def trained() -> Driver:
    d = Driver()
    d.assembled()
    return d


def restore(d: Driver, resume: Resume) -> int:
    d.call(lambda call: d.state.restores.restore(call, [resume], d.clock()))
    return next(m.epoch for m in d.state.status().models)


def test_a_restore_gives_back_what_the_checkpoint_has_with_the_epoch_it_begins() -> None:
    d = trained()
    attached = {OWN: Attachment.made(OWN, b"saved", "/c"), "state/1": Attachment.made("state/1", b"mine")}
    epoch = restore(d, Resume(uri="/c", version=0, attached=attached))
    found = d.state.restores.attached()
    assert {key: a.content() for key, a in found.items()} == {OWN: b"saved", "state/1": b"mine"}
    assert (found[OWN].header.epoch, found[OWN].header.source) == (epoch, "/c")
    d.restart()
    assert d.state.restores.attached()[OWN].content() == b"saved", "it is durable"


def test_of_a_checkpoint_that_has_none_nothing_is_given_back_and_that_is_said() -> None:
    d = trained()
    restore(d, Resume(uri="/c", version=0, attached={OWN: Attachment.made(OWN, b"saved", "/c")}))
    epoch = restore(d, Resume(uri="/old", version=0, attached={}))
    assert d.state.restores.attached() == {}
    header = Header.of(d.kv(None, "get", header_key(OWN)).value)
    assert (header.epoch, header.source, header.blocks) == (epoch, "/old", 0)
    assert block_keys(OWN, header) == []


def test_values_of_a_worker_leave_it_as_it_is_and_an_order_that_is_repeated_gives_it_again() -> None:
    d = trained()
    attached = {OWN: Attachment.made(OWN, b"saved", "/c")}
    epoch = restore(d, Resume(uri="/c", version=0, attached=attached))
    again = restore(d, Resume(uri="/c", version=0))
    assert again == epoch + 1
    assert d.state.restores.attached()[OWN].header.epoch == again
    for uri in (UPLOADED, FIRST_VALUES):
        restore(d, Resume(uri=uri, version=0))
        assert d.state.restores.attached()[OWN].header.epoch == again


def test_a_restore_whose_attachments_do_not_fit_gives_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who is refused has what he had: the order is the last that is done."""
    d = trained()
    before = d.state.status()
    monkeypatch.setattr(kv, "MAX_TOTAL_BYTES", 1000)
    attached = {f"state/{n}": Attachment.made(f"state/{n}", bytes([n]) * 9) for n in range(20)}
    with pytest.raises(Busy, match="do not fit into the key-value store"):
        restore(d, Resume(uri="/c", version=0, attached=attached))
    assert d.state.status().models == before.models
    assert d.state.restores.attached() == {}


def test_a_header_that_somebody_has_damaged_stops_no_restore() -> None:
    d = trained()
    d.kv(None, "put", header_key(OWN), b"no header")
    restore(d, Resume(uri="/c", version=0))
    epoch = restore(d, Resume(uri="/c", version=0, attached={OWN: Attachment.made(OWN, b"saved", "/c")}))
    assert d.state.restores.attached()[OWN].header.epoch == epoch
