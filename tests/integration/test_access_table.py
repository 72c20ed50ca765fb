"""Every cell of the table of who may call what, against real servers; and the page of the docs has what was found."""

from __future__ import annotations

import asyncio

import pytest

from access_walk import MEANS, METHODS, NOT_RIGHT, PAGE_FILE, page, walk
from axon_ps.rpc.access import MAY_CALL, needs_nothing
from axon_ps.rpc.auth.identity import Principal

Found = dict[str, dict[str, dict[str, bool]]]


@pytest.fixture(scope="module")
def found() -> Found:
    return asyncio.run(walk())


def test_every_call_was_made_with_every_kind_of_credentials(found: Found) -> None:
    assert {row for row in found if " " not in row} == set(METHODS)
    columns = {*NOT_RIGHT, *(role.value for role in Principal)}
    for row, cells in found.items():
        assert set(cells) == {*columns, "secret"}, row
        assert all(set(cells[column]) == set(MEANS) for column in columns), row


def test_a_role_may_what_the_table_says(found: Found) -> None:
    for row, roles in MAY_CALL.items():
        for role in Principal:
            expected = roles is None or role in roles
            assert found[row][role.value] == dict.fromkeys(MEANS, expected), (row, role)
        assert found[row]["secret"] == {"token": True}, row


def test_credentials_that_do_not_hold_are_as_good_as_none(found: Found) -> None:
    for row in MAY_CALL:
        for kind in NOT_RIGHT:
            assert found[row][kind]["token"] == needs_nothing(row), (row, kind)
            connects = kind == "another job's" or (
                kind == "none" and " " in row
            )  # gRPC's needs a certificate, HTTP's not
            assert found[row][kind]["certificate"] == (connects and needs_nothing(row)), (row, kind)


def test_the_page_has_what_was_found(found: Found) -> None:
    assert PAGE_FILE.read_text(encoding="utf-8") == page(found), "python tests/integration/access_walk.py writes it"
