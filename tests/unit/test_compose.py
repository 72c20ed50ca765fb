"""docker-compose.yml and the images say to the command line only what it understands: they cannot drift apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from axon_ps.cli.serve import DRAIN_S
from axon_ps.cli.settings import PREFIX, Settings
from axon_ps.worker.environment import worker_config
from parsed_commands import entry_point, understood

ROOT = Path(__file__).parents[2]
SERVICES = ("coordinator", "shard", "worker")
MAKES_SECRET = "secret"
"""The service that makes the job's secret, and ends."""

COMPOSE: Mapping[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


def dockerfile(service: str) -> str:
    """The Dockerfile with continued lines joined and comments left out."""
    text = (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def instruction(service: str, name: str) -> list[str]:
    """The arguments of the last `name` of a Dockerfile, which are in exec form, or none."""
    found = re.findall(rf"^{name}.*?(\[.*\])\s*$", dockerfile(service), flags=re.MULTILINE)
    return list(yaml.safe_load(found[-1])) if found else []


def caches(service: str) -> list[str]:
    """The folder of an image's compiled loops."""
    return re.findall(r"^ENV .*\bNUMBA_CACHE_DIR=(\S+)", dockerfile(service), flags=re.MULTILINE)


def image_of(service: Mapping[str, Any]) -> str:
    """Which of our images a compose service runs."""
    return str(service["image"]).removeprefix("axon-ps-").partition(":")[0]


def interpolated(text: str) -> str:
    """What compose makes of ${NAME:-default} when NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


DEMO = ("--time-budget-s", "150")
"""The demo is over in a few minutes; wherever else somebody says how many steps, so many are made."""

JOB = {name: service for name, service in COMPOSE["services"].items() if name != MAKES_SECRET}
"""The services of the job."""


def test_the_secret_is_made_first_and_everybody_gets_it() -> None:
    maker = COMPOSE["services"][MAKES_SECRET]
    program, *arguments = maker["entrypoint"]
    asked = understood(arguments)
    assert (program, asked["if_missing"]) == ("axon-ps", True)
    (mounted,) = maker["volumes"]
    assert str(asked["file"]).startswith(mounted.partition(":")[2] + "/")
    assert "-m 700 /secret" in dockerfile(image_of(maker))  # a new volume is as the image has it
    for service in JOB.values():
        assert service["environment"]["AXON_PS_TOKEN_FILE"] == str(asked["file"])
        assert f"{mounted}:ro" in service["volumes"]
        assert "--insecure" not in service.get("command", ())
    for name in ("coordinator", "shard"):  # and the workers wait for these
        assert JOB[name]["depends_on"][MAKES_SECRET] == {"condition": "service_completed_successfully"}


@pytest.mark.parametrize("name", sorted(JOB))
def test_a_services_command_is_understood(name: str) -> None:
    service = COMPOSE["services"][name]
    image = image_of(service)
    assert image in SERVICES
    assert service["build"]["dockerfile"] == f"services/{image}/Dockerfile"
    assert instruction(image, "ENTRYPOINT") == ["python", "/app/main.py"]
    understood([*entry_point(image), *map(interpolated, service.get("command", ()))])


def test_the_cluster_fits_together() -> None:
    services = JOB
    commands = {
        n: understood([*entry_point(image_of(s)), *map(interpolated, s.get("command", ()))])
        for n, s in services.items()
    }
    (coordinator,) = [n for n, s in services.items() if image_of(s) == "coordinator"]
    (shard,) = [n for n, s in services.items() if image_of(s) == "shard"]
    workers = [n for n, s in services.items() if image_of(s) == "worker"]
    assert commands[coordinator]["shards"] == int(interpolated(services[shard]["scale"])) == 2
    assert commands[coordinator]["min_workers"] == 1, "workers may be scaled down"
    for name in workers:
        count = int(interpolated(services[name]["scale"]))
        assert commands[name]["nnodes"] == commands[coordinator]["world_size"] == count
        assert commands[name]["node_rank"] is None, "of any number the coordinator gives out the ranks"
    for service in services.values():
        assert service["environment"]["AXON_PS_COORDINATOR"] == f"{coordinator}:{commands[coordinator]['port']}"
        assert any(volume.startswith("checkpoints:") for volume in service["volumes"])


def test_what_is_scaled_has_no_name_of_its_own() -> None:
    for service in COMPOSE["services"].values():
        assert not {"container_name", "hostname", "ports"} & service.keys()


def test_cpu_is_what_one_gets_and_cuda_a_profile() -> None:
    services = COMPOSE["services"]
    assert {n: s["profiles"] for n, s in services.items() if "profiles" in s} == {"worker-cuda": ["cuda"]}
    assert "whl/cpu" in services["worker"]["build"]["args"]["TORCH_INDEX_URL"]
    assert services["worker-cuda"]["build"]["args"]["EXTRAS"] == "torch,cuda13"  # whose lock has that PyTorch
    (device,) = services["worker-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", sorted(JOB))
def test_every_variable_is_read_by_somebody(name: str, tmp_path: Path) -> None:
    ours = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    for variable in COMPOSE["services"][name]["environment"]:
        assert variable in ours or not variable.startswith(PREFIX)
    environment = {k: interpolated(str(v)) for k, v in COMPOSE["services"][name]["environment"].items()}
    (tmp_path / "token").write_text("the-secret\n")
    config = worker_config(environment | {"AXON_PS_TOKEN_FILE": str(tmp_path / "token")})
    assert config.security.tokens() == ("the-secret",)
    assert config.job == environment["AXON_PS_JOB"]


def test_what_the_workers_run_is_in_the_image_and_takes_their_options() -> None:
    assert "COPY examples /app/examples" in dockerfile("worker")
    for service in JOB.values():
        if image_of(service) != "worker":
            continue
        program = understood([*entry_point("worker"), *map(interpolated, service["command"])])["program"]
        script = (ROOT / program[0]).read_text(encoding="utf-8")
        for option in program[1:]:
            assert f'"{option.partition("=")[0]}"' in script
        assert understood([*entry_point("worker"), *instruction("worker", "CMD")])["program"] == [program[0]]


@pytest.mark.parametrize("service", SERVICES)
def test_health_checks_ask_the_port_that_is_listened_on(service: str) -> None:
    check = instruction(service, "HEALTHCHECK")
    if service == "worker":
        assert check == ["python", "/app/health.py"], "no shell"
        assert "services/worker/health.py" in dockerfile(service)
        return
    assert check[:2] == ["axon-ps", "health"]
    port = understood(entry_point(service))["port"]
    assert understood(check[1:])["address"] == f"127.0.0.1:{port}"
    assert f"EXPOSE {port}" in dockerfile(service)


@pytest.mark.parametrize("service", SERVICES)
def test_images_run_as_nobody_in_particular_from_a_venv(service: str) -> None:
    text = dockerfile(service)
    _, packages, code, image, hardened = text.split("\nFROM ")
    assert "ARG PYTHON_IMAGE=python:3.11-slim-bookworm" in text
    assert packages.startswith("$PYTHON_IMAGE AS packages\n")
    assert code.startswith("packages AS code\n")
    assert image.startswith("$PYTHON_IMAGE AS with-tools\n")
    assert "\nUSER 10001:10001\n" in image, "by number, so that runAsNonRoot can be checked"
    assert "--uid 10001" in image
    assert "PATH=/opt/venv/bin:$PATH" in image
    assert "COPY --from=packages /opt/venv /opt/venv" in image
    assert "COPY --from=code /opt/code /opt/venv" in image, "a change of our code is a small layer"
    for compiler in ("gcc", "g++", "build-essential", "cmake"):
        assert compiler not in text
    for cache in caches(service):
        assert cache in re.findall(r"install -d -o axon .*", image)[0]
    assert hardened.split("\n") == [
        "with-tools",
        "USER 0:0",
        'RUN ["python3", "/app/only_python.py"]',
        "USER 10001:10001",
    ], "the last thing is that all programs but Python go"
    assert "services/image/only_python.py" in image


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_that_calls_loops_has_them_compiled_where_its_program_takes_them_from(service: str) -> None:
    compiled = re.findall(r"^RUN NUMBA_CACHE_DIR=(\S+) .*-m axon_ps.shard.loops$", dockerfile(service), re.MULTILINE)
    taken = re.findall(r'LOOPS = Path\("(.*)"\)', (ROOT / "services" / service / "main.py").read_text("utf-8"))
    assert compiled == taken
    assert len(compiled) == len(caches(service)) == (service != "coordinator")


@pytest.mark.parametrize("service", SERVICES)
def test_whatever_is_installed_is_installed_by_its_hash(service: str) -> None:
    assert "pip install" not in dockerfile(service), "services/image/ does"
    for script in ("packages.sh", "code.sh"):
        assert f"RUN sh services/image/{script}" in dockerfile(service)
        text = (ROOT / "services" / "image" / script).read_text(encoding="utf-8")
        for line in text.splitlines():
            if re.search(r"\binstall ", line) and "install()" not in line:
                by_hash = "--require-hashes" in line or "--no-index" in line  # what was built a line before
                assert by_hash or "-r torch.txt" in line, line  # docs/containers.md says what is known of that
    for extra in re.findall('ARG EXTRAS="(.*)"', dockerfile(service))[0].split(","):
        assert (ROOT / "services" / "locks" / f"{extra}.txt").exists()


def test_dockerfiles_differ_only_where_they_must() -> None:
    def build_stages(service: str) -> str:
        return dockerfile(service).partition(" AS with-tools")[0]

    assert build_stages("coordinator") == build_stages("shard"), "so that they share their largest layer"
    worker = re.sub(r"ARG TORCH_\w+=.*\n", "", build_stages("worker"))
    assert worker.replace('EXTRAS="torch"', 'EXTRAS="etcd"') == build_stages("coordinator")
    assert "whl/cpu" in re.findall('ARG TORCH_INDEX_URL="(.*)"', dockerfile("worker"))[0]


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_every_container_is_confined(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"], "the engine's seccomp profile stays"
    assert not {"privileged", "cap_add", "user", "pid", "ipc", "devices", "healthcheck"} & service.keys()
    writable = {each.partition(":")[0]: each for each in service["tmpfs"]}
    assert all("size=" in each for each in writable.values()), "memory is not without limit"
    assert "/tmp" in writable
    assert set(caches(image_of(service))) == writable.keys() - {"/tmp"}
    for mounted in service["volumes"]:
        assert not mounted.startswith((".", "~")), f"{mounted}: nothing of the machine"


def test_the_coordinators_state_outlives_it_and_is_not_shared() -> None:
    assert "/state" in COMPOSE["services"]["coordinator"]["volumes"], "of this container alone, and kept over a restart"
    assert str(understood(entry_point("coordinator"))["state"]).startswith("/state/")


def test_compose_waits_longer_than_services_drain() -> None:
    for service in JOB.values():
        if image_of(service) != "worker":
            drain_s = int(service["environment"].get("AXON_PS_DRAIN_S", 0))
            assert int(str(service["stop_grace_period"]).rstrip("s")) > drain_s + DRAIN_S


def test_what_is_copied_into_the_images_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for service in SERVICES:
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile(service), flags=re.MULTILINE):
            for source in sources.split():
                assert f"!{source.split('/')[0].rstrip('*')}" in ignored


def test_what_dies_is_started_again() -> None:
    for service in JOB.values():
        assert str(service["restart"]).startswith("on-failure")
        if image_of(service) == "worker":
            assert str(service["restart"]) != "on-failure", "a program that always fails ends some time"


def test_so_many_steps_are_made_as_somebody_says_but_in_the_demo() -> None:
    (made_by_demo,) = re.findall(r"train_gpt\.py (.*)\$\(DEMO_ARGS\)", (ROOT / "Makefile").read_text())
    assert tuple(made_by_demo.split()) == DEMO
    program = (ROOT / "examples" / "train_gpt.py").read_text()
    (default,) = re.findall(r'"--time-budget-s", type=float, default=([\d.]+)', program)
    assert float(default) == 0.0
    assert "--steps=${STEPS:-300}" in COMPOSE["services"]["worker"]["command"]
    assert not any("time-budget" in word for word in COMPOSE["services"]["worker"]["command"])
