"""Functions that torch.compile leaves alone.

Tests of `parallel/compile.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from axon_ps.parallel.compile import uncompiled, uncompiled_methods


@uncompiled
def doubled(x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
    """Double it."""
    assert not torch.compiler.is_compiling()
    return x * 2 + plus


def test_it_stays_the_function_that_it_was() -> None:
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Double it."
    assert doubled(torch.ones(2), plus=1.0).tolist() == [3.0, 3.0]


def test_a_compiled_function_calls_it_outside_of_its_graphs() -> None:
    graphs: list[int] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module.forward

    def model(x: torch.Tensor) -> torch.Tensor:
        return doubled(x + 1) + 3

    compiled = torch.compile(model, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [7.0, 7.0]
    assert graphs == [1, 1]  # one addition before the call, one after it


def test_methods_of_a_class_are_left_alone_but_for_pythons_own() -> None:
    @uncompiled_methods
    class Work:
        limit = 3

        def __init__(self) -> None:
            self.calls = 0

        def wait(self) -> int:
            self.calls += 1
            return self.calls

    work = Work()
    assert (work.wait(), work.wait(), Work.limit) == (1, 2, 3)
    assert getattr(Work.wait, "_torchdynamo_disable", False)
    assert not hasattr(Work.__init__, "_torchdynamo_disable")
