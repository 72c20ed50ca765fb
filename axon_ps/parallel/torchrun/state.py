"""The state of torch's rendezvous as JSON. torch passes it pickled, and a pickle from elsewhere may run any code.

Pure. Invariant: bytes that are unpickled were pickled by this process. Bytes from elsewhere are parsed as JSON, and
become the few types that torch's state is made of. Anything else is an error.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import datetime
from typing import Any

import torch
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as Node
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState as State

from axon_ps.texts import value_of_json


def to_json(pickled: bytes) -> bytes:
    """Return the state that torch has pickled in this process, as JSON.

    Raises:
        RendezvousStateError: this torch's state is made of types that are unknown here.
    """
    return json.dumps({name: _encoded(value) for name, value in vars(pickle.loads(pickled)).items()}).encode()


def from_json(text: bytes) -> bytes:
    """Return the state in JSON, pickled for torch.

    Raises:
        RendezvousStateError: it is not a state of this torch's rendezvous.
    """
    state = State()
    known = vars(state)
    try:
        given = {name: _decoded(value) for name, value in value_of_json(text, "the state").items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RendezvousStateError(f"the state of the rendezvous is no state of torch's: {error}") from None
    for name, present in known.items():
        types = (datetime, type(None)) if present is None else (type(present),)
        if type(given.get(name)) not in types:
            raise RendezvousStateError(
                f"the state of the rendezvous has {name}={given.get(name)!r}, which torch {torch.__version__} does not "
                "know: have the same version of torch on all nodes"
            )
    known.update({name: given[name] for name in known})
    return pickle.dumps(state)


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    if isinstance(value, Node):
        return {"node": [value.addr, value.pid, value.local_id]}
    if isinstance(value, set):
        return {"set": sorted((_encoded(each) for each in value), key=str)}
    if isinstance(value, dict):
        return {"map": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    raise RendezvousStateError(
        f"the rendezvous of torch {torch.__version__} has a {type(value).__name__} in its state, which axon_ps cannot "
        "store; use the rendezvous backend c10d, or a torch that axon_ps is tested with"
    )


def _decoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    ((kind, content),) = value.items()
    return _OF_KIND[kind](content)


def _node(content: Any) -> Node:
    addr, pid, local_id = content
    return Node(str(addr), int(pid), int(local_id))


def _members(content: Any) -> set[Node]:
    return {_node(each["node"]) for each in content}


def _by_member(content: Any) -> dict[Node, Any]:
    return {_node(key["node"]): _decoded(each) for key, each in content}


_OF_KIND: dict[str, Callable[[Any], Any]] = {
    "time": datetime.fromisoformat,
    "node": _node,
    "set": _members,
    "map": _by_member,
}
