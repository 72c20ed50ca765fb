"""`Residuals`: the compression errors of a rank's gradients, which are added to those of the next step.

Owns: the memory of the errors, by bucket, and moving them when gradients go to other buckets. Refuses: to compress.

    shape legend: n = world size; N = elements of a bucket; N_p = elements of rank p's segment

Note: [Error feedback]
The error of quantising is added to the next gradient (Seide et al. 2014, "1-bit SGD"; Karimireddy et al. 2019,
https://arxiv.org/abs/1901.09847). `CompressedHook` does so in both directions, as in DoubleSqueeze (Tang et al. 2019,
https://arxiv.org/abs/1905.05957). Every rank has the residual of its gradient, f32[N]. The rank that averages a segment
also has the residual of the average, f32[N_p]. `fold_average` adds that to the residual of the gradient, multiplied by
n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.ddp.buckets import GradientBucket

_HOST = torch.device("cpu")


class Residuals:
    """The errors of one rank's quantising, by bucket, in host memory or on the bucket's device."""

    def __init__(self) -> None:
        self._gradients: dict[int, Tensor] = {}
        self._averages: dict[int, Tensor] = {}

    def of(self, bucket: GradientBucket, device: torch.device | None = None) -> Tensor:
        """Return the error of the bucket's gradients, f32[N]."""
        where = device or bucket.flat.device
        return self._get(self._gradients, bucket.index, bucket.numel, where)

    def of_average(self, bucket: GradientBucket, numel: int) -> Tensor:
        """Return the error of the average of this rank's segment, f32[N_rank]."""
        return self._get(self._averages, bucket.index, numel, _HOST)

    @staticmethod
    def _get(residuals: dict[int, Tensor], index: int, numel: int, device: torch.device) -> Tensor:
        residual = residuals.get(index)
        if residual is None:
            residual = residuals[index] = torch.zeros(numel, dtype=torch.float32, device=device)
        if residual.numel() != numel:
            raise InvalidRequest(
                f"the errors of bucket {index} are of {residual.numel()} elements and it has {numel}; they are of "
                "another rank, world size or bucket size"
            )
        return residual

    def fold_average(self, bucket: GradientBucket, at: slice, world_size: int) -> None:
        """Add the average's error to that of the gradient, where it has the same effect."""
        average = self._averages.pop(bucket.index, None)
        if average is not None:
            gradient = self._gradients[bucket.index]
            gradient[at] += world_size * average.to(gradient.device)

    def move(self, before: Sequence[GradientBucket], after: Sequence[GradientBucket]) -> None:
        """Move the errors of gradients that are in other buckets now."""
        by_member: dict[int, Tensor] = {}
        for bucket in before:
            if (residual := self._gradients.pop(bucket.index, None)) is not None:
                by_member |= zip(bucket.members, torch.split(residual, [v.numel() for v in bucket.views]), strict=True)
        if by_member:
            for bucket in after:
                self._gradients[bucket.index] = torch.cat([by_member[member] for member in bucket.members])

    def state_dict(self) -> dict[str, Tensor]:
        """Return every error, by name."""
        return {
            f"{what}.{index}": residual
            for what, residuals in (("residual", self._gradients), ("average", self._averages))
            for index, residual in residuals.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the errors that `state_dict` returned.

        Raises:
            InvalidRequest: a name is not one of ours.
        """
        kinds = {"residual": self._gradients, "average": self._averages}
        named = [(name, *name.partition(".")) for name in state]
        if unknown := [name for name, kind, _, index in named if kind not in kinds or not index.isdigit()]:
            raise InvalidRequest(f"{unknown[0]!r} is no error of ours; give what state_dict() gave on this rank")
        for residuals in kinds.values():
            residuals.clear()
        for name, kind, _, index in named:
            kinds[kind][int(index)] = state[name].detach().to(torch.float32, copy=True)


def drop_non_finite(residual: Tensor) -> None:
    """Set errors that are not finite to 0. Otherwise too high a loss scale in one step would spoil every later step."""
    if not torch.isfinite(residual.sum()):
        residual[~torch.isfinite(residual)] = 0.0
