"""The manifests of deploy/kubernetes and the chart, against the published schemas, and against the command line.

Oracles: Kubernetes' own schemas (kubernetes-validate, strict), Kubeflow's models of TrainJob, ClusterTrainingRuntime
and JobSet, kustomize (kubectl) and Helm's own engine (helm-python-sdk).
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart
from kubeflow_trainer_api import models as trainer

from axon_ps.cli.serve import DRAIN_S
from axon_ps.cli.settings import PREFIX, Settings
from parsed_commands import entry_point, understood

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.27", "1.37")
"""The chart's oldest, and the newest."""

Manifest = Mapping[str, Any]
MODELS = {
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": trainer.TrainerV1alpha1ClusterTrainingRuntime,
    "JobSet": trainer.JobsetV1alpha2JobSet,
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "small": {"shards": {"replicas": 1}, "workers": {"count": 1}},
    "medium, GPUs, TLS, object store": {
        "tls": {"enabled": True},
        "image": {"prefix": "registry.example/team/", "tag": "0.2.0", "pullSecrets": [{"name": "registry"}]},
        "shards": {"replicas": 8, "initial": 4, "args": ["--threads=8"], "nodeSelector": {"pool": "cpu"}},
        "workers": {"kind": "trainjob", "count": 16, "min": 12, "processes": 8, "gpus": 8, "tag": "0.2.0-cuda",
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
        "checkpoints": {"uri": "s3://bucket/run", "claim": {"enabled": False}},
    },
    "large, etcd": {
        "metrics": {"enabled": True},
        "token": {"existingSecret": "the-token"},
        "coordinator": {"etcd": "etcd-0:2379,etcd-1:2379,etcd-2:2379", "replicas": 3, "args": ["--lease-s=10"]},
        "shards": {"replicas": 64},
        "workers": {"count": 256, "min": 200},
        "checkpoints": {"claim": {"existing": "shared"}},
    },
    "services only": {"workers": {"kind": "none"}, "networkPolicy": {"enabled": False},
                      "disruptionBudget": {"enabled": False}, "checkpoints": {"claim": {"storageClass": "nfs"}}},
}  # fmt: skip


def documents(text: str) -> list[Manifest]:
    """The manifests of a YAML text."""
    return [m for m in yaml.safe_load_all(text) if m]


def kustomized(directory: Path) -> list[Manifest]:
    """The manifests of a kustomization."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def charted(values: Mapping[str, Any], name: str = "axon-ps") -> list[Manifest]:
    """The manifests that the chart renders."""
    with Chart.load(KUBERNETES / "helm" / "axon-ps") as chart:
        rendered = chart.render(values=dict(values), name=name, namespace="training")
    return [m for file, text in rendered.items() if file.endswith(".yaml") for m in documents(text)]


@pytest.fixture(params=["base", "jobset", "trainjob", "tls", "tls+etcd", "metrics", *SIZES])
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> list[Manifest]:
    """All of every kustomization, and of the chart at every size."""
    kind = request.param
    if kind in SIZES:
        return charted(SIZES[kind], "run-1")
    if (KUBERNETES / kind).is_dir():
        return kustomized(KUBERNETES / kind)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    relative = Path(*[".."] * len(overlay.parts[1:]), *KUBERNETES.parts[1:])
    overlaid = {
        "resources": [str(relative / "jobset")],
        "components": [str(relative / "components" / name) for name in kind.split("+")],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(overlaid))
    return kustomized(overlay)


def checked(manifest: Manifest) -> None:
    """Compare a manifest with the schema of its kind."""
    if manifest["kind"] in MODELS:
        check_model(MODELS[manifest["kind"]], manifest)
    elif manifest["kind"] != "ServiceMonitor":  # no package has its schema: see test_the_monitor_...
        for version in VERSIONS:
            kubernetes_validate.validate(dict(manifest), version, strict=True)


def check_model(model: Any, manifest: Manifest) -> None:
    """A generated model takes what it knows and drops the rest: nothing may have been dropped."""
    kept = model.from_dict(copy.deepcopy(manifest)).to_dict()
    assert dropped(manifest, kept, "") == []


def dropped(given: Any, kept: Any, path: str) -> list[str]:
    """Where `kept` has less than `given`."""
    if isinstance(given, Mapping):
        return [
            found
            for key, value in given.items()
            for found in (dropped(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"])
        ]
    if isinstance(given, list):
        return [f for i, (g, k) in enumerate(zip(given, kept, strict=True)) for f in dropped(g, k, f"{path}[{i}]")]
    return []


def pod_templates(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """The kind and the template of everything that makes pods."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        spec = spec["template"]["spec"] if manifest["kind"] == "ClusterTrainingRuntime" else spec
        if manifest["kind"] == "StatefulSet":
            yield manifest["kind"], spec["template"]
        for replicated in spec.get("replicatedJobs", ()):
            yield manifest["kind"], replicated["template"]["spec"]["template"]


def test_every_manifest_is_of_its_schema(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        checked(manifest)


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (lambda m: m["spec"].update(replica=3), "StatefulSet"),
        (
            lambda m: m["spec"]["template"]["spec"]["containers"][0].update(ports=[{"containerPort": "x"}]),
            "StatefulSet",
        ),
        (lambda m: m["spec"]["replicatedJobs"][0]["template"]["spec"].update(paralelism=3), "JobSet"),
    ],
)
def test_a_wrong_one_is_refused(break_it: Callable[[Any], None], kind: str) -> None:
    broken = copy.deepcopy(next(m for m in kustomized(KUBERNETES / "jobset") if m["kind"] == kind))
    break_it(broken)
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        checked(broken)


