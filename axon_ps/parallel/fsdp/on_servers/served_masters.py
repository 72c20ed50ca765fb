"""`ServedMasters`: the values of a model on the shard servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        view, spec = self._client.view, self._wrapping.spec
        began = view.epoch, view.latest_version
        for number in numbers:
            values = torch.empty(spec.layout.units[number].numel, dtype=torch.float32, device="cpu")
            self._client.parameters.gather(number, values.numpy(), exact=True).wait()
            if (view.epoch, view.latest_version) != began and not spec.policy.asynchronous:
                raise StepAborted(TORN)
            yield values

    def replace(self, values: Iterator[torch.Tensor]) -> None:
        """See `Masters.replace`."""
        pairs = zip(self._flats, values, strict=True)
        units = ((flat.index, value.numpy()) for flat, value in pairs if flat.pushes)
        world_of(self._wrapping.group).replace_parameters(units, model=self._wrapping.name)

    def gather(self, value: Any) -> list[Any]:
        """See `Masters.gather`."""
        return world_of(self._wrapping.group).gather_json(value, name=f"axon_ps/gather/{self._wrapping.name}")
