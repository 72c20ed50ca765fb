"""A checkpoint as a Hugging Face directory: files and index as transformers wants them, config and tokenizer beside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, build_unit
from axon_ps.storage.hf_directory import export_directory
from axon_ps.types import DType
from engine_driver import Servers, job_of
from test_snapshot import save

CONFIG = {
    "model_type": "gpt2",
    "torch_dtype": "float16",
    "dtype": "float16",
    "text_config": {"dtype": "float16"},
    "quantization_config": {"dtype": "int8"},
}
NAMES = ("net.a", "net.b", "net.c")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Three parameters of 4 elements."""
    servers = Servers(job_of(Layout(units=(build_unit("u", [(name, (2, 2), DType.F32) for name in NAMES]),))))
    servers.upload([np.arange(12, dtype=np.float32)])
    save(servers, str(tmp_path / "checkpoint"), None)
    return str(tmp_path / "checkpoint")


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """A directory of the model before it was trained."""
    directory = tmp_path / "like"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        (directory / name).write_text(name)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "training_args.bin"):
        (directory / name).write_text("old weights")
    return directory


def test_one_file_with_config_and_tokenizer_and_without_the_old_weights(
    checkpoint: str, like: Path, tmp_path: Path
) -> None:
    written = export_directory(checkpoint, str(tmp_path / "out"), like=str(like), prefix="net.")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    file = tmp_path / "out" / "model.safetensors"
    assert written == file.stat().st_size
    assert {name: value.sum() for name, value in load_file(file).items()} == {"a": 6.0, "b": 22.0, "c": 38.0}
    with safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("dtype", "name"), [(None, "float32"), (DType.BF16, "bfloat16"), (DType.F16, "float16")])
def test_the_config_says_which_dtype_the_tensors_have(
    dtype: DType | None, name: str, checkpoint: str, like: Path, tmp_path: Path
) -> None:
    export_directory(checkpoint, str(tmp_path / "out"), dtype, like=str(like))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert str(opened.get_tensor("net.a").dtype) == f"torch.{name}"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **CONFIG, "torch_dtype": name, "dtype": name, "text_config": {"dtype": name},
    }  # fmt: skip
    assert json.loads((like / "config.json").read_text()) == CONFIG


def test_several_files_have_an_index_and_replace_what_was_there(checkpoint: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export_directory(checkpoint, str(target))
    export_directory(checkpoint, str(target), max_file_bytes=16)
    files = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in target.iterdir()) == [*files, "model.safetensors.index.json"]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 48}, "weight_map": dict(zip(NAMES, files, strict=True))}
    export_directory(checkpoint, str(target), max_file_bytes=32)
    assert len(list(target.glob("model-*"))) == 2
    export_directory(checkpoint, str(target))
    assert [p.name for p in target.iterdir()] == ["model.safetensors"]


def test_what_cannot_be_exported_is_refused_before_anything_is_written(checkpoint: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for options, message in (
        ({"max_file_bytes": 0}, "max_file_bytes is 0"),
        ({"prefix": "other."}, "begins with 'other.'; the first ones are net.a, net.b, net.c"),
        ({"like": str(tmp_path)}, "it has no config.json"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            export_directory(checkpoint, str(target), **options)
    with pytest.raises(InvalidRequest, match="dtype is 'i64'"):
        export_directory(checkpoint, str(target), DType.I64)
    assert not target.exists()


ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


def cut(model: Any, ways: int) -> tuple[Layout, list[Any]]:
    """The layout and the units of a model whose linear layers are cut as `parallelize_module` cuts a Llama's."""
    parts: list[list[tuple[Parameter, Any]]] = [[] for _ in range(ways)]
    for name, value in model.named_parameters():
        module = name.split(".")[-2]
        dim = 0 if module in ROWS else 1 if module in COLUMNS else None
        for part, of in enumerate(parts if dim is not None else parts[:1]):
            box = value.detach() if dim is None else value.detach().chunk(ways, dim)[part]
            begin = tuple(part * box.shape[d] if d == dim else 0 for d in range(value.dim()))
            whole = FullTensor(name=name, shape=tuple(value.shape), begin=begin) if dim is not None else None
            own = f"part {part} of {name}" if whole else name
            of.append((Parameter(name=own, shape=tuple(box.shape), offset=0, full=whole), box))
    units = []
    for part, of in enumerate(parts):
        unit = build_unit(f"part {part}", [(p.name, p.shape, DType.F32) for p, _ in of])
        placed = (replace(at, full=p.full) for at, (p, _) in zip(unit.parameters, of, strict=True))
        units.append(replace(unit, parameters=tuple(placed)))
    return Layout(units=tuple(units)), [np.concatenate([box.reshape(-1).numpy() for _, box in of]) for of in parts]


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_a_mesh_has_cut(tmp_path: Path, ways: int, tied: bool) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config)
    layout, units = cut(model, ways)
    servers = Servers(job_of(layout), 3)
    servers.upload(units)
    save(servers, str(tmp_path / "checkpoint"), None)
    config.save_pretrained(tmp_path / "like")
    export_directory(str(tmp_path / "checkpoint"), str(tmp_path / "out"), like=str(tmp_path / "like"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state, tokens = loaded.state_dict(), torch.arange(16).view(2, 8)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
