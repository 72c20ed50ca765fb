"""What `MixedPrecision` says that travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axon_ps.compress import BF16 as CompressedBF16
from axon_ps.compress import FP16 as CompressedFP16
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import Int4, Int8, MixedPrecision, TopK
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType

F32, BF16, F16 = DType.F32, DType.BF16, DType.F16


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
        *(({"wire_dtype": n}, WirePrecision(param=BF16, grad=BF16)) for n in ("bfloat16", "torch.bf16")),
        *(({"wire_dtype": n}, WirePrecision(param=F16, grad=F16)) for n in ("float16", "f16", "half")),
        # as ever, the compressors of these names, which feed their errors back
        *(({"reduce_dtype": n}, WirePrecision(grad_compression=CompressedBF16())) for n in ("bf16", "BF16")),
        ({"wire_dtype": "fp16"}, WirePrecision(param_compression=CompressedFP16(), grad_compression=CompressedFP16())),
    ],
)
def test_what_travels(given: dict[str, Any], expected: WirePrecision) -> None:
    assert MixedPrecision(**given).wire(torch.float32) == expected


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"wire_dtype": "top_k"}, "parameters cannot travel as a top-k"),
        ({"reduce_dtype": "topk"}, "reduce_dtype is 'topk'; .*, int8, top_k, .* --plugins MODULE .*; is 'top_k' meant"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype is torch.int8; use one of float32"),
        ({"wire_dtype": torch.float64}, "wire_dtype is torch.float64; use one of .* by importing it$"),
    ],
)
def test_what_cannot_travel_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        MixedPrecision(**given).wire(torch.float32)
