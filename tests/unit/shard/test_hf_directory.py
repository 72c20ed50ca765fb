"""A checkpoint as a Hugging Face directory: files and index as transformers wants them, config and tokenizer beside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Layout, build_unit
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
