"""The Helm chart: the schema with which Helm checks values refuses a key that is misspelt, at any depth."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CHART = Path(__file__).parents[1] / "deploy" / "kubernetes" / "helm" / "axon-ps"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
KUBERNETES = ("requests", "limits")
"""Objects whose keys are those of Kubernetes: names of resources."""


def keys(values: Mapping[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
    """The path of every key of ours."""
    for key, value in values.items():
        yield (*before, key)
        if isinstance(value, dict) and key not in KUBERNETES:
            yield from keys(value, *before, key)


def with_key(path: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    """The chart's values with one more, beside that at `path`."""
    values = copy.deepcopy(VALUES)
    inside = values
    for name in path[:-1]:
        inside = inside[name]
    inside[key] = value
    return values


def test_the_charts_own_values_are_of_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    jsonschema.validate({**VALUES, "global": {"of": "the chart that has this one in it"}}, SCHEMA)


@pytest.mark.parametrize("path", [*keys(VALUES)], ids=".".join)
def test_a_misspelt_key_is_refused(path: tuple[str, ...]) -> None:
    misspelt = f"{path[-1][:-1]}{path[-1][-1] * 2}"
    with pytest.raises(jsonschema.ValidationError, match=f"'{misspelt}' was unexpected"):
        jsonschema.validate(with_key(path, misspelt, "x"), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("shards.replicas", "eight"),
        ("workers.count", 0),
        ("coordinator.args", "--lease-s=10"),
        ("checkpoints.claim.enabled", "yes"),
        ("workers.nodeSelector", {"pool": 1}),
        ("image.pullPolicy", "Sometimes"),
    ],
)
def test_a_value_of_another_kind_is_refused(path: str, value: Any) -> None:
    names = tuple(path.split("."))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(with_key(names, names[-1], value), SCHEMA)


def test_the_schema_has_no_key_that_the_chart_lacks() -> None:
    def named(schema: Mapping[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
        for key, value in schema.get("properties", {}).items():
            yield (*before, key)
            if key not in ("requests", "limits"):
                yield from named(value, *before, key)

    of_kubernetes = {path for path in named(SCHEMA) if path[-1] in ("requests", "limits", "claims", "global")}
    assert {path for path in named(SCHEMA) if path not in of_kubernetes and path[-2:-1] != ("pullSecrets",)} == {
        path for path in keys(VALUES) if path[-1] not in KUBERNETES
    }
