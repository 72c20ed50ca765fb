"""Values that are committed with a step: small texts by name, which the coordinator does not interpret. Pure.

Note: [Committed with a step]
    The position of a training program, such as the number of samples used, must change exactly when the parameters do.
    Otherwise a worker's death makes the program use samples twice or never. So these values are a part of the step:
    every worker votes for them, the votes must agree, and they are in the decision and in the same transaction of the
    store. A step that is skipped, since its gradients are not finite, commits them too: it is decided, and its samples
    have been used. An aborted step does not commit them. A value stays until a later step commits another one of its
    name. A checkpoint has the values of its version, which are restored with it.
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
    """Return why these cannot be the committed values of a model, as text; empty when they can."""
    if any(not name or not name.isprintable() for name in values):
        return "a name of a value to commit is empty or not printable"
    size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in values.items())
    if size_bytes <= MAX_BYTES:
        return ""
    names = ", ".join(sorted(values))[:80]
    return f"the values committed with the steps of a model ({names}) have {size_bytes} bytes; at most {MAX_BYTES}"


def checked(values: Mapping[str, str]) -> Mapping[str, str]:
    """Check values, and return them.

    Raises:
        InvalidRequest: they cannot be committed.
    """
    if why := problem(values):
        raise InvalidRequest(why)
    return values


def encoded(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Encode values to commit with a step: JSON, with the same text for equal values.

    Raises:
        InvalidRequest: they are not JSON values, or too large.
    """
    try:
        texts = {str(name): json.dumps(value, sort_keys=True, separators=(",", ":")) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"what is committed with a step must be JSON values: {error}") from error
    return checked(texts)
