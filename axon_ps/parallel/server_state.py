"""`optimizer.state` of an optimizer whose moments are elsewhere: an empty dict that refuses writes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from axon_ps.errors import Misuse


class ServerState(defaultdict[torch.Tensor, Any]):
    """An empty dict. `clear()` begins the moments anew, as in torch. The entry of one parameter is refused.

    Args:
        begin_anew: returns a function that begins all moments anew, or None once the optimizer is gone.
    """

    def __init__(self, begin_anew: Callable[[], Callable[[], None] | None]) -> None:
        super().__init__()
        self._begin_anew = begin_anew

    def clear(self) -> None:
        """Begin the moments of all parameters anew."""
        if (begin_anew := self._begin_anew()) is not None:
            begin_anew()

    @contextlib.contextmanager
    def holding(self, values: Mapping[torch.Tensor, Any]) -> Iterator[None]:
        """Hold entries during the block."""
        dict.update(self, values)
        try:
            yield
        finally:
            dict.clear(self)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise Misuse(
            "optimizer.state has no entry of a parameter: its moments are on the shard servers, and under NO_SHARD in "
            "the state that optimizer.state_dict() gives. optimizer.state.clear() has all moments begin anew with the "
            "next step; model.save_checkpoint(uri, optimizer) saves them and load_checkpoint(uri, optimizer) brings "
            "them back. Under NO_SHARD an optimizer of torch.optim has its state here"
        )

    def __missing__(self, key: torch.Tensor) -> NoReturn:
        self._refuse()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = _refuse


__all__ = ["ServerState"]
