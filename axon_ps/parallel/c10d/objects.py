"""torch.distributed's object collectives over "axon": values are encoded, or pickled if the user asks for it.

torch pickles the objects that `all_gather_object` and its like get, and unpickles the bytes that peers send. So each
member of the group can run code in every process, and so can an attacker on a network that is not encrypted. Here the
value is encoded as in `collectives.encoding`, with the types of `object_types`. With `AXON_PS_ALLOW_PICKLE=1` on every
rank torch's own way is used.

Owns: the replacements of torch's two functions that convert an object to a tensor and back. Groups over other backends
use torch's. torch looks the functions up at every call, so the order of imports does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d

from axon_ps.collectives.encoding import decode, encode
from axon_ps.errors import ConfigurationError, InvalidRequest
from axon_ps.parallel.c10d.object_types import TORCH
from axon_ps.parallel.c10d.process_group import AxonProcessGroup

ALLOW_PICKLE: Final = "AXON_PS_ALLOW_PICKLE"
"""Environment variable: at 1, torch pickles objects over "axon", too."""

_REPLACED: Final = ("_object_to_tensor", "_tensor_to_object")
_PARAMETERS: Final = ("obj", "device", "group"), ("tensor", "tensor_size", "group")
_POINT_TO_POINT: Final = ("send_object_list", "recv_object_list")
_ANY: Final = "an object collective"
_PICKLED: Final = b"\x80"


def install() -> None:
    """Replace torch's functions. Repeated calls do nothing.

    Raises:
        ConfigurationError: this torch has other functions.
    """
    theirs = [getattr(c10d, name, None) for name in _REPLACED]
    if any(getattr(function, "__module__", "") == __name__ for function in theirs):
        return
    for function, expected in zip(theirs, _PARAMETERS, strict=True):
        if function is None or tuple(inspect.signature(function).parameters) != expected:
            raise ConfigurationError(
                f"object collectives of torch {torch.__version__} cannot be made without pickle: it has no "
                f"{' or '.join(_REPLACED)} as axon_ps knows them. Use a torch that axon_ps supports, or set "
                f"{ALLOW_PICKLE}=1 on every rank if each of them may run code in all the others"
            )
    for name, function, made in zip(_REPLACED, theirs, (_encoding, _decoding), strict=True):
        setattr(c10d, name, made(function))


def _ours(group: Any) -> AxonProcessGroup | None:
    found = c10d._get_default_group() if group is None else group
    return found if isinstance(found, AxonProcessGroup) else None


def _encoding(theirs: Any) -> Callable[..., Any]:
    def _object_to_tensor(obj: Any, device: Any, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if (ours := _ours(group)) is None:
            return theirs(obj, device, group)  # type: ignore[no-any-return]
        encoded = np.frombuffer(_encoded(obj, ours), np.uint8)
        data = torch.tensor(encoded, dtype=torch.uint8, device=device)  # with memory of its own, which torch resizes
        return data, torch.tensor([data.numel()], dtype=torch.int64, device=device)

    return _object_to_tensor


def _decoding(theirs: Any) -> Callable[..., Any]:
    def _tensor_to_object(tensor: torch.Tensor, tensor_size: Any, group: Any) -> Any:
        if _ours(group) is None:
            return theirs(tensor, tensor_size, group)
        data = tensor.cpu().numpy().tobytes()[: int(tensor_size)]
        if data.startswith(_PICKLED):
            raise InvalidRequest(
                f"a rank sent a pickled object, which is not read; it has {ALLOW_PICKLE}=1 and this rank has not. "
                "Set it on every rank, or on none"
            )
        return decode(data, _ANY, TORCH)

    return _tensor_to_object


def _encoded(obj: Any, group: AxonProcessGroup) -> bytes:
    """Encode an object. If it cannot be sent, the other ranks of a collective get an error, too."""
    try:
        return encode(obj, _ANY, TORCH)
    except InvalidRequest as error:
        what, collective = _caller()
        refused = InvalidRequest(
            f"{what}{str(error).removeprefix(_ANY)}. Over 'axon' objects are not pickled; {ALLOW_PICKLE}=1 on every "
            "rank pickles them, if each rank may run code in all the others"
        )
        if not collective:
            raise refused from error
        with group.group.calls.preparing(what, device=False, timeout_s=None, async_op=False):
            raise refused from error


def _caller() -> tuple[str, bool]:
    """Return the torch function that is being called, and True if it is a collective.

    It is slow: call it only for messages.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == c10d.__name__ and "object" in name and not name.startswith("_"):
            return name, name not in _POINT_TO_POINT
        frame = frame.f_back
    return _ANY, False


__all__ = ["ALLOW_PICKLE", "install"]
