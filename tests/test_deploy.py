"""The image, the compose file and the Kubernetes manifests, as far as they can be read.

No image is built here. What they say is held against what is there: files, extras, options of the
command lines of dl2gpu and Dask, names, ports, labels.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from typer.main import get_command

import dl2gpu
from dl2gpu.cli import app

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU_EXTRAS = sorted(e for e in PROJECT["optional-dependencies"] if e.startswith("gpu-"))
NOBODY = 65534


# --------------------------------------------------------------------------------------------------
# Command lines


def check_dl2gpu(words: list[str]) -> dict[str, Any]:
    """Parses the arguments of ``dl2gpu`` as it would, without running it; its options by name."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert words[0] in commands, words
    context = commands[words[0]].make_context(words[0], list(words[1:]))
    return dict(context.params)


def check_dask(words: list[str]) -> dict[str, Any]:
    """The same for ``dask``. dask-cuda's worker is held against Dask's: of those that both have."""
    from distributed.cli import dask_scheduler, dask_worker

    if words[0] == "cuda":
        words = words[1:]
        assert words[0] == "worker"
    main = {"scheduler": dask_scheduler.main, "worker": dask_worker.main}[words[0]]
    options = dict(main.make_context(words[0], list(words[1:])).params)
    assert not options["preload_argv"], "where Dask puts what it does not know"
    return options


def check_command(words: list[str]) -> dict[str, Any]:
    """Options of a whole command line, of dl2gpu or of Dask."""
    assert words[0] in {"dl2gpu", "dask"}, words
    return (check_dl2gpu if words[0] == "dl2gpu" else check_dask)(words[1:])


def test_wrong_options_are_seen() -> None:
    for wrong, words in (
        (["dl2gpu", "scan", "x", "--clusters", "a"], "--clusters"),
        (["dl2gpu", "scam", "x"], "scam"),
        (["dask", "worker", "tcp://a:1", "--threads", "1"], "--threads"),
        (["dask", "worker", "tcp://a:1", "--threads=1"], "--threads"),
    ):
        with pytest.raises(BaseException, match=words):
            check_command(wrong)


# --------------------------------------------------------------------------------------------------
# Dockerfile


@dataclass
class Stage:
    """One FROM and the instructions after it."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]

    def last(self, instruction: str) -> str:
        return self.all(instruction)[-1]


def dockerfile() -> tuple[dict[str, str], list[Stage]]:
    """Arguments before the first FROM with their defaults, and the stages."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, rest = line.split(None, 1)
        if name == "FROM":
            words = rest.split()
            assert words[1] == "AS"
            stages.append(Stage(words[2], words[0]))
        elif not stages:
            assert name == "ARG", line
            argument, default = rest.split("=")
            arguments[argument] = default.strip('"')
        else:
            stages[-1].steps.append((name, " ".join(rest.split())))
    return arguments, stages


