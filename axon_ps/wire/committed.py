"""Values that are committed with a step: small texts by name, of which the coordinator knows no more. Pure.

Note: [Committed with a step]
    Where a training program is, such as how many samples of the data it has used, must move exactly when the parameters
    do, or a worker's death makes it use samples twice or never. So these values are a part of the step: every worker
    votes for them, the votes must agree, and they are in the decision and in the same transaction of the store as it.
    A step that is skipped, since its gradients are not finite, commits them too: it is decided, and its samples have
    been used. One that is aborted does not. A value stays until a later step commits another one of its name. A
    checkpoint has the values of its version, and who restores it goes on with those.
    (Kafka commits the offsets that a transaction has consumed with it in the same way.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from axon_ps.errors import InvalidRequest

MAX_BYTES = 4096
"""Most bytes of all committed values of a model together, with their names, in UTF-8."""


def problem(values: Mapping[str, str]) -> str:
    """Why these cannot be the committed values of a model, as text; empty when they can."""
    if any(not name or not name.isprintable() for name in values):
        return "a name of a value to commit is empty or not printable"
    size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in values.items())
    if size_bytes <= MAX_BYTES:
        return ""
    names = ", ".join(sorted(values))[:80]
    return f"the values committed with the steps of a model ({names}) have {size_bytes} bytes; at most {MAX_BYTES}"


def checked(values: Mapping[str, str]) -> Mapping[str, str]:
    """The same values.

    Raises:
        InvalidRequest: they cannot be committed.
    """
    if why := problem(values):
        raise InvalidRequest(why)
    return values


def encoded(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Values to commit with a step, as they travel: JSON, one text for equal values.

    Raises:
        InvalidRequest: they are no JSON, or too large.
    """
    try:
        texts = {str(name): json.dumps(value, sort_keys=True, separators=(",", ":")) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"what is committed with a step must be JSON values: {error}") from error
    return checked(texts)
