"""The committed generated code is what `protoc` makes of the protos today, the type stubs included."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PACKAGE = Path("axon_ps/wire/v1")
PROTOS = sorted((ROOT / "protos" / PACKAGE).glob("*.proto"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    includes = importlib.resources.files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'protos'}",
            f"-I{includes}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            *map(str, PROTOS),
        ]
    )
    assert status == 0
    return out / PACKAGE


def test_there_are_protos() -> None:
    assert [p.stem for p in PROTOS] == sorted(p.stem for p in PROTOS)
    assert PROTOS


@pytest.mark.parametrize("proto", PROTOS, ids=lambda p: p.name)
@pytest.mark.parametrize("suffix", [".py", ".pyi"])
def test_generated_code_is_current(generated: Path, proto: Path, suffix: str) -> None:
    name = f"{proto.stem}_pb2{suffix}"
    committed = ROOT / PACKAGE / name
    assert committed.exists(), f"{name} was never generated; run `make proto`"
    assert committed.read_text() == (generated / name).read_text(), f"{name} is out of date; run `make proto`"


def test_no_generated_file_is_left_over() -> None:
    expected = {f"{p.stem}_pb2{suffix}" for p in PROTOS for suffix in (".py", ".pyi")}
    assert {p.name for p in (ROOT / PACKAGE).glob("*_pb2*.py*")} == expected


@pytest.mark.parametrize("proto", PROTOS, ids=lambda p: p.name)
def test_every_field_is_commented_and_every_enum_starts_unspecified(proto: Path) -> None:
    lines = proto.read_text().splitlines()
    assert len(lines) <= 150, f"{proto.name} has {len(lines)} lines; split it"
    above, in_enum = "", False
    for line in lines:
        code, _, comment = line.partition("//")
        is_field = "=" in code and code.strip().endswith(";") and not code.startswith("syntax")
        if code.strip().startswith("enum "):
            in_enum = True
        elif in_enum and is_field:
            assert code.strip().endswith("_UNSPECIFIED = 0;"), f"{proto.name}: {line.strip()}"
            in_enum = False
        elif is_field and not code.strip().isupper():
            documented = comment or above.startswith("//") or _enum_value(code)
            assert documented, f"{proto.name}: say what this is: {line.strip()}"
        above = line.strip()


def _enum_value(code: str) -> bool:
    return code.split("=")[0].strip().isupper()
