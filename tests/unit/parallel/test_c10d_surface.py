"""torch asks a process group in Python and in C++: whatever the installed torch may ask of ours, ours answers.

A name that torch has added since is found here, by itself: give it an answer, or say why there is none.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.parallel.c10d.process_group import AxonProcessGroup

_NO_BACKEND = "needs a backend of C++'s, and says so"
_OF_TORCH = "torch's own, right for every group"

NOT_OURS = {
    "_add_ephemeral_timeout": _NO_BACKEND,
    "_backend_id": _NO_BACKEND,
    "_enable_collectives_timing": _NO_BACKEND,
    "_get_backend_name": "answers with our getBackendName",
    "_id": _OF_TORCH,
    "_register_backend": "for groups that have backends",
    "_register_on_completion_hook": _NO_BACKEND,
    "_set_default_backend": "for groups that have backends",
    "_wait_for_pending_works": _NO_BACKEND,
    "bound_device_id": _OF_TORCH,
    "boxed": _OF_TORCH,
    "get_reconfigure_handle": "supports_reconfigure is False",
    "merge_remote_group": _NO_BACKEND,
    "mergeRemoteGroup": _NO_BACKEND,
    "new_window": "supports_window is False",
    "reconfigure": "supports_reconfigure is False",
    "register_abort_hook": "supports_abort_hooks is False",
    "register_post_hook": "kept by torch, called around operations that torch dispatches",
    "register_pre_hook": "kept by torch, called around operations that torch dispatches",
    "supportsReconfigure": "asks supports_reconfigure",
    "unbox": _OF_TORCH,
    "unregister_abort_hook": "supports_abort_hooks is False",
    "unregister_post_hook": _OF_TORCH,
    "unregister_pre_hook": _OF_TORCH,
    "use_pg_for_symm_mem_rendezvous": _NO_BACKEND,
}
"""What torch's class has and ours does not define: why."""


def ours() -> set[str]:
    """Every name that a class of ours defines."""
    classes = [c for c in AxonProcessGroup.__mro__ if c.__module__.startswith("axon_ps")]
    return {name for c in classes for name in vars(c)}


def asked_in_python() -> set[str]:
    """The methods and properties of `dist.ProcessGroup`."""
    names = {n for n in dir(dist.ProcessGroup) if not n.startswith("__") and "pybind11" not in n}
    return {n for n in names if not isinstance(getattr(dist.ProcessGroup, n), type | dist.ProcessGroup.BackendType)}


def asked_in_cpp() -> set[str]:
    """The functions of Python that torch's C++ looks for in a subclass of `dist.ProcessGroup`."""
    headers = Path(torch.__file__).parent.glob("include/torch/csrc/distributed/c10d/**/PyProcessGroup.hpp")
    text = re.sub(r"//.*", "", next(headers).read_text()).split("using ProcessGroup::ProcessGroup")[1]
    overridden = set(re.findall(r"\b(\w+)\([^;{}]*\)\s*(?:const )?override \{", text))
    looked_up = set(re.findall(r'get_override\([^"]*"(\w+)"\)', text))  # under another name than C++'s
    return overridden - {"startCoalescing", "endCoalescing"} | looked_up


def test_every_name_that_torch_asks_for_is_answered() -> None:
    asked = asked_in_python() | asked_in_cpp()
    assert {"allreduce", "group_name", "getGroupName", "setGroupName", "getRank"} <= asked
    unanswered = asked - ours() - NOT_OURS.keys()
    assert not unanswered, f"torch {torch.__version__} asks for {sorted(unanswered)}: define them, or say why not"
    assert not NOT_OURS.keys() & ours()


@pytest.fixture
def group() -> AxonProcessGroup:
    return AxonProcessGroup(
        ProcessGroup.mock(), HashStore(), timeout_s=5.0, on_shutdown=lambda: None, split=lambda *_: pytest.fail("split")
    )


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda base, group: base.group_name.__get__(group), "the name"),
        (lambda base, group: base.group_desc.__get__(group), "what it is for"),
        (lambda base, group: base.name(group), "axon"),
        (lambda base, group: base.rank(group), 0),
        (lambda base, group: base.size(group), 1),
    ],
    ids=["name", "desc", "backend", "rank", "size"],
)
def test_cpp_gets_the_answers_that_python_gets(group: AxonProcessGroup, ask: Any, answer: object) -> None:
    dist.ProcessGroup._set_group_name(group, "the name")  # type: ignore[arg-type]  # as C++ does it
    dist.ProcessGroup._set_group_desc(group, "what it is for")
    assert ask(dist.ProcessGroup, group) == answer
    assert (group.group_name, group.pg_name, group.group_desc) == ("the name", "the name", "what it is for")


def test_a_capability_we_lack_is_answered_with_no(group: AxonProcessGroup) -> None:
    for name in [n for n in dir(dist.ProcessGroup) if n.startswith("supports_")]:
        assert getattr(group, name) is False, name
    group.set_timeout(timedelta(seconds=3))
    assert group.options._timeout == timedelta(seconds=3)
