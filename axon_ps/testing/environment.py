"""`ClusterEnvironment`: the variables by which the processes of a `LocalCluster` find each other."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from axon_ps.rpc.security import Security
from axon_ps.worker.environment import security_variables

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ClusterEnvironment:
    """The variables of one job's processes.

    Attributes:
        job, token, plugins: see the arguments.
        observer_token: a client with this token can only read; empty if the job has no token.
        security: token and certificates for a client of the job.

    Args:
        job: name of the job.
        token: the job's token; None = a random one, "" = none.
        security: the security of connections; its token is not used.
        plugins: modules that the services import.
        variables: further variables for every process.
    """

    def __init__(
        self,
        job: str,
        token: str | None,
        *,
        security: Security | None = None,
        plugins: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        given = security or Security()
        self.job = job
        self.token = secrets.token_urlsafe(16) if token is None else token
        self.observer_token = secrets.token_urlsafe(16) if self.token else ""
        self.security = dataclasses.replace(given, token=self.token, mutual=False)
        self._mutual = given.mutual
        self.plugins = tuple(plugins)
        self._variables = dict(variables or {})

    def common(self) -> dict[str, str]:
        """Return the variables that every process of the job has."""
        return {"AXON_PS_JOB": self.job, **security_variables(self.security), **self._variables}

    def of_service(self, directory: Path) -> dict[str, str]:
        """Return the variables of a service; `directory` gets the audit log."""
        values = {"AXON_PS_LOG": "plain", "AXON_PS_AUDIT_LOG": str(directory / "audit.jsonl")}
        values |= {name: self._variables[name] for name in values if name in self._variables}
        values |= {"AXON_PS_OBSERVER_TOKEN": self.observer_token} if self.token else {}
        if self._mutual:
            values["AXON_PS_TLS_MUTUAL"] = "1"
        if self.plugins:
            values |= {
                "AXON_PS_PLUGINS": ",".join(self.plugins),
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            }
        return self.common() | values

    def of_worker(self, address: str, rank: int, world_size: int) -> dict[str, str]:
        """Return the variables of a worker, as `axon-ps run` sets them.

        Args:
            address: the coordinators'.
            rank: the rank it requests; -1 = any free one.
            world_size: workers of the job.
        """
        host, _, port = address.partition(",")[0].rpartition(":")
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if rank >= 0 else {}),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "AXON_PS_COORDINATOR": address,
            "OMP_NUM_THREADS": "1",
            **self.common(),
        }


def of_process(values: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without the variables of a launcher or another cluster, and `values`."""
    ours = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES and not k.startswith("AXON_PS_")}
    return ours | dict(values)
