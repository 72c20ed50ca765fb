"""Communication hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axon_ps.compress.registry import compressor, names
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.comm_hooks.compressed import CompressedHook
from axon_ps.parallel.comm_hooks.hooks import AllReduceHook, CastHook, CommunicationHook, FunctionHook
from axon_ps.parallel.comm_hooks.int8 import Int8Hook


def comm_hook(name: str, *, error_feedback: bool | None = None, **options: Any) -> CommunicationHook:
    """Make a hook by its name.

    Args:
        name: "all_reduce", "bf16", "fp16", "int8", "int4", "top_k" or the name of any other compressor.
        error_feedback: True to add the compression error to the next gradient; None = the hook's default: off for bf16
            and fp16, on for int8 and the compressors.
        options: options of the compressor, such as `fraction=0.01` of top_k; all_reduce, bf16, fp16 and int8 have none.

    Raises:
        InvalidRequest: there is no hook of that name, or it does not take such an option.
    """
    own = ("all_reduce", "bf16", "fp16", "int8")
    if name not in own:
        try:
            return CompressedHook(compressor(name, **options), error_feedback=error_feedback is not False)
        except InvalidRequest as error:
            if name in names():
                raise
            raise InvalidRequest(f"no hook {name!r}; use all_reduce, or a compressor: {error}") from error
    if options:
        raise InvalidRequest(f"hook {name!r} takes no {', '.join(options)}")
    if name == "int8":
        return Int8Hook(error_feedback=error_feedback is not False)
    return AllReduceHook() if name == "all_reduce" else CastHook(name, error_feedback=bool(error_feedback))


def as_hook(hook: CommunicationHook | str | Callable[..., object] | None) -> CommunicationHook:
    """Return the given hook, or make one of a hook's name, of a function, or of None for the default.

    Raises:
        InvalidRequest: it is none of these.
    """
    if isinstance(hook, CommunicationHook):
        return hook
    if hook is None or isinstance(hook, str):
        return comm_hook(hook or "all_reduce")
    if callable(hook):
        return FunctionHook(hook)
    raise InvalidRequest(f"a hook is a CommunicationHook, its name or a function; given was a {type(hook).__name__}")