ARGUMENTS, STAGES = dockerfile()
BY_NAME = {stage.name: stage for stage in STAGES}
IMAGES = ["cpu", "gpu"]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path out of the build: the last pattern that fits decides."""
    out = False
    parts = Path(path).parts
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().lstrip("!").strip("/")
        if pattern and not line.startswith("#") and any(fnmatch.fnmatch(p, pattern) for p in above):
            out = not line.startswith("!")
    return out


def sources() -> Iterator[tuple[Stage, str]]:
    """Paths that a stage takes from the folder of the Dockerfile."""
    for stage in STAGES:
        for copy in stage.all("COPY"):
            if not copy.startswith("--from="):
                for source in copy.split()[:-1]:
                    yield stage, source
        for run in stage.all("RUN"):
            for source in re.findall(r"--mount=type=bind,source=([^,\s]+)", run):
                yield stage, source


def test_stages_build_on_images_with_a_tag_or_on_earlier_stages() -> None:
    assert STAGES[-1].name == "cpu", "what is built when no target is named"
    assert set(IMAGES) <= set(BY_NAME)
    earlier: set[str] = set()
    for stage in STAGES:
        for extra in GPU_EXTRAS if "$" in stage.base else [""]:
            base = stage.base.replace("${EXTRA}", extra)
            assert base in earlier or re.fullmatch(r"[\w./-]+:\d[\w.-]+", base), base
        for copy in stage.all("COPY"):
            if copy.startswith("--from="):
                assert re.split("[= ]", copy)[1] in earlier
        earlier.add(stage.name)
    assert len(earlier) == len(STAGES)


@pytest.mark.parametrize("extra", GPU_EXTRAS)
def test_each_gpu_extra_has_the_cuda_of_its_wheels(extra: str) -> None:
    assert ARGUMENTS["EXTRA"] in GPU_EXTRAS
    major = extra.removeprefix("gpu-cu")
    assert BY_NAME[f"cuda-{extra}"].base.startswith(f"nvidia/cuda:{major}.")


def test_python_of_the_image_is_one_that_the_package_takes() -> None:
    version = re.match(r"python:3\.(\d+)-", BY_NAME["cpu"].base)
    assert version is not None
    assert BY_NAME["cpu-build"].base == BY_NAME["cpu"].base
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert int(low) <= int(version[1]) < int(high)


def test_what_is_copied_or_mounted_is_there_and_not_ignored() -> None:
    found = list(sources())
    assert {"dl2gpu", "pyproject.toml", "datasets/demo"} <= {source for _, source in found}
    for stage, source in found:
        assert (ROOT / source).exists(), (stage.name, source)
        assert not ignored(source), (stage.name, source)
        assert not ignored(f"{source}/x" if (ROOT / source).is_dir() else source)
    for never in (".git/config", "tests/test_deploy.py", ".venv/bin/python", "datasets/other/x",
                  "dl2gpu/engine/__pycache__/x.pyc"):  # fmt: skip
        assert ignored(never), never


@pytest.mark.parametrize("stage", ["cpu-build", "gpu-build"])
def test_what_is_copied_makes_the_whole_wheel(stage: str, tmp_path: Path) -> None:
    for step in BY_NAME[stage].all("COPY"):
        *names, target = step.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / target, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / name, tmp_path / target)

    def files(root: Path) -> set[str]:
        wheel = WheelBuilder(str(root))
        assert wheel.metadata.version == dl2gpu.__version__  # reads readme and licence as well
        return {f.distribution_path for f in wheel.recurse_included_files()}

    assert files(tmp_path) == files(ROOT)


@pytest.mark.parametrize("image", IMAGES)
def test_images_run_as_nobody_and_start_dl2gpu(image: str) -> None:
    stage = BY_NAME[image]
    assert stage.last("USER") == f"{NOBODY}:{NOBODY}"
    assert stage.last("ENTRYPOINT") == '["dl2gpu"]'
    assert "dl2gpu" in PROJECT["scripts"]
    folder = f"/opt/dl2gpu/bin:$PATH NUMBA_CACHE_DIR={'/var/cache/dl2gpu'}"
    assert stage.last("ENV") == f"PATH={folder}"
    assert any("-o 65534 -g 65534 /var/cache/dl2gpu /reports" in run for run in stage.all("RUN"))
    kernels = stage.last("RUN")
    scan = re.search(r"dl2gpu (scan .*?) \|\| \[ \$\? -eq 1 \]$", kernels)
    assert scan is not None
    assert str(check_dl2gpu(shlex.split(scan[1]))["engine"]) == "cpu"
    # the scan that compiles comes after USER: what another could have written is not used
    names = [name for name, _ in stage.steps]
    assert names.index("USER") < len(names) - 1 - names[::-1].index("RUN")


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_is_left_over_from_the_build(image: str) -> None:
    for stage in (BY_NAME[image], BY_NAME[f"{image}-build"], BY_NAME["gpu-python"]):
        for run in stage.all("RUN"):
            assert "pip install" not in run or ("--no-cache-dir" in run and "-build" in stage.name)
            if "apt-get" in run:
                assert "--no-install-recommends" in run
                assert run.endswith("rm -rf /var/lib/apt/lists/*")


def test_examples_in_the_dockerfile_name_what_there_is() -> None:
    comments = re.findall(r"^#(.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    text = "\n".join(comments)
    assert set(re.findall(r"--target (\w+)", text)) <= set(BY_NAME)
    assert set(re.findall(r"--build-arg (\w+)=", text)) == set(ARGUMENTS)
    for command in re.findall(r"dl2gpu(?::gpu)? (scan .*)", text):
        check_dl2gpu(shlex.split(command))


# --------------------------------------------------------------------------------------------------
# Compose


def interpolated(name: str) -> dict[str, Any]:
    """A compose file with the variables that it names set to their defaults."""
    text = (DEPLOY / name).read_text()
    text = re.sub(r"\$\{TRACES:\?[^}]*\}", "/data/traces", text)
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    assert "${" not in text
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def merged(base: Any, over: Any) -> Any:
    """As Compose merges files: mappings key by key; commands, entry points and values replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {k: merged(base[k], v) if k in base else v for k, v in over.items()}
    return over


