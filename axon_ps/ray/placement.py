"""Nodes of Ray, and placement groups: they are placed in time, or an error names the missing resources.

A node's name in axon_ps is its Ray node id. So the coordinator puts a backup on another Ray node than its primary, and
workers and servers share memory only with those of their node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from axon_ps.errors import Busy

_HEAD: Final = "node:__internal_head__"
RESTART_S: Final = 1.0
"""Seconds between two checks for the restart of a dead service by Ray."""

_NOT_ASKED: Final = ("memory", "object_store_memory")


@dataclass(frozen=True)
class RayNode:
    """A live node of the Ray cluster.

    Attributes:
        id: its Ray node id.
        ip: its address.
        is_head: whether Ray's own control service runs there. Its death ends the Ray cluster.
        resources: the resources that Ray gives out there, in all.
    """

    id: str
    ip: str
    is_head: bool
    resources: Mapping[str, float]


def nodes() -> list[RayNode]:
    """Return the live nodes, the head first."""
    found = [
        RayNode(n["NodeID"], n["NodeManagerAddress"], _HEAD in n["Resources"], n["Resources"])
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted(found, key=lambda node: not node.is_head)


def create_placement_group(
    what: str, bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float
) -> PlacementGroup:
    """Make a placement group, and wait until Ray has placed it.

    Args:
        what: its purpose, for messages.
        bundles: the resources of each member.
        strategy: Ray's.
        timeout_s: seconds that Ray may take. An autoscaler starts nodes meanwhile.

    Raises:
        Busy: it has not placed it in that time. The group is removed.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    free = ray.available_resources()
    here = ", ".join(_text(node.resources) for node in nodes())
    raise Busy(
        f"Ray could not place {what} within {timeout_s:.3g} s: {len(bundles)} of {_text(bundles[0])} by {strategy}. "
        f"Its nodes have: {here}; free, of all together: {_text(free)}. Ask for fewer or smaller ones, add nodes, or, "
        "if STRICT_SPREAD was asked for, use SPREAD"
    )


class Release:
    """Removes a placement group when a service that has a bundle of it is gone for good; a detached actor.

    Args:
        service: that service's actor.
        group: the placement group.
    """

    def __init__(self, service: Any, group: PlacementGroup) -> None:
        threading.Thread(target=self._run, args=(service, group), daemon=True).start()

    def _run(self, service: Any, group: PlacementGroup) -> None:
        while not _has_ended(service):
            time.sleep(RESTART_S)
        remove_placement_group(group)
        ray.actor.exit_actor()


def _has_ended(service: Any) -> bool:
    """Wait for the end of a service; False = Ray starts it again, or that is not known."""
    try:
        ray.get(service.wait.remote())
    except ActorDiedError:
        return True
    except RayError:
        return False
    return True


def release_with(service: Any, group: PlacementGroup) -> None:
    """Have a placement group removed with a service, if this process, an actor, ends before it can do that.

    Ray removes the groups that a driver has made when the driver ends. It keeps the groups that an actor has made until
    the actor *and* its driver have ended: the shard servers' reservation would outlive each run of Ray Train.
    """
    options = {"num_cpus": 0, "lifetime": "detached", "max_restarts": -1}
    ray.remote(Release).options(**options).remote(service, group)


def in_bundle(group: PlacementGroup, index: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that has a bundle of a placement group, and goes where Ray moves it."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": others,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
    }


def on_node(node: RayNode) -> dict[str, Any]:
    """Return the options of an actor that runs on one node only, and takes none of Ray's resources."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}


def _text(resources: Mapping[str, float]) -> str:
    asked = {n: a for n, a in resources.items() if n not in _NOT_ASKED and ":" not in n and "_group_" not in n}
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(asked.items())) + "}"
