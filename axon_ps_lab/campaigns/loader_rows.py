"""The data set of `loader_worker`, in a separate module: a process that was not forked imports it to unpickle it."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor
from torch.utils.data import Dataset

BATCH, BATCHES = 2, 4


class Rows(Dataset[Tensor]):
    """Row i is i; a worker of a loader that gets to row `deadly` is killed."""

    def __init__(self, deadly: int = -1) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, i: int) -> Tensor:
        if i == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), float(i))