def compose(image: str) -> dict[str, Any]:
    base = interpolated("docker-compose.yaml")
    if image == "gpu":
        out: dict[str, Any] = merged(base, interpolated("docker-compose.gpu.yaml"))
        return out
    return base


@pytest.mark.parametrize("image", IMAGES)
def test_compose_command_lines(image: str) -> None:
    services = compose(image)["services"]
    scheduler = check_command(
        services["scheduler"]["entrypoint"] + services["scheduler"]["command"]
    )
    worker = check_command(services["worker"]["entrypoint"] + services["worker"]["command"])
    assert "entrypoint" not in services["scan"]  # that of the image
    scan = check_dl2gpu(services["scan"]["command"])
    address = f"tcp://scheduler:{scheduler['port']}"
    assert scan["cluster"] == address == worker["scheduler"]
    assert str(scan["out"]).startswith("/reports/")
    expected = ["dask", "cuda", "worker"] if image == "gpu" else ["dask", "worker"]
    assert services["worker"]["entrypoint"] == expected
    for service in ("scheduler", "worker"):
        port = {"scheduler": scheduler, "worker": worker}[service]["dashboard_address"]
        assert f"http://127.0.0.1{port}/health" in services[service]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("image", IMAGES)
def test_compose_is_one_image_and_builds_it(image: str) -> None:
    services = compose(image)["services"]
    assert len({service["image"] for service in services.values()}) == 1
    for service in services.values():
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert service["build"]["target"] == image
        assert set(service["build"]["args"]) <= set(ARGUMENTS)


@pytest.mark.parametrize("image", IMAGES)
def test_compose_gives_no_more_than_is_needed(image: str) -> None:
    whole = compose(image)
    for name, service in whole["services"].items():
        assert service["user"] == f"{NOBODY}:{NOBODY}"
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "ports" not in service
        assert set(service["networks"]) <= set(whole["networks"])
        assert {"cpus", "memory"} == set(service["deploy"]["resources"]["limits"])
        for other, condition in service.get("depends_on", {}).items():
            assert "healthcheck" in whole["services"][other], (name, other)
            assert condition == {"condition": "service_healthy"}
        for volume in service.get("volumes", []):
            if volume["type"] == "volume":
                assert volume["source"] in whole["volumes"]
            else:
                assert volume["read_only"]
    seen = [v["target"] for s in ("scan", "worker") for v in whole["services"][s]["volumes"]]
    assert seen.count("/traces") == 2  # discovered by the scan, read by the workers: one path


def test_compose_workers_have_as_many_threads_as_processors() -> None:
    for image in IMAGES:
        worker = compose(image)["services"]["worker"]
        limits = worker["deploy"]["resources"]["limits"]
        assert worker["environment"]["POLARS_MAX_THREADS"] == limits["cpus"]
        assert gigabytes(check_memory(worker["command"])) < gigabytes(limits["memory"])


def check_memory(arguments: list[str]) -> str:
    limit = check_dask(["worker", *arguments])["memory_limit"]
    assert isinstance(limit, str)
    return limit


def gigabytes(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)\s*(GB|g|Gi|Ti)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"GB": 1e9, "g": 2**30, "Gi": 2**30, "Ti": 2**40}[unit] / 1e9


