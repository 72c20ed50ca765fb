"""`ServedMasters`: the values of a model on the shard servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from axon_ps.errors import StepAborted
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, check_unchanged
from axon_ps.parallel.fsdp.masters import TORN, Masters
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.world import world_of


class ServedMasters(Masters):
    """The values of a model on the shard servers.

    Args:
        wrapping: the options with which the model is wrapped.
        client: the worker's step client.
        flats: the flat units of the model.
    """

    def __init__(self, wrapping: Wrapping, client: StepClient, flats: Sequence[FlatUnit]) -> None:
        self._wrapping = wrapping
        self._client = client
        self._flats = flats

    def units(self, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
        """See `Masters.units`. The units are read one at a time."""
        check_unchanged(self._flats)
        began = self._latest
        for number in numbers:
            values = torch.empty(self._numel(number), dtype=torch.float32, device="cpu")
            self._client.parameters.gather(number, values.numpy(), exact=True).wait()
            self._check(began)
            yield values
            del values  # before the next one is made

    def moments(
        self, wanted: Iterable[tuple[int, Mapping[str, float]]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], Sequence[int]]]:
        """Yield moments of a unit, f32[unit_numel] by name, and the updates of each parameter; one unit at a time.

        Args:
            wanted: numbers of units, and initial values of the moments to be read. A moment that the optimizer does not
                have is at its initial value.

        Raises:
            StepAborted: the job went on without this worker meanwhile.
        """
        began = self._latest
        for index, initial in wanted:
            numel, updates = self._numel(index), list[int]()
            arrays = {
                name: torch.full((numel,), value, dtype=torch.float32, device="cpu") for name, value in initial.items()
            }
            for name, array in arrays.items():
                gather = self._client.parameters.gather
                gather(index, array.numpy(), exact=True, moment=name, updates=updates).wait()
                self._check(began)
            yield arrays, updates

    def _numel(self, unit: int) -> int:
        return self._wrapping.spec.layout.units[unit].numel

    @property
    def _latest(self) -> tuple[int, int]:
        return self._client.view.epoch, self._client.view.latest_version

    def _check(self, began: tuple[int, int]) -> None:
        if self._latest != began and not self._wrapping.spec.policy.asynchronous:
            raise StepAborted(TORN)

    def replace(self, values: Iterator[torch.Tensor]) -> None:
        """See `Masters.replace`."""
        pairs = zip(self._flats, values, strict=True)
        units = ((flat.index, value.numpy()) for flat, value in pairs if flat.pushes)
        world_of(self._wrapping.group).replace_parameters(units, model=self._wrapping.name)

    def gather(self, value: Any) -> list[Any]:
        """See `Masters.gather`."""
        return world_of(self._wrapping.group).gather_json(value, name=f"axon_ps/gather/{self._wrapping.name}")
