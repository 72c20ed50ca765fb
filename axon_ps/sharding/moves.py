"""The moves of elements from one layout to another: units made otherwise, tensors cut into other boxes. Pure.

Tensors are matched by name. A box of the new layout is filled from all boxes of the old layout that overlap with it.
The elements that two boxes have in common are a number of equal runs, at equal distances in either unit. A whole tensor
is a box, too. So for layouts without boxes there is one run, and neighbouring runs of several parameters are joined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from axon_ps.errors import InvalidRequest
from axon_ps.sharding import raw
from axon_ps.sharding.layout import Layout, Parameter
from axon_ps.sharding.plan import Slice


@dataclass(frozen=True, kw_only=True)
class Move:
    """Copy `rows` runs of `numel` elements each from unit `source_unit` of an old layout to `unit` of a new one.

    Run r is read from source_begin + r * source_step on, and belongs at begin + r * step. These are elements of the
    units, and with `converts` elements of the two parameters, the old and the new one, counted from the first of each.
    Then one is raw, or both are, and values are converted or do not fill words; see `sharding.raw`.
    """

    source_unit: int
    source_begin: int
    unit: int
    begin: int
    numel: int
    rows: int = 1
    source_step: int = 0
    step: int = 0
    converts: tuple[Parameter, Parameter] | None = None

    @property
    def source_range(self) -> tuple[int, int]:
        """The elements of the source unit from the first that is read to one past the last."""
        begin, end = self.source_begin, self.source_begin + (self.rows - 1) * self.source_step + self.numel
        if self.converts is None:
            return begin, end
        source, _ = self.converts
        begin, end = raw.range_with(source, begin, end)
        return source.offset + begin, source.offset + end

    def read_from(self, begin: int, end: int) -> Iterator[Move]:
        """Yield the parts that are read from elements [begin, end) of the source unit, three at most."""
        return map(self._cut, _within(self.source_begin, self.source_step, self, begin, end))

    def written_to(self, begin: int, end: int) -> Iterator[Move]:
        """Yield the parts that belong into elements [begin, end) of the unit, three at most."""
        return map(self._cut, _within(self.begin, self.step, self, begin, end))

    def _cut(self, cut: tuple[int, int, int, int]) -> Move:
        row, rows, skipped, numel = cut
        return replace(
            self,
            source_begin=self.source_begin + row * self.source_step + skipped,
            begin=self.begin + row * self.step + skipped,
            numel=numel,
            rows=rows,
        )

    def continued_by(self, move: Move) -> bool:
        """Return True if both are one run, and the other's lies behind this one's in both units."""
        if self.converts is not None or move.converts is not None:
            return False
        return (self.rows, self.source_unit, self.source_begin + self.numel, self.begin + self.numel) == (
            move.rows,
            move.source_unit,
            move.source_begin,
            move.begin,
        ) and self.rows == 1


def _within(first: int, step: int, move: Move, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the parts of runs in [begin, end): the first run, how many, elements skipped in each, and those taken."""
    numel, step = move.numel, step or move.numel
    row = max(0, (begin - first - numel) // step + 1)
    last = min(move.rows, (end - first - 1) // step + 1)
    while row < last:
        skipped = max(0, begin - first - row * step)
        taken = min(numel, end - first - row * step) - skipped
        rows = 1 if taken < numel else min(last, (end - first - numel) // step + 1) - row
        yield row, rows, skipped, taken
        row += rows


class TensorSources:
    """The tensors of a layout, as the sources of moves.

    Args:
        layout: the old layout.
    """

    def __init__(self, layout: Layout) -> None:
        self._boxes: dict[str, list[tuple[int, Parameter]]] = {}
        for unit, p in layout.parameters():
            for name in (p.tensor.name, *p.tensor.aliases):
                self._boxes.setdefault(name, []).append((unit, p))

    def moves_into(self, target: Slice, new: Layout) -> tuple[Move, ...]:
        """Return the moves that fill `target`, a slice under the layout `new`.

        Raises:
            InvalidRequest: as of `moves_of`.
        """
        moves: list[Move] = []
        for p in new.units[target.unit].parameters:
            begin, end = max(p.offset, target.begin), min(p.end, target.end)
            if begin >= end:
                continue
            for move in self.moves_of(target.unit, p, begin, end):
                if moves and moves[-1].continued_by(move):
                    last = moves.pop()
                    move = replace(last, numel=last.numel + move.numel)
                moves.append(move)
        return tuple(moves)

    def moves_of(self, unit: int, p: Parameter, begin: int, end: int) -> Iterator[Move]:
        """Yield the moves that fill a part of one parameter.

        Args:
            unit: number of its unit in the new layout.
            p: the parameter.
            begin, end: the elements of the unit to fill, which are the parameter's.

        Raises:
            InvalidRequest: the old layout lacks the tensor, or has it in another shape, or in a dtype that is stored
                otherwise.
        """
        tensor = p.tensor
        boxes = self._boxes.get(tensor.name)
        if boxes is None:
            raise InvalidRequest(f"the checkpoint has no parameter {tensor.name!r}; it was saved from another model")
        old = boxes[0][1]
        if old.tensor.shape != tensor.shape:
            raise InvalidRequest(
                f"parameter {tensor.name!r} has shape {old.tensor.shape} in the checkpoint and {tensor.shape} in the "
                "model"
            )
        if old.dtype is not p.dtype and not (old.dtype.is_float and p.dtype.is_float):
            raise InvalidRequest(
                f"parameter {tensor.name!r} has dtype {old.dtype.torch_name} in the checkpoint and "
                f"{p.dtype.torch_name} in the model; only floating-point parameters are converted"
            )
        for source_unit, q in boxes:
            if not p.raw and not q.raw:
                for move in _common(source_unit, q, unit, p):
                    shifted = replace(move, source_begin=q.offset + move.source_begin, begin=p.offset + move.begin)
                    yield from shifted.written_to(begin, end)
            elif p.raw and q.raw and p.dtype is q.dtype and _is_same(q, p):
                copied = Move(source_unit=source_unit, source_begin=q.offset, unit=unit, begin=p.offset, numel=p.numel)
                yield from copied.written_to(begin, end)
            else:
                elements = raw.elements_in(p, begin - p.offset, end - p.offset)
                for move in _common(source_unit, q, unit, p):
                    yield from replace(move, converts=(q, p)).written_to(*elements)


def _is_same(q: Parameter, p: Parameter) -> bool:
    """Return True if two boxes of a tensor are the same."""
    return (q.shape, q.tensor.begin) == (p.shape, p.tensor.begin)


def _common(source_unit: int, q: Parameter, unit: int, p: Parameter) -> Iterator[Move]:
    """Yield the moves of all elements that a box of the old layout and a box of the new one have in common.

    They are counted from the first element of each.
    """
    if _is_same(q, p):
        yield Move(source_unit=source_unit, source_begin=0, unit=unit, begin=0, numel=p.count)
        return
    begins = [max(a, b) for a, b in zip(q.tensor.begin, p.tensor.begin, strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(q.tensor.begin, q.shape, p.tensor.begin, p.shape, strict=True)]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return
    source_strides, strides = _strides(q.shape), _strides(p.shape)
    source_begin = _distance(begins, q.tensor.begin, source_strides)
    target_begin = _distance(begins, p.tensor.begin, strides)
    loops = [(1, 1, 1)]  # (how often, distance in the source, distance in the target), the innermost first
    for begin, end, source_stride, stride in reversed(list(zip(begins, ends, source_strides, strides, strict=True))):
        count, source_inner, inner = loops[-1]
        if (source_stride, stride) == (count * source_inner, count * inner):
            loops[-1] = (count * (end - begin), source_inner, inner)
        elif end - begin > 1:
            loops.append((end - begin, source_stride, stride))
    (numel, *_), *outer = loops
    rows, source_step, step = outer.pop(0) if outer else (1, 0, 0)
    for indices in itertools.product(*(range(count) for count, _, _ in outer)):
        yield Move(
            source_unit=source_unit,
            source_begin=source_begin + sum(i * source for i, (_, source, _) in zip(indices, outer, strict=True)),
            unit=unit,
            begin=target_begin + sum(i * target for i, (_, _, target) in zip(indices, outer, strict=True)),
            numel=numel,
            rows=rows,
            source_step=source_step,
            step=step,
        )


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the distance in memory of neighbours in each dimension, in elements."""
    return list(itertools.accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1] if shape else []


def _distance(index: Sequence[int], origin: Sequence[int], strides: Sequence[int]) -> int:
    return sum((i - o) * stride for i, o, stride in zip(index, origin, strides, strict=True))