def test_only_the_gpu_compose_file_asks_for_gpus() -> None:
    assert "devices" not in str(compose("cpu"))
    devices = compose("gpu")["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


# --------------------------------------------------------------------------------------------------
# Kubernetes


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """The resources of a kustomization, with those of the folders that it names."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    own = {p.name for p in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert own == {name for name in listed if name.endswith(".yaml")}
    out: list[dict[str, Any]] = []
    for name in listed:
        if (folder / name).is_dir():
            out += kustomized(folder / name)
        else:
            out += yaml.safe_load_all((folder / name).read_text())
    return out


def resources(image: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = kustomized(DEPLOY / "kubernetes" / image)
    by_name = {(r["kind"], r["metadata"]["name"]): r for r in found}
    assert len(by_name) == len(found)
    return by_name


def pods(image: str) -> dict[str, dict[str, Any]]:
    """Pod templates by role."""
    r = resources(image)
    return {
        "scheduler": r["Deployment", "scheduler"]["spec"]["template"],
        "worker": r["Deployment", "worker"]["spec"]["template"],
        "scan": r["CronJob", "nightly"]["spec"]["jobTemplate"]["spec"]["template"],
    }


def only_container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    out: dict[str, Any] = container
    return out


def test_kinds_and_versions() -> None:
    expected = {
        "Namespace": "v1", "PersistentVolumeClaim": "v1", "Service": "v1",
        "Deployment": "apps/v1", "CronJob": "batch/v1", "NetworkPolicy": "networking.k8s.io/v1",
    }  # fmt: skip
    for image in IMAGES:
        for (kind, _), resource in resources(image).items():
            assert resource["apiVersion"] == expected[kind]


@pytest.mark.parametrize("image", IMAGES)
def test_labels_select_what_they_should(image: str) -> None:
    r, templates = resources(image), pods(image)
    labels = {role: pod["metadata"]["labels"] for role, pod in templates.items()}
    assert labels == {role: {"app": "dl2gpu", "role": role} for role in labels}
    for role in ("scheduler", "worker"):
        assert r["Deployment", role]["spec"]["selector"]["matchLabels"] == labels[role]
    service = r["Service", "scheduler"]["spec"]
    assert service["selector"] == labels["scheduler"]
    ports = {p["name"] for p in only_container(templates["scheduler"])["ports"]}
    assert {p["targetPort"] for p in service["ports"]} <= ports
    policy = r["NetworkPolicy", "dl2gpu"]["spec"]
    only_ours = {"podSelector": {"matchLabels": {"app": "dl2gpu"}}}
    assert policy["podSelector"] == only_ours["podSelector"]
    assert policy["ingress"] == [{"from": [only_ours]}]


@pytest.mark.parametrize("image", IMAGES)
def test_one_image_of_this_version_for_all(image: str) -> None:
    assert {only_container(pod)["image"] for pod in pods(image).values()} == {"dl2gpu"}
    kustomization = yaml.safe_load(
        (DEPLOY / "kubernetes" / image / "kustomization.yaml").read_text()
    )
    (named,) = kustomization["images"]
    assert named["name"] == "dl2gpu"
    suffix = f"-{ARGUMENTS['EXTRA']}" if image == "gpu" else ""
    assert named["newTag"] == f"{dl2gpu.__version__}{suffix}"
    assert kustomization["namespace"] == resources(image)["Namespace", "dl2gpu"]["metadata"]["name"]


def nightly(image: str) -> str:
    """The shell line of the nightly scan."""
    container = only_container(pods(image)["scan"])
    assert container["command"] == ["sh", "-c"]
    (line,) = container["args"]
    assert isinstance(line, str)
    return line


@pytest.mark.parametrize("image", IMAGES)
def test_kubernetes_command_lines(image: str) -> None:
    containers = {role: only_container(pod) for role, pod in pods(image).items()}
    started = containers["worker"]["command"]
    assert started == (["dask", "cuda", "worker"] if image == "gpu" else ["dask", "worker"])
    scheduler, worker = (
        check_command(containers[role]["command"] + containers[role]["args"])
        for role in ("scheduler", "worker")
    )
    line = nightly(image).split("||")[0].replace("$(date -u +%F)", "2026-10-04")
    scan = check_command(shlex.split(line))
    (port,) = resources(image)["Service", "scheduler"]["spec"]["ports"]
    address = f"tcp://scheduler:{port['port']}"
    assert scan["cluster"] == address == worker["scheduler"]
    assert str(scan["engine"]) == image
    numbers = {p["name"]: p["containerPort"] for p in containers["scheduler"]["ports"]}
    assert numbers["comm"] == int(scheduler["port"])
    for role, options in (("scheduler", scheduler), ("worker", worker)):
        ports = {p["name"]: p["containerPort"] for p in containers[role]["ports"]}
        assert options["dashboard_address"] == f":{ports['http']}"
        for probe in ("readinessProbe", "livenessProbe"):
            assert containers[role][probe]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize(("found", "status"), [(0, 0), (1, 0), (2, 1), (3, 1), (130, 1)])
def test_the_nightly_pod_fails_only_without_a_report(
    image: str, found: int, status: int, tmp_path: Path
) -> None:
    fake = tmp_path / "dl2gpu"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/arguments"\nexit {found}\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", nightly(image)], env={"PATH": path}, check=False)
    assert done.returncode == status
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert re.fullmatch(r"/reports/\d{4}-\d\d-\d\d", arguments[arguments.index("--out") + 1])


@pytest.mark.parametrize("image", IMAGES)
def test_pods_are_restricted(image: str) -> None:
    """What the Pod Security Standard "restricted" asks for, which the namespace enforces."""
    namespace = resources(image)["Namespace", "dl2gpu"]["metadata"]["labels"]
    assert namespace["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(image).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == NOBODY
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        container = only_container(pod)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        limits = container["resources"]["limits"]
        assert {"cpu", "memory"} == set(container["resources"]["requests"])
        assert {"cpu", "memory"} <= set(limits)


@pytest.mark.parametrize("image", IMAGES)
def test_volumes_are_there_and_traces_cannot_be_written(image: str) -> None:
    r = resources(image)
    for role, pod in pods(image).items():
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        mounts = {m["name"]: m for m in only_container(pod)["volumeMounts"]}
        assert set(volumes) == set(mounts)
        assert mounts["tmp"]["mountPath"] == "/tmp"
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                name = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", name) in r
        if role != "scheduler":
            assert mounts["traces"] == {"name": "traces", "mountPath": "/traces", "readOnly": True}
            assert volumes["traces"]["persistentVolumeClaim"]["readOnly"] is True


@pytest.mark.parametrize("image", IMAGES)
def test_limits_of_the_workers(image: str) -> None:
    worker = only_container(pods(image)["worker"])
    limits = worker["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == ("1" if image == "gpu" else None)
    assert worker["env"] == [{"name": "POLARS_MAX_THREADS", "value": limits["cpu"]}]
    assert gigabytes(check_memory(worker["args"])) < gigabytes(limits["memory"])


# --------------------------------------------------------------------------------------------------
# The nightly scan

NIGHTLY = DEPLOY / "nightly"
RUN = ["-m", "pipelines.nightly", "run", "-c", "/etc/dl2gpu/nightly.toml"]


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.usefixtures("pipelines")
def test_the_example_shows_every_key() -> None:
    import msgspec

    from pipelines.fleet import config

    read = config.load(NIGHTLY / "nightly.toml")
    text = (NIGHTLY / "nightly.toml").read_text()
    tables = [read.scan, read.output, read.price, read.groups, read.notify, read.owners[0],
              read.suppressions[0], read.webhooks[0]]  # fmt: skip
    for table in tables:
        for name in msgspec.structs.fields(table):
            assert re.search(rf"\b{name.name} = ", text), name.name
    assert set(re.findall(r"^\[+(\w+)\]", text, re.MULTILINE)) == {
        f.name for f in msgspec.structs.fields(read)
    }


@pytest.mark.usefixtures("pipelines")
def test_alerts_and_dashboard_name_metrics_that_there_are() -> None:
    from pipelines.fleet.metrics import exposition

    told = {"cost": {"gpu_hours": 0, "saved_gpu_hours": 0}, "groups": [], "verdicts": {},
            "deadlocked": 0, "files": {}, "teams": []}  # fmt: skip
    made = set(re.findall(r"# TYPE (\w+) ", exposition(told, 0, 0)))
    rules = yaml.safe_load((NIGHTLY / "alerts.yaml").read_text())["groups"][0]["rules"]
    board = json.loads((NIGHTLY / "grafana.json").read_text())
    asked = [r["expr"] for r in rules]
    asked += [t["expr"] for p in board["panels"] for t in p["targets"]]
    named = set(re.findall(r"dl2gpu_nightly_\w+", " ".join(asked)))
    assert named <= made
    assert len(named) >= 7
    assert len({r["alert"] for r in rules}) == len(rules)
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


@pytest.mark.usefixtures("pipelines")
def test_the_commands_of_the_nightly_scan() -> None:
    from pipelines.nightly import app as nightly

    cron = [x for x in (NIGHTLY / "crontab").read_text().splitlines() if not x.startswith("#")]
    service = dict(
        line.split("=", 1)
        for line in (NIGHTLY / "dl2gpu-nightly.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    job = yaml.safe_load((NIGHTLY / "cronjob.yaml").read_text())["spec"]
    pod = job["jobTemplate"]["spec"]["template"]["spec"]
    lines = [
        cron[0].partition("&& ")[2], service["ExecStart"],
        " ".join(pod["containers"][0]["command"]),
    ]  # fmt: skip
    for line in lines:
        words = shlex.split(line)
        assert words[1:] == RUN, line
    assert job["concurrencyPolicy"] == "Forbid"
    assert service["SuccessExitStatus"] == "3"
    command = get_command(nightly).commands["run"]  # type: ignore[attr-defined]
    assert command.make_context("run", RUN[3:]).params["config"] == RUN[-1]