def test_the_command_line_understands_every_container(manifests: list[Manifest]) -> None:
    (config,) = [m for m in manifests if m["kind"] == "ConfigMap"]
    ours = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    for _, template in pod_templates(manifests):
        (container,) = template["spec"]["containers"]
        names = {*config["data"], *(e["name"] for e in container["env"])}
        image = re.fullmatch(r".*axon-ps-(\w+)(:.*)?", container["image"])
        assert image is not None

        def expanded(argument: str, names: set[str] = names) -> str:
            assert set(re.findall(r"\$\((\w+)\)", argument)) <= names
            return re.sub(r"\$\((\w+)\)", lambda m: config["data"].get(m[1], "x"), argument)

        understood([*entry_point(image[1]), *map(expanded, container["args"])])
        assert {n for n in names if n.startswith(PREFIX)} <= ours


def test_pods_are_confined_and_fit_together(manifests: list[Manifest]) -> None:
    volumes = {m["metadata"]["name"] for m in manifests if m["kind"] == "PersistentVolumeClaim"} | {"shared"}
    configs = {m["metadata"]["name"] for m in manifests if m["kind"] == "ConfigMap"}
    labels = [template["metadata"]["labels"] for _, template in pod_templates(manifests)]
    for _, template in pod_templates(manifests):
        spec = template["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"], "Kubernetes' variables of services are called AXON_PS_... too"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPath" in volume for volume in spec["volumes"]), "nothing of the machine"
        writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert "/tmp" in writable
        assert writable <= {"/tmp", "/state", "/checkpoints", "/var/cache/axon-ps", "/dev/shm"}
        assert "command" not in container, "the image's own entry point: there is no shell"
        assert all(word not in ("sh", "bash") for probe in probes(container) for word in probe)
        assert {m["name"] for m in container["volumeMounts"]} <= {v["name"] for v in spec["volumes"]} | {"state"}
        assert {
            v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v
        } <= volumes
        assert {source["configMapRef"]["name"] for source in container["envFrom"]} <= configs
        drain_s = next((int(e["value"]) for e in container["env"] if e["name"] == "AXON_PS_DRAIN_S"), 0)
        assert spec["terminationGracePeriodSeconds"] > drain_s + DRAIN_S
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector", {}))
        wanted = selector.get("matchLabels", selector)
        there = any(wanted.items() <= label.items() for label in labels)
        assert there or manifest["metadata"]["name"].endswith("worker"), manifest


def probes(container: Manifest) -> list[list[str]]:
    """The commands of a container's probes."""
    return [container[kind]["exec"]["command"] for kind in container if kind.endswith("Probe")]


