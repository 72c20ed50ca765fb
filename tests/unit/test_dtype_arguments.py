"""Every public argument that takes a dtype: it has all spellings, and refuses a wrong one in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from axon_ps import subscribe
from axon_ps.cli.main import main
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import MixedPrecision
from axon_ps.parallel.comm_hooks.hooks import CastHook
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.rpc.security import Security
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.precision import WirePrecision
from axon_ps.storage.export import export_model
from axon_ps.storage.hf_directory import export_directory
from axon_ps.types import FLOATS, NUMBERS, WIRE_DTYPES, DType, parse_dtype
from engine_driver import Servers, job_of
from test_diloco_steps import made
from test_snapshot import save

F32, BF16, F16 = WIRE_DTYPES
PARAMETERS = ", float8_e4m3, bf16, fp16, int4, int8"
GRADIENTS = ", block_top_k, float8_e4m3, bf16, fp16, int4, int8, top_k"
SPELLINGS: dict[Any, DType] = {
    **dict.fromkeys(("f32", "fp32", "float32", "torch.float32", "F32", F32, torch.float32), F32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "BFloat16", BF16, torch.bfloat16), BF16),
    **dict.fromkeys(("f16", "fp16", "float16", "half", "torch.half", F16, torch.half, np.dtype(np.float16)), F16),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four parameters, and beside them what is exported."""
    directory = tmp_path_factory.mktemp("checkpoint")
    servers = Servers(job_of(Layout(units=(build_unit("u", [("w", (4,), F32)]),))))
    servers.upload([np.arange(4, dtype=np.float32)])
    save(servers, str(directory / "1"), None)
    return directory


class Saved:
    """A wrapped model that has no servers to save it."""

    def save_checkpoint(self, uri: str) -> None:
        """End here: the dtype was accepted."""
        raise NotImplementedError(uri)


def ours(dtype: torch.dtype | None) -> DType:
    """The dtype that torch calls so."""
    (found,) = (dtype_ for dtype_, theirs in TORCH_DTYPES.items() if theirs is dtype)
    return found


def sent(precision: WirePrecision, kind: str) -> DType:
    """The dtype of what is sent, also by the compressors "bf16" and "fp16"."""
    compression: Any = getattr(precision, f"{kind}_compression")
    dtype: DType = getattr(precision, kind) if compression is None else compression.dtype
    return dtype


def written(file: Path) -> DType:
    """The dtype of a file of safetensors."""
    raw = file.read_bytes()
    return parse_dtype(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["w"]["dtype"])


def mixed(name: str) -> Callable[[Any, Path], DType]:
    return lambda given, _: ours(getattr(MixedPrecision(**{name: given}), name))


def of_module(given: Any, checkpoint: Path) -> DType:
    pytest.importorskip("accelerate")
    from axon_ps.huggingface.directory import save_pretrained

    with pytest.raises(NotImplementedError):
        save_pretrained(Saved(), checkpoint / "pretrained", dtype=given)  # type: ignore[arg-type]
    return SPELLINGS[given]


def subscribed(given: Any, _: Path) -> DType:
    with subscribe(coordinator="h:1", job="j", security=Security(token="t"), dtype=given) as subscription:
        dtype = subscription._subscriber._wanted_dtype
    assert dtype is not None
    return dtype


def of_file(given: Any, checkpoint: Path) -> DType:
    export_model(str(checkpoint), str(checkpoint / "m.safetensors"), given)
    return written(checkpoint / "m.safetensors")


def of_directory(given: Any, checkpoint: Path) -> DType:
    export_directory(str(checkpoint), str(checkpoint / "d"), given)
    return written(checkpoint / "d" / "model.safetensors")


@dataclass(frozen=True)
class Argument:
    """A public argument.

    Attributes:
        what: its name in messages.
        taken: gives the dtype as which a value is taken.
        among: the dtypes that it may be.
        also: the compressors that may be given, too.
    """

    what: str
    taken: Callable[[Any, Path], DType]
    among: tuple[DType, ...] = WIRE_DTYPES
    also: str = ""


