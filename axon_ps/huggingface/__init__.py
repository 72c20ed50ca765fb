"""Hugging Face's libraries on shard servers: `Accelerator`, `Trainer`, and any subclass of `Trainer`.

A script changes one import: `from axon_ps.huggingface import Accelerator` replaces accelerate's, `Trainer` replaces
transformers', and `on_servers(SFTTrainer)` is for other trainers. It needs the extra `hf`. See docs/integrations.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import accelerate as _accelerate  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "accelerate":
        raise
    raise ModuleNotFoundError(
        "axon_ps.huggingface needs accelerate, which is not installed: pip install 'axon-ps[hf]'", name="accelerate"
    ) from None

from axon_ps.huggingface.accelerator import Accelerator, ServerPlugin
from axon_ps.huggingface.directory import pretrained, save_pretrained

if TYPE_CHECKING:
    from axon_ps.huggingface.trainer import Trainer, on_servers

_OF_TRAINER = ("Trainer", "on_servers")


def __getattr__(name: str) -> Any:
    """Import transformers when it is first used: that takes seconds."""
    if name in _OF_TRAINER:
        from axon_ps.huggingface import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Accelerator", "ServerPlugin", "Trainer", "on_servers", "pretrained", "save_pretrained"]
