"""What `MixedPrecision` says that travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axon_ps.errors import InvalidRequest
from axon_ps.parallel import Int4, Int8, MixedPrecision, TopK
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType

F32, BF16 = DType.F32, DType.BF16


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, WirePrecision(param=F32, grad=F32)),
        ({"param_dtype": torch.bfloat16}, WirePrecision(param=BF16, grad=BF16)),
        ({"wire_dtype": "int8"}, WirePrecision(param_compression=Int8(), grad_compression=Int8())),
        (
            {"param_dtype": torch.bfloat16, "wire_dtype": Int8(64), "reduce_dtype": torch.bfloat16},
            WirePrecision(param_compression=Int8(64), grad=BF16),
        ),
        (
            {"wire_dtype": "int8", "reduce_dtype": "int4"},
            WirePrecision(param_compression=Int8(), grad_compression=Int4()),
        ),
        ({"wire_dtype": "int4"}, WirePrecision(param_compression=Int4(), grad_compression=Int4())),
        ({"reduce_dtype": TopK(0.1)}, WirePrecision(grad_compression=TopK(0.1))),
        ({"wire_dtype": torch.bfloat16, "reduce_dtype": "top_k"}, WirePrecision(param=BF16, grad_compression=TopK())),
    ],
)
def test_what_travels(given: dict[str, Any], expected: WirePrecision) -> None:
    assert MixedPrecision(**given).wire(torch.float32) == expected


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"wire_dtype": "top_k"}, "parameters cannot travel as a top-k"),
        ({"wire_dtype": "int2"}, "'int8', 'int4' or 'top_k'"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype has dtype torch.int8"),
    ],
)
def test_what_cannot_travel_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        MixedPrecision(**given).wire(torch.float32)
