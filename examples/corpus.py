"""The text of the main job: the Python source files of the interpreter's own standard library, as bytes.

Nothing is downloaded and nothing is cached on disk: about 10 MB are read when they are first asked for. A file belongs
to the training or the validation side by a hash of its path inside the library, so every process, machine and run
splits alike. Batches are a pure function of (seed, step, replica): a resumed or repeated run sees the same bytes.
Tests and generated tables are left out, some distributions do not ship them.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
VALIDATION_SHARE = 0.05
SEPARATOR = b"\n\x00\n"  # between two files; a zero byte is in no Python source


def is_validation(path: str) -> bool:
    """Whether the file at `path` (relative, with forward slashes) is held out; stable across machines and runs."""
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < VALIDATION_SHARE * 2**64


class Corpus:
    """Training and validation bytes, read when first used."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_path("stdlib"))

    @cached_property
    def files(self) -> list[str]:
        """Paths of all source files below the root, relative and sorted."""
        found = (path.relative_to(self.root) for path in self.root.rglob("*.py"))
        return sorted(path.as_posix() for path in found if LEFT_OUT.isdisjoint(path.parts))

    @cached_property
    def train(self) -> np.ndarray:
        """The training files, one after another: u8[bytes]."""
        return self._read(validation=False)

    @cached_property
    def validation(self) -> np.ndarray:
        """The held-out files, one after another: u8[bytes]."""
        return self._read(validation=True)

    def _read(self, *, validation: bool) -> np.ndarray:
        wanted = [path for path in self.files if is_validation(path) == validation]
        if not wanted:
            raise FileNotFoundError(f"no Python source files below {self.root}: is the standard library a zip file?")
        return np.frombuffer(SEPARATOR.join((self.root / path).read_bytes() for path in wanted), dtype=np.uint8)

    def batch(self, *, seed: int, step: int, replica: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Training windows and the byte after each of their bytes: two i64[batch, context]."""
        starts = np.random.default_rng([seed, step, replica]).integers(0, self.train.size - context, size=batch)
        return windows(self.train, starts, context)

    def validation_batches(
        self, *, windows_total: int, batch: int, context: int, replica: int, replicas: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This replica's share of a fixed, evenly spread part of the validation bytes, as (tokens, targets) pairs."""
        starts = np.linspace(0, self.validation.size - context - 1, windows_total).astype(np.int64)[replica::replicas]
        for begin in range(0, len(starts), batch):
            yield windows(self.validation, starts[begin : begin + batch], context)


def windows(data: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Cut data[start : start + context + 1] for each start into tokens and targets."""
    index = starts[:, None] + np.arange(context + 1)
    cut = torch.from_numpy(data[index].astype(np.int64))
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
