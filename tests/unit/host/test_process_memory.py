"""Reading another process's memory: only the right process's, and only what is still lent."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import axon_ps
from axon_ps.errors import Broken, InvalidRequest
from axon_ps.host import peer_process
from axon_ps.host.leases import Lender, Loan, address_of
from axon_ps.host.process_memory import Borrower, Introduction, introduction

OWNER = """
import numpy as np
from axon_ps.host.leases import Lender, address_of
from axon_ps.host.process_memory import introduction
data, lender = np.arange(1000, dtype=np.uint8), Lender()
who, loan = introduction(), lender.lend(address_of(data), data.nbytes)
print(who.pid, who.address, who.secret.hex(), end=' ')
print(loan.address, loan.size_bytes, loan.number_address, loan.number, flush=True)
input()
lender.take_back()
data[:] = 0
print("taken back", flush=True)
input()
"""


def test_what_is_lent_is_read_until_it_is_taken_back() -> None:
    root = Path(axon_ps.__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        pid, address, secret, *numbers = owner.stdout.readline().split()
        who = Introduction(pid=int(pid), address=int(address), secret=bytes.fromhex(secret))
        start, size, number_address, number = map(int, numbers)
        loan = Loan(address=start, size_bytes=size, number_address=number_address, number=number)
        borrower = Borrower(who)
        out = np.empty(1000, np.uint8)
        borrower.read([loan], out)
        assert out.tobytes() == np.arange(1000, dtype=np.uint8).tobytes()
        for other in (out[:999], np.empty(2000, np.uint8)[::2]):
            with pytest.raises(InvalidRequest, match="1000 bytes are lent; the array"):
                borrower.read([loan], other)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "taken back\n"
        with pytest.raises(Broken, match="took back"):
            borrower.read([loan], out)
        owner.stdin.write("\n")
        owner.stdin.flush()
        owner.wait(30)
        with pytest.raises(Broken, match="cannot be read"):
            borrower.read([loan], out)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"secret": bytes(16)}, "not the one"),
        ({"secret": b""}, "not the one"),
        ({"address": 8}, "cannot be read"),
        ({"pid": 2**22 + 1}, "cannot be read"),
    ],
)
def test_a_process_that_is_not_who_it_says_is_not_believed(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Broken, match=message):
        Borrower(replace(introduction(), **changed))


def test_taking_back_ends_every_loan() -> None:
    data, lender, borrower = np.ones(8, np.uint8), Lender(), Borrower(introduction())
    out = np.zeros((2, 4), np.uint8)
    loans = [lender.lend(address_of(data), 4), lender.lend(address_of(data) + 4, 4)]
    for loan, row in zip(loans, out, strict=True):
        borrower.read([loan], row)
    assert (out == 1).all()
    lender.take_back()
    for loan in loans:
        with pytest.raises(Broken):
            borrower.read([loan], out[0])
    out[:] = 0
    borrower.read([lender.lend(address_of(data), 8)], out)
    assert (out == 1).all()


def test_many_pieces_are_read_together_in_their_order() -> None:
    data, lender, borrower = np.arange(9000, dtype=np.uint8), Lender(), Borrower(introduction())
    order = np.random.default_rng(0).permutation(3000)  # more than one system call takes
    loans = [lender.lend(address_of(data) + 3 * int(i), 3) for i in order]
    out = np.zeros(9000, np.uint8)
    borrower.read(loans, out)
    assert out.tobytes() == data.reshape(3000, 3)[order].tobytes()
    with pytest.raises(InvalidRequest, match="lent together"):
        borrower.read([loans[0], Lender().lend(address_of(data), 3)], out[:6])
    gone = [replace(loans[0], address=8), loans[1]]
    with pytest.raises(Broken, match="cannot be read"):
        borrower.read(gone, out[:6])


def test_pieces_are_read_one_by_one_where_the_kernel_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = peer_process._readv

    def stops_early(pid: int, local: int, locals_: int, remote: int, remotes: int, flags: int) -> int:
        return int(whole(pid, local, locals_, remote, 1, flags))

    monkeypatch.setattr(peer_process, "_readv", stops_early)
    data, lender = np.arange(100, dtype=np.uint8), Lender()
    out = np.zeros(100, np.uint8)
    Borrower(introduction()).read([lender.lend(address_of(data) + 10 * i, 10) for i in range(10)], out)
    assert out.tobytes() == data.tobytes()
