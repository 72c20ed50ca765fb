"""`Residuals`: what quantising a rank's gradients lost, kept for the next step.

Owns: where the errors are, by bucket, and that they follow their gradients into other buckets. Refuses: to quantise.

    shape legend: n = world size; N = elements of a bucket; N_p = elements of rank p's piece

Note: [Error feedback]
What quantising loses is kept and added to the next gradient (Seide et al. 2014, "1-bit SGD"; Karimireddy et al. 2019,
https://arxiv.org/abs/1901.09847). Both directions do so, as in DoubleSqueeze (Tang et al. 2019,
https://arxiv.org/abs/1905.05957): every rank keeps the error of its gradient, f32[N], and the owner of a piece keeps
the error of the average, f32[N_p], which is n times as much in terms of one rank's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.ddp.buckets import GradientBucket

_HOST = torch.device("cpu")


class Residuals:
    """The errors of one rank's quantising, by bucket, in host memory or where the bucket is."""

    def __init__(self) -> None:
        self._gradients: dict[int, Tensor] = {}
        self._averages: dict[int, Tensor] = {}

    def of(self, bucket: GradientBucket, device: torch.device | None = None) -> Tensor:
        """f32[N]: the error of the bucket's gradients."""
        where = device or bucket.flat.device
        return self._get(self._gradients, bucket.index, bucket.numel, where)

    def of_average(self, bucket: GradientBucket, numel: int) -> Tensor:
        """f32[N_rank]: the error of the average of this rank's piece."""
        return self._get(self._averages, bucket.index, numel, _HOST)

    @staticmethod
    def _get(kept: dict[int, Tensor], index: int, numel: int, device: torch.device) -> Tensor:
        residual = kept.get(index)
        if residual is None:
            residual = kept[index] = torch.zeros(numel, device=device)
        if residual.numel() != numel:
            raise InvalidRequest(
                f"the errors of bucket {index} are of {residual.numel()} elements and it has {numel}; they are of "
                "another rank, world size or bucket size"
            )
        return residual

    def fold_average(self, bucket: GradientBucket, at: slice, world_size: int) -> None:
        """Make the average's error one of the gradient, where it will have the same effect."""
        average = self._averages.pop(bucket.index, None)
        if average is not None:
            gradient = self._gradients[bucket.index]
            gradient[at] += world_size * average.to(gradient.device)

    def move(self, before: Sequence[GradientBucket], after: Sequence[GradientBucket]) -> None:
        """Gradients are in other buckets: so are their errors."""
        parts: dict[int, Tensor] = {}
        for bucket in before:
            if (residual := self._gradients.pop(bucket.index, None)) is not None:
                parts |= zip(bucket.members, torch.split(residual, [v.numel() for v in bucket.views]), strict=True)
        if parts:
            for bucket in after:
                self._gradients[bucket.index] = torch.cat([parts[member] for member in bucket.members])

    def state_dict(self) -> dict[str, Tensor]:
        """Every error, by what it is of."""
        return {
            f"{what}.{index}": residual
            for what, kept in (("residual", self._gradients), ("average", self._averages))
            for index, residual in kept.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state_dict` gave.

        Raises:
            InvalidRequest: a name is not one of ours.
        """
        kinds = {"residual": self._gradients, "average": self._averages}
        named = [(name, *name.partition(".")) for name in state]
        if unknown := [name for name, kind, _, index in named if kind not in kinds or not index.isdigit()]:
            raise InvalidRequest(f"{unknown[0]!r} is no error of ours; give what state_dict() gave on this rank")
        for kept in kinds.values():
            kept.clear()
        for name, kind, _, index in named:
            kinds[kind][int(index)] = state[name].detach().to(torch.float32, copy=True)


def forget_what_is_not_finite(residual: Tensor) -> None:
    """Drop errors of infinity: a gradient scaler that tried too much would spoil every later step."""
    if not torch.isfinite(residual.sum()):
        residual[~torch.isfinite(residual)] = 0.0
