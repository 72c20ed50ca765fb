"""The main example's `--device`: a GPU that is not there is refused in words."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axon_ps.errors import ConfigurationError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("choice", "there"), [("auto", True), ("cpu", True), ("cuda", False)])
def test_a_gpu_that_is_not_there(choice: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train_gpt = importlib.import_module("train_gpt")
    world = SimpleNamespace(local_rank=1)
    if there:
        assert train_gpt.device_of(choice, world) == torch.device("cpu")
    else:
        with pytest.raises(ConfigurationError, match="--device cuda: PyTorch .* sees no GPU"):
            train_gpt.device_of(choice, world)
