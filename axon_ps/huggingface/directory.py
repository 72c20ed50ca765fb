"""Hugging Face directories in and out of the servers, without the model in the memory of any worker.

On the way in, a model on the meta device gets its first values from the directory, unit by unit, on the one worker that
uploads them. On the way out, the servers write a checkpoint, and the first worker makes a directory of it, a few MiB at
a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.storage.files import open_store
from axon_ps.storage.hf_directory import INDEX, MAX_FILE_BYTES, SINGLE, export_directory, set_config_dtype
from axon_ps.types import parse_dtype


def pretrained(model: nn.Module, directory: str | os.PathLike[str]) -> Callable[[nn.Module], None]:
    """Return a `param_init_fn` for `FullyShardedDataParallel`: it loads the values of a directory of safetensors.

        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        model.tie_weights()
        model = FSDP(model, unit_types={...}, param_init_fn=pretrained(model, directory))

    Args:
        model: the module that will be wrapped, on the meta device.
        directory: with `model.safetensors`, or several files and their index: as transformers, `export_directory` and
            DCP's `HuggingFaceStorageWriter` write them.

    Raises:
        InvalidRequest: the directory has no such files; or, when a parameter is loaded, it lacks this parameter, or has
            it in another shape.
    """
    files = _files(Path(directory))
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    same: dict[int, list[str]] = {}  # the names of a tied parameter, of which the files have one
    for name, param in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(param), []).append(name)
    aliases = {name: names for names in same.values() for name in names}

    def load(module: nn.Module) -> None:
        prefix = prefixes[id(module)]
        held = {**module._parameters, **module._buffers}
        skipped = module._non_persistent_buffers_set
        with torch.no_grad():
            for name, tensor in held.items():
                if tensor is not None and name not in skipped:
                    tensor.copy_(_read(files, aliases.get(prefix + name, [prefix + name]), tensor.shape))

    return load


def save_pretrained(
    model: FullyShardedDataParallel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Make a directory that `from_pretrained` reads of a model on the servers. Training may go on after it.

    Every worker calls it, and none has the model in its memory. The directory has the module's persistent buffers, too.

    Args:
        model: the wrapped model. The config of a transformers model is saved, too.
        directory: the destination, which this worker and the servers reach by the same path.
        tokenizer: saved beside it; anything with `save_pretrained`.
        dtype: that of parameters and f32 buffers, as `types.parse_dtype` takes it; None = as the model was built.
        max_file_bytes: most bytes of tensors in a file that has several of them.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype.
        CheckpointError: a file cannot be written.
    """
    target = Path(directory).absolute()
    beside = target.with_name(f".{target.name}.checkpoint")
    as_dtype = None if dtype is None else parse_dtype(dtype)
    written = model.save_checkpoint(str(beside))

    def export() -> None:
        if written is None:
            return
        try:
            export_directory(str(beside), str(target), as_dtype, model=model.name, max_file_bytes=max_file_bytes)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        for name in ("config", "generation_config"):
            config: Any = getattr(model.module, name, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(target)
        spec = model.spec
        set_config_dtype(
            open_store(str(target)), [as_dtype] if as_dtype else [p.dtype for _, p in spec.layout.parameters()]
        )
        if tokenizer is not None:
            tokenizer.save_pretrained(target)

    model.runtime.masters.together("the directory was not written, since that failed", export)


def _files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name."""
    if (index := directory / INDEX).exists():
        named = json.loads(index.read_text())["weight_map"]
        return {tensor: directory / file for tensor, file in named.items()}
    if (single := directory / SINGLE).exists():
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    raise InvalidRequest(f"{directory} has neither {SINGLE} nor {INDEX}; give a directory of safetensors")


def _read(files: dict[str, Path], names: Iterable[str], shape: torch.Size) -> torch.Tensor:
    found = next((name for name in names if name in files), None)
    if found is None:
        raise InvalidRequest(f"the directory has no tensor {next(iter(names))!r}; it is of another model")
    with safe_open(files[found], "pt") as file:
        tensor: torch.Tensor = file.get_tensor(found)
    if tensor.shape != shape:
        raise InvalidRequest(
            f"{found!r} has shape {list(tensor.shape)} in the directory and {list(shape)} in the model"
        )
    return tensor


__all__ = ["pretrained", "save_pretrained"]
