"""The docstring of every public name: an editor shows it to a newcomer, who reads shapes, units and errors there."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import axon_ps
from axon_ps.collectives import functional
from test_choices import MODULES, public_functions

ARRAYS = re.compile(r"Tensor|\bArray\b|AnyArray|\bT\b|ListT|ndarray|NDArray|^data$|^tensor$|^gradients?$")
"""Of an annotation, or of a name without one."""

SHAPES = re.compile(r"\[[^\]]+\]|shape|dtype|scalar|\bpair\b|elements")
SECONDS = re.compile(r"\bseconds\b|\b\d+ s\b")
INTERNAL = re.compile(
    r"(\w+Backend|BlockTopK|TopK|Int4|Int8|CommunicationHook|PipelineStage|GradientBucket|Work)\."
    r"|ProcessGroup.backend_of|\w+\.(reduce|load_state_dict)$"
)
"""Called by our own code, or with what another function gave; `reduce` is Lightning's."""

FUNCTIONS = {name: function for name, function in public_functions() if not INTERNAL.match(name)}


def test_every_public_name_has_a_docstring() -> None:
    public = {f"{m.__name__}.{name}": getattr(m, name) for m in MODULES for name in m.__all__}
    classes = {name: each for name, each in public.items() if inspect.isclass(each)}
    nameless = [name for name, each in public.items() if callable(each) and not inspect.getdoc(each)]
    for name, each in classes.items():
        for method, member in vars(each).items():
            function: Any = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not method.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                nameless.append(f"{name}.{method}")
    assert (
        nameless + [name for name, each in FUNCTIONS.items() if each.__name__ != "__init__" and not each.__doc__] == []
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_tells_shapes_units_and_errors(name: str) -> None:
    function = FUNCTIONS[name]
    if function.__name__ == "__init__":
        return  # the class's docstring has its arguments
    text = function.__doc__ or ""
    given = inspect.signature(function).parameters
    takes_arrays = any(ARRAYS.search(str(p.annotation)) or ARRAYS.search(p.name) for p in given.values())
    times = [p for p in given.values() if p.name.endswith("_s") and str(p.annotation) != "Seconds"]
    assert not takes_arrays or SHAPES.search(text), "neither a shape nor a dtype"
    assert not times or SECONDS.search(text), "no unit of time"
    communicates = getattr(axon_ps, name, None) is function or name.startswith("ProcessGroup.")
    raises = takes_arrays and (communicates or "raise " in inspect.getsource(function))
    assert not raises or re.search(r"Raises:|\braises\b", text), "no errors"


@pytest.mark.parametrize(
    "name", [name for name in vars(functional) if re.match(r"(all_reduce|reduce_scatter)_\w+", name)]
)
def test_a_function_made_by_another_has_the_docstring_that_editors_show(name: str) -> None:
    below = re.search(rf'^{name} = .*\n"""((?s:.*?))"""', inspect.getsource(functional), re.MULTILINE)
    function = getattr(functional, name)
    assert below is None or inspect.cleandoc(below[1]) == inspect.cleandoc(function.__doc__)
    assert below is not None or name == "all_reduce_sum_group"