def test_probes_ask_what_is_served(manifests: list[Manifest]) -> None:
    (config,) = [m for m in manifests if m["kind"] == "ConfigMap"]
    assert "AXON_PS_INSECURE" not in config["data"]
    assert (config["data"]["AXON_PS_TLS"] == "1") != ("AXON_PS_TLS_CA" in config["data"])
    for kind, template in pod_templates(manifests):
        (container,) = template["spec"]["containers"]
        if kind != "StatefulSet":
            continue
        (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == "grpc"]
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container[name]
            copies = container["name"] == "shard" and name == "readinessProbe"
            asked = understood(probe["exec"]["command"][1:])
            assert (asked["address"], "Shard" in asked["service"]) == (f"127.0.0.1:{port}", copies)


def test_the_chart_with_its_own_values_is_the_kustomization() -> None:
    for kind, values in (("jobset", {}), ("trainjob", {"workers": {"kind": "trainjob"}})):
        values = {**values, "image": {"tag": "latest"}, "token": {"existingSecret": "axon-ps"}}
        ours, theirs = kustomized(KUBERNETES / kind), charted(values)
        assert {key(m): simplified(m) for m in theirs} == {key(m): simplified(m) for m in ours}


def with_metrics(tmp_path: Path) -> list[Manifest]:
    """The kustomization with the component `metrics`."""
    relative = Path(*[".."] * len(tmp_path.parts[1:]), *KUBERNETES.parts[1:])
    overlaid = {"resources": [str(relative / "base")], "components": [str(relative / "components" / "metrics")]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlaid))
    return kustomized(tmp_path)


@pytest.mark.parametrize("way", ["kustomize", "chart", "chart, TLS"])
def test_the_monitor_finds_the_ports_that_containers_have(way: str, tmp_path: Path) -> None:
    tls = way.endswith("TLS")
    values = {"metrics": {"enabled": True}, "tls": {"enabled": tls}, "token": {"existingSecret": "axon-ps"}}
    found = with_metrics(tmp_path) if way == "kustomize" else charted(values)
    (monitor,) = [m for m in found if m["kind"] == "ServiceMonitor"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "axon-ps", "key": "observer"}}
    assert endpoint["scheme"] == "https"
    assert ("ca" in endpoint["tlsConfig"]) == tls != ("insecureSkipVerify" in endpoint["tlsConfig"])
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [m for m in found if m["kind"] == "Service" and wanted <= m["metadata"]["labels"].items()]
    assert len(services) == 2
    assert all(endpoint["port"] in [p["name"] for p in service["spec"]["ports"]] for service in services)
    for kind, template in pod_templates(found):
        (container,) = template["spec"]["containers"]
        ports = {p["name"]: p["containerPort"] for p in container.get("ports", ())}
        its = {e["name"]: e.get("value") for e in container["env"]}
        assert its.get("AXON_PS_HTTP_PORT") == ("9090" if kind == "StatefulSet" else None)
        assert ("AXON_PS_OBSERVER_TOKEN" in its) == (kind == "StatefulSet")
        assert ports.get("http") == (9090 if kind == "StatefulSet" else None)
    (policy,) = [m for m in found if m["metadata"]["name"] == "axon-ps-metrics"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": "http"}]


def key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def simplified(manifest: Any) -> Any:
    """A manifest without what the two ways write differently: tags of images, lists by name, what is a default."""
    if isinstance(manifest, Mapping):
        found = {k: simplified(v) for k, v in manifest.items() if k not in ("imagePullPolicy", "annotations")}
        found.pop("timeoutSeconds", None)
        return found
    if isinstance(manifest, list):
        values = [simplified(v) for v in manifest]
        named = all(isinstance(v, Mapping) and "name" in v for v in values)
        return sorted(values, key=lambda v: str(v["name"])) if named else values
    return manifest.removesuffix(":latest") if isinstance(manifest, str) else manifest


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"coordinator": {"replicas": 2}}, "needs coordinator.etcd"),
        ({"workers": {"kind": "deployment"}}, "must be jobset, trainjob or none"),
        ({"shards": {"replcas": 8}}, "replcas"),
    ],
)
def test_the_chart_refuses_what_cannot_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        charted(values)


def test_two_releases_do_not_meet() -> None:
    first, second = charted({}, "run-1"), charted({}, "run-2")
    assert not {key(m) for m in first} & {key(m) for m in second}
    for manifest in (m for m in second if "selector" in m.get("spec", {})):
        selector = manifest["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        for _, template in pod_templates(first):
            assert not wanted.items() <= template["metadata"]["labels"].items()
