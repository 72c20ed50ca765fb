"""First values from a Hugging Face directory, module by module. It needs nothing of accelerate.

Tests of `huggingface/directory.py`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import axon_ps
from axon_ps.errors import InvalidRequest


@pytest.fixture(scope="module")
def pretrained() -> Callable[[nn.Module, Path], Callable[[nn.Module], None]]:
    """The function, without its package, which imports accelerate."""
    path = Path(axon_ps.__file__).parent / "huggingface" / "directory.py"
    spec = importlib.util.spec_from_file_location("directory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Any = module.pretrained
    return function


class Model(nn.Module):
    """An embedding that is tied to the output, a layer with statistics, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))


def trained() -> Model:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.norm.running_mean, model.norm.running_var):
            tensor.copy_(torch.randn(tensor.shape))
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The values of a model under one name each: of tied parameters, transformers saves the first."""
    return {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def filled(load: Callable[[nn.Module], None], model: Model) -> Model:
    """The model, each module of which is made and then loaded by itself, as a wrapper does."""
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        load(module)
    return model


@pytest.mark.parametrize("files", [1, 2])
def test_every_module_gets_its_values_from_one_file_or_several(pretrained: Any, tmp_path: Path, files: int) -> None:
    given = values(trained())
    if files == 1:
        save_file(given, tmp_path / "model.safetensors")
    else:
        names = sorted(given)
        parts = {f"part-{i}.safetensors": names[i::2] for i in range(2)}
        for file, held in parts.items():
            save_file({name: given[name] for name in held}, tmp_path / file)
        index = {name: file for file, held in parts.items() for name in held}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model = on_meta()
    loaded = filled(pretrained(model, tmp_path), model)
    for name, value in values(loaded).items():
        assert torch.equal(value, given[name]), name
    assert torch.equal(loaded.head.weight, given["embed.weight"])


def test_a_tied_parameter_may_be_saved_under_either_name(pretrained: Any, tmp_path: Path) -> None:
    given = values(trained())
    given["head.weight"] = given.pop("embed.weight")
    save_file(given, tmp_path / "model.safetensors")
    model = on_meta()
    assert torch.equal(filled(pretrained(model, str(tmp_path)), model).embed.weight, given["head.weight"])


def test_values_take_the_dtype_of_the_model(pretrained: Any, tmp_path: Path) -> None:
    given = values(trained())
    save_file({name: value.to(torch.bfloat16) for name, value in given.items()}, tmp_path / "model.safetensors")
    model = on_meta()
    loaded = filled(pretrained(model, tmp_path), model)
    assert loaded.scale.dtype is torch.float32
    assert torch.equal(loaded.scale, given["scale"].to(torch.bfloat16).float())


def test_a_directory_without_values_is_refused_at_once(pretrained: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        pretrained(on_meta(), tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given.pop("scale"), "the directory has no tensor 'scale'; it is of another model"),
        (lambda given: given.pop("embed.weight"), "the directory has no tensor 'embed.weight'"),
        (
            lambda given: given.update({"norm.bias": torch.zeros(4)}),
            r"'norm.bias' has shape \[4\] in the directory and \[3\] in the model",
        ),
    ],
)
def test_values_of_another_model_are_named(
    pretrained: Any, tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
    given = values(trained())
    change(given)
    save_file(given, tmp_path / "model.safetensors")
    model = on_meta()
    with pytest.raises(InvalidRequest, match=words):
        filled(pretrained(model, tmp_path), model)
