"""Lightning's strategies over axon_ps. Importing this registers them.

    axon        the model and its optimizers on the shard servers
    axon_ddp    Lightning's DDP over the backend "axon"
    axon_fsdp2  Lightning's ModelParallelStrategy (FSDP2, by `configure_model`) over the backend "axon"

Use `Trainer(strategy="axon")`, or `Trainer(strategy=AxonStrategy(...))` to say how the model is wrapped. It needs the
extra `lightning`. See docs/integrations.md.
"""

from __future__ import annotations

try:
    import lightning as _lightning  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "axon_ps.lightning needs Lightning, which is not installed: pip install 'axon-ps[lightning]'", name="lightning"
    ) from None

from axon_ps.lightning.over_backend import DDPOverAxon, FSDP2Strategy, register
from axon_ps.lightning.strategy import AxonStrategy

register(AxonStrategy)

__all__ = ["AxonStrategy", "DDPOverAxon", "FSDP2Strategy"]
