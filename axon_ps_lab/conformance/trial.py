"""`Trial`: the suite's run on one rank of one group; it numbers calls and collects errors.

Owns: making arrays and calls that fit each other. An error that a case finds is recorded, and the case continues, so
that the ranks stay synchronized.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from axon_ps.collectives.backends.base import Backend, Call, Operation, Request
from axon_ps.errors import Disagreement
from axon_ps.types import Array, DType, ReduceOp
from axon_ps_lab.conformance import oracle

SEED = 20
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


class Skip(Exception):
    """The case does not apply to this group, for the reason in the text."""


class Trial:
    """The argument of a case.

    Args:
        backend: the group under test.
        exact_order: whether the backend promises to reduce in rank order, with the same bits as `oracle.reduced`.
        timeout_s: seconds for a call that should succeed.

    Attributes:
        dtypes: the backend's dtypes.
        wrong: the errors found, as text.
    """

    def __init__(self, backend: Backend, *, exact_order: bool, timeout_s: float) -> None:
        self.backend = backend
        self.rank = backend.rank
        self.n = backend.world_size
        self.ranks = backend.context.ranks
        self.exact_order = exact_order
        self.timeout_s = timeout_s
        self.dtypes = backend.dtypes
        self.wrong: list[str] = []
        self._sequence = 0

    # ------------------------------------------------------------------ checks

    def expect(self, condition: object, otherwise: str) -> None:
        """Record the error `otherwise` unless the condition holds."""
        if not condition:
            self.wrong.append(otherwise)

    def expect_array(self, what: object, got: Array, want: Array, dtype: DType, allowed: Array | None = None) -> None:
        """Record the difference of `got` from `want`, if any; `allowed` is the tolerance in another order of ranks."""
        exact = self.exact_order and dtype is not DType.INT8_BLOCK  # sums of blocks are rounded at random
        difference = oracle.difference(got, want, dtype, None if exact else allowed)
        self.expect(not difference, f"{what}: {difference}")

    def needs_ranks(self, least: int) -> None:
        """Skip the case if the group is smaller.

        Raises:
            Skip: the group is smaller.
        """
        if self.n < least:
            raise Skip(f"needs {least} ranks")

    # ------------------------------------------------------------------ calls

    def call(
        self,
        operation: Operation,
        dtype: DType = DType.U8,
        counts: Sequence[int] = (),
        *,
        op: ReduceOp | None = None,
        root: int = -1,
    ) -> Call:
        """Make the next call of this group."""
        if op is None and operation in _REDUCING:
            op = ReduceOp.SUM
        call = Call(sequence=self._sequence, operation=operation, dtype=dtype, counts=tuple(counts), op=op, root=root)
        self._sequence += 1
        return call

    def not_made(self) -> None:
        """Remove the last call from the count: it was refused before it was sent."""
        self._sequence -= 1

    def values(self, call: Call, rank: int | None = None, numel: int | None = None) -> Array:
        """Return the input data of a rank for a call: T[numel]; by default this rank's, as long as the call needs."""
        rank = self.rank if rank is None else rank
        if numel is None:
            numel = Request(call=call).lengths(rank)[0] or 0
        return oracle.values(call.dtype, numel, SEED, call.sequence, rank)

    def all_values(self, call: Call) -> list[Array]:
        """Return the data of all ranks for a call, by rank."""
        return [self.values(call, rank) for rank in range(self.n)]

    def arrays(self, call: Call) -> Request:
        """Return this rank's arrays for a call; outputs are filled with values that are not results."""
        data_numel, output_numel = Request(call=call).lengths(self.rank)
        data = None if data_numel is None else self.values(call)
        output = None if output_numel is None else self.blank(output_numel, call.dtype)
        return Request(call=call, data=data, output=output)

    def blank(self, numel: int, dtype: DType) -> Array:
        """Return an output array before the call: T[numel]."""
        return np.full(numel, 1, dtype.numpy)

    def perform(self, request: Request, timeout_s: float | None = None) -> None:
        """Perform the call."""
        self.backend.run(request, self.timeout_s if timeout_s is None else timeout_s)

    def do(self, call: Call) -> Request:
        """Perform the call with new arrays, and return these."""
        request = self.arrays(call)
        self.perform(request)
        return request

    def healthy(self, after: str) -> None:
        """Check that the group still works."""
        call = self.call(Operation.ALL_REDUCE, DType.I32, (5,))
        got = self.do(call)
        assert got.data is not None
        want = oracle.reduced(call.dtype, ReduceOp.SUM, self.all_values(call))
        self.expect_array(f"{call} after {after}", got.data, want, call.dtype)

    @contextlib.contextmanager
    def sending(self, data: Array, dtype: DType, to: int, tag: int, *, may_disagree: bool = False) -> Iterator[None]:
        """Send from a thread while the body runs: a send may wait for its receiver."""
        errors: list[str] = []

        def send() -> None:
            try:
                self.backend.send(data, dtype, to, tag, self.timeout_s)
            except BaseException as error:
                if not (may_disagree and isinstance(error, Disagreement)):
                    errors.append(repr(error))

        thread = threading.Thread(target=send, name=f"conformance send {tag}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(self.timeout_s)
        self.expect(not thread.is_alive(), f"a send with tag {tag} did not return")
        self.expect(not errors, f"a send with tag {tag} failed: {errors}")