ARGUMENTS = {
    "MixedPrecision.param_dtype": Argument("param_dtype", mixed("param_dtype"), FLOATS),
    "MixedPrecision.output_dtype": Argument("output_dtype", mixed("output_dtype"), FLOATS),
    "MixedPrecision.buffer_dtype": Argument("buffer_dtype", mixed("buffer_dtype"), FLOATS),
    "MixedPrecision.wire_dtype": Argument(
        "wire_dtype",
        lambda given, _: sent(MixedPrecision(wire_dtype=given).wire(torch.float32), "param"),
        also=PARAMETERS,
    ),
    "MixedPrecision.reduce_dtype": Argument(
        "reduce_dtype",
        lambda given, _: sent(MixedPrecision(reduce_dtype=given).wire(torch.float32), "grad"),
        also=GRADIENTS,
    ),
    "DiLoCo.wire_dtype": Argument(
        "wire_dtype", lambda given, _: sent(made(wire_dtype=given)[2].spec.precision, "grad"), also=GRADIENTS
    ),
    "DiLoCo.param_wire_dtype": Argument(
        "param_wire_dtype",
        lambda given, _: sent(made(param_wire_dtype=given)[2].spec.precision, "param"),
        (F32,),
        ", bf16, fp16, int4, int8",
    ),
    "CastHook.dtype": Argument("dtype", lambda given, _: ours(CastHook(given).dtype), (BF16, F16)),
    "subscribe": Argument("dtype", subscribed),
    "export_model": Argument("dtype", of_file),
    "export_directory": Argument("dtype", of_directory),
    "save_pretrained": Argument("dtype", of_module),
}


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_it_is_taken_in_every_spelling(argument: Argument, checkpoint: Path) -> None:
    spellings = {given: dtype for given, dtype in SPELLINGS.items() if dtype in argument.among}
    assert {given: argument.taken(given, checkpoint) for given in spellings} == spellings


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_wrong_one_is_refused_in_the_same_words(argument: Argument, checkpoint: Path) -> None:
    choices = ", ".join(dtype.torch_name for dtype in argument.among) + argument.also
    with pytest.raises(InvalidRequest) as caught:
        argument.taken("bfloat61", checkpoint)
    assert str(caught.value).startswith(f"{argument.what} is 'bfloat61'; use one of {choices}")
    assert str(caught.value).endswith("; is 'bfloat16' meant?") == (BF16 in argument.among)
    for known in ("i64", DType.I64, "float64", "bfloat16"):
        if parse_dtype(known, among=NUMBERS) not in argument.among:
            with pytest.raises(InvalidRequest, match=f"^{argument.what} is .*; use one of {choices}") as caught:
                argument.taken(known, checkpoint)
            assert "meant" not in str(caught.value)


@pytest.mark.parametrize("given", [given for given in SPELLINGS if isinstance(given, str)])
def test_the_command_line_takes_every_spelling(given: str, checkpoint: Path) -> None:
    file = checkpoint / "by_command.safetensors"
    assert main(["checkpoint", "export", str(checkpoint), str(file), "--dtype", given, "--no-progress"]) == 0
    assert written(file) is SPELLINGS[given]


def test_the_command_line_names_its_option(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(checkpoint), "--dtype", "bfloat61"]) == 2
    assert "--dtype is 'bfloat61'; use one of float32, bfloat16, float16; is 'bfloat16' meant?" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_dtype_is_known_by_its_names(dtype: DType) -> None:
    names = [*dtype.spellings, TORCH_DTYPES[dtype], str(TORCH_DTYPES[dtype]), dtype.value.upper(), dtype]
    assert {parse_dtype(name, among=NUMBERS) for name in names} == {dtype}
    assert dtype is BF16 or np.dtype(dtype.torch_name) == dtype.numpy


@pytest.mark.parametrize("given", [3, "", None, torch.int8, torch.float8_e4m3fn, DType.INT8_BLOCK, "int8_block"])
def test_what_is_no_dtype_of_numbers_is_refused_without_a_suggestion(given: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^dtype is .*; use one of float32, bfloat16, float16$"):
        parse_dtype(given)
