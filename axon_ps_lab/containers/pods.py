"""Runs each pod of rendered manifests as a container, with the settings that Kubernetes would give it.

Images, arguments, variables (`envFrom`, references to fields and secrets, `$(NAME)`), the user and the read-only root,
volumes, DNS names of headless services, gRPC probes, SIGTERM and the grace period are the manifest's. Scheduling,
network policies and budgets are left out.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from axon_ps.errors import AxonError
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.health import SERVING, health_of
from axon_ps.rpc.security import Security
from axon_ps_lab.containers.watch import address_of, output_of

NAMESPACE = "training"
Manifest = Mapping[str, Any]


def rendered(directory: str) -> list[Manifest]:
    """Return the manifests of a kustomization."""
    return [
        m
        for m in yaml.safe_load_all(output_of(str(Path(sys.executable).with_name("kubectl")), "kustomize", directory))
        if m
    ]


class Pods:
    """A namespace of pods; a context manager that ends all of them.

    Args:
        manifests: the rendered manifests.
        secrets: by name, the keys and values of each.
        config: values that the config map is to have instead of its own.
        prefix: the beginning of the names of the containers and the network.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        secrets: Mapping[str, Mapping[str, str]],
        config: Mapping[str, str],
        prefix: str,
    ) -> None:
        self._manifests, self._secrets, self._prefix = manifests, secrets, prefix
        self._config = {m["metadata"]["name"]: {**m["data"], **config} for m in self._of("ConfigMap")}
        self._running: dict[str, Manifest] = {}
        self._volumes: set[str] = set()

    def __enter__(self) -> Pods:
        output_of("docker", "network", "create", self._prefix)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            subprocess.run(["docker", "rm", "-fv", self._container(name)], capture_output=True)
        for volume in self._volumes:
            subprocess.run(["docker", "volume", "rm", "-f", volume], capture_output=True)
        output_of("docker", "network", "rm", self._prefix)

    # ------------------------------------------------------------------ controllers

    def stateful_set(self, name: str) -> Manifest:
        """Return the manifest of a StatefulSet."""
        return next(m for m in self._of("StatefulSet") if m["metadata"]["name"] == name)

    def scale(self, name: str, replicas: int, **changes: str) -> None:
        """Start and stop pods of a StatefulSet until there are so many; those that are stopped may take their time."""
        manifest = self.stateful_set(name)
        for ordinal in range(replicas):
            if f"{name}-{ordinal}" not in self._running:
                self.start(f"{name}-{ordinal}", manifest["spec"]["template"], manifest["spec"]["serviceName"], changes)
        for pod in self.pods_of(name)[replicas:]:
            self.stop(pod)

    def roll(self, name: str, **changes: str) -> Iterator[str]:
        """Update a StatefulSet pod by pod, in its controller's order; yields each pod once the new one is ready.

        The order is from the last pod to the first. A pod is stopped and made again with the new template. It must be
        ready before the next one is stopped.
        """
        manifest = self.stateful_set(name)
        for pod in reversed(self.pods_of(name)):
            self.stop(pod)
            self.start(pod, manifest["spec"]["template"], manifest["spec"]["serviceName"], changes)
            self.wait_ready(pod)
            yield pod

    def job(self, count: int) -> None:
        """Start and stop workers of the JobSet until there are so many."""
        (jobset,) = self._of("JobSet")
        (replicated,) = jobset["spec"]["replicatedJobs"]
        job = f"{jobset['metadata']['name']}-{replicated['name']}-0"
        for index in range(count):
            if f"{job}-{index}" not in self._running:
                self.start(f"{job}-{index}", replicated["template"]["spec"]["template"], "", {})
        for pod in self.pods_of(job)[count:]:
            self.stop(pod)

    def pods_of(self, name: str) -> list[str]:
        """Return the pods whose names begin so, by number."""
        pods = [pod for pod in self._running if re.fullmatch(rf"{re.escape(name)}-\d+", pod)]
        return sorted(pods, key=lambda pod: int(pod.rpartition("-")[2]))

    # ------------------------------------------------------------------ one pod

    def start(self, pod: str, template: Manifest, service: str, changes: Mapping[str, str]) -> None:
        """Start a pod; `changes` are variables that a new revision of the template has."""
        spec = template["spec"]
        (container,) = spec["containers"]
        environment = {**self._environment(container, pod), **changes}
        command = ["docker", "run", "-d", "--name", self._container(pod), "--hostname", pod, "--network", self._prefix]
        if service:
            hosts = f"{pod}.{service}", f"{pod}.{service}.{NAMESPACE}.svc", service
            command += [flag for host in hosts for flag in ("--network-alias", host)]
        command += [flag for name, value in environment.items() for flag in ("-e", f"{name}={value}")]
        command += self._security(spec, container) + self._mounts(spec, container)
        arguments = [self._expanded(argument, environment) for argument in container["args"]]
        output_of(*command, container["image"], *arguments)
        self._running[pod] = spec

    def stop(self, pod: str) -> None:
        """End a pod by SIGTERM, or SIGKILL after the grace period, and remove it.

        Raises:
            AssertionError: it did not end in that time, or ended with an error.
        """
        grace_s = self._running[pod]["terminationGracePeriodSeconds"]
        output_of("docker", "stop", "-t", str(grace_s), self._container(pod))
        code = output_of("docker", "inspect", "-f", "{{.State.ExitCode}}", self._container(pod))
        assert code in ("0", "143"), f"{pod} ended with {code}:\n{self.logs(pod)}"
        output_of("docker", "rm", "-v", self._container(pod))
        del self._running[pod]

    def wait_ready(self, pod: str, timeout_s: float = 120.0) -> None:
        """Probe a pod by its manifest until it is ready.

        Raises:
            AssertionError: it is not in time.
        """
        probe = self._running[pod]["containers"][0]["readinessProbe"]
        deadline = time.monotonic() + timeout_s
        while not self._passes(pod, probe["exec"]["command"]):
            assert time.monotonic() < deadline, f"{pod} is not ready:\n{self.logs(pod)}"
            time.sleep(probe["periodSeconds"])

    def address(self, pod: str, port: int) -> str:
        """Return the address at which this machine reaches a pod."""
        return f"{address_of(self._container(pod))}:{port}"

    def logs(self, pod: str) -> str:
        """Return the end of a pod's output."""
        done = subprocess.run(["docker", "logs", "--tail", "40", self._container(pod)], capture_output=True, text=True)
        return done.stdout + done.stderr

    def _passes(self, pod: str, command: Sequence[str]) -> bool:
        """Return True if `axon-ps health HOST:PORT [--service NAME]` of a probe would succeed from here."""
        address = self.address(pod, int(command[2].rpartition(":")[2]))
        service = command[4] if len(command) > 3 else ""
        security = Security(token=self._secrets["axon-ps"]["token"], tls=True).acting(Principal.OPERATOR, "default")
        health = health_of(address, security, service=service, timeout_s=5.0)
        try:
            return asyncio.run(health) == SERVING
        except AxonError:
            return False

    # ------------------------------------------------------------------ the settings of a template

    def _environment(self, container: Manifest, pod: str) -> dict[str, str]:
        fields = {"metadata.name": pod, "metadata.namespace": NAMESPACE, "spec.nodeName": f"node-of-{pod}"}
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= self._config[source["configMapRef"]["name"]]
        for variable in container.get("env", ()):
            origin = variable.get("valueFrom", {})
            if "secretKeyRef" in origin:
                found[variable["name"]] = self._secrets[origin["secretKeyRef"]["name"]][origin["secretKeyRef"]["key"]]
            elif "fieldRef" in origin:
                found[variable["name"]] = fields[origin["fieldRef"]["fieldPath"]]
            else:
                found[variable["name"]] = variable["value"]
        return found

    def _expanded(self, text: str, environment: Mapping[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), text)

    def _security(self, spec: Manifest, container: Manifest) -> list[str]:
        context = container["securityContext"]
        flags = ["--group-add", str(spec["securityContext"]["fsGroup"])]
        flags += ["--read-only"] if context["readOnlyRootFilesystem"] else []
        flags += [f"--cap-drop={name}" for name in context["capabilities"]["drop"]]
        return flags + ([] if context["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"])

    def _mounts(self, spec: Manifest, container: Manifest) -> list[str]:
        volumes = {v["name"]: v for v in spec.get("volumes", ())}
        flags = []
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"])  # else of a volumeClaimTemplate
            if volume is not None and "emptyDir" in volume:
                flags += ["--tmpfs", f"{mount['mountPath']}:rw,exec,mode=1777"]
            else:
                claim = mount["name"] if volume is None else volume["persistentVolumeClaim"]["claimName"]
                self._volumes.add(f"{self._prefix}-{claim}")
                flags += ["-v", f"{self._prefix}-{claim}:{mount['mountPath']}"]
        return flags

    def _container(self, pod: str) -> str:
        return f"{self._prefix}-{pod}"

    def _of(self, kind: str) -> list[Manifest]:
        return [m for m in self._manifests if m["kind"] == kind]
