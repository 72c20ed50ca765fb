"""Functions of torch, seen from a tensor that has no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PROPERTIES = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_mtia",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_vulkan",
    "is_xla",
    "is_xpu",
    "itemsize",
    "layout",
    "name",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
    "volatile",
)
_METHODS = (
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
)


def _described() -> frozenset[Any]:
    """Return the functions that get or set properties other than values."""
    found: set[Any] = {torch.is_complex, torch.is_floating_point, torch.numel, torch.is_tensor}
    for name in _PROPERTIES:
        if (descriptor := getattr(Tensor, name, None)) is not None and hasattr(descriptor, "__get__"):
            found.add(descriptor.__get__)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "requires_grad"):
        found.add(getattr(Tensor, name).__set__)
    return frozenset(found | {getattr(Tensor, name) for name in _METHODS})


DESCRIBES = _described()
"""The functions that torch may call on a tensor whose values are elsewhere."""


def function_name(func: Any) -> str:
    """Return the name by which a user calls one of torch's functions."""
    owner: Any = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") and hasattr(owner, "__name__"):
        return f"Tensor.{owner.__name__}"
    return str(torch.overrides.resolve_name(func) or getattr(func, "__name__", func))


__all__ = ["DESCRIBES", "function_name"]
