"""The manifests of deploy/kubernetes: every overlay and component renders, every document is valid, and Baton reads the
command lines and configurations. No cluster is asked."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser as promql
import pytest
import yaml

from baton.deploy.cli import main
from baton.metadata.bus.addresses import PAGE_PORTS

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
CUSTOM = json.loads(Path(__file__).with_name("custom_resources.json").read_text())
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
ALONE = ("gateway", "hpa", "keda", "pod-monitor")  # components that no overlay has to include
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())  # 1.30 brought `sleep` of preStop
RECORDED = "baton_recorded_"  # metrics that the rules of a component make
SPARE_S = 10  # between the end of a drain and the end of a process
Manifest = dict[str, Any]

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the manifests; it is missing")


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    """Return the documents of an overlay, or of the overlay `demo` with a component."""
    if name in OVERLAYS:
        return _kustomize(KUBERNETES / "overlays" / name)
    folder = ROOT / "build" / "kubernetes" / f"{name}-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        here = os.path.relpath(KUBERNETES, folder)
        parts = {"resources": [f"{here}/overlays/demo"], "components": [f"{here}/components/{name}"]}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(parts))
        return _kustomize(folder)
    finally:
        shutil.rmtree(folder)


def _kustomize(folder: Path) -> tuple[Manifest, ...]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def deployments(name: str) -> Iterator[Manifest]:
    yield from (each for each in rendered(name) if each["kind"] == "Deployment")


def containers(name: str) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each pod's specification with each of its containers."""
    for deployment in deployments(name):
        pod = deployment["spec"]["template"]["spec"]
        yield from ((pod, container) for container in pod["containers"])


def files_of(name: str, pod: Manifest, container: Manifest) -> dict[str, str | None]:
    """Return the files that a container finds below its mounts, with their texts; None: a secret."""
    maps = {each["metadata"]["name"]: each["data"] for each in rendered(name) if each["kind"] == "ConfigMap"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    found: dict[str, str | None] = {}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            found |= {f"{mount['mountPath']}/{key}": text for key, text in maps[volume["configMap"]["name"]].items()}
        if "secret" in volume:
            found |= {f"{mount['mountPath']}/{item['path']}": None for item in volume["secret"]["items"]}
    return found


def command_line(container: Manifest, pod_ip: str) -> list[str]:
    """Return the arguments of `baton`, with variables of the environment as Kubernetes puts them in."""
    values = {"POD_NAME": "baton-7d4b9-x2x", "POD_IP": pod_ip}
    known = {entry["name"] for entry in container.get("env", ())}
    return [re.sub(r"\$\((\w+)\)", lambda match: values[(known & {match[1]}).pop()], arg) for arg in container["args"]]


def settings(name: str, pod: Manifest, container: Manifest, folder: Path, pod_ip: str = "10.0.0.7") -> dict[str, Any]:
    """Have Baton parse a container's command line and configuration file. Returns the settings in force."""
    role, *flags = command_line(container, pod_ip)
    files = files_of(name, pod, container)
    (config,) = (flag.removeprefix("--config=") for flag in flags if flag.startswith("--config="))
    (folder / "baton.toml").write_text(files[config] or "")
    flags = [flag.replace(config, str(folder / "baton.toml")) for flag in flags]
    with redirect_stdout(io.StringIO()) as shown:
        assert main([role, *flags, "--print-config"]) == 0
    return tomllib.loads(shown.getvalue())[role]


@pytest.mark.parametrize("name", [*OVERLAYS, *ALONE])
def test_every_document_is_valid(name: str) -> None:
    documents = rendered(name)
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(set(names)) == len(names)
    assert {each["metadata"].get("namespace") for each in documents if each["kind"] != "Namespace"} == {"baton"}
    for each in documents:
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] == CUSTOM[each["kind"]]["apiVersion"]
            assert each.keys() == {"apiVersion", "kind", "metadata", "spec"}
            jsonschema.validate(each["spec"], CUSTOM[each["kind"]]["spec"] | {"$defs": CUSTOM["$defs"]})
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)


def test_every_component_is_rendered() -> None:
    used = {Path(each).name for overlay in OVERLAYS for each in _kustomization(overlay).get("components", ())}
    assert used | {*ALONE} == {path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml")}


def _kustomization(overlay: str) -> Manifest:
    return yaml.safe_load((KUBERNETES / "overlays" / overlay / "kustomization.yaml").read_text())


@pytest.mark.parametrize("name", OVERLAYS)
def test_baton_reads_every_command_line_and_configuration(name: str, tmp_path: Path) -> None:
    roles = []
    for pod, container in containers(name):
        read = settings(name, pod, container, tmp_path)
        roles.append(container["args"][0])
        files = files_of(name, pod, container)
        named = [read[key] for key in ("keys", "api_keys", "allow_list") if key in read]
        assert named
        assert {*named} <= {*files}
        assert PurePosixPath(read.get("model", "/models/x")).is_relative_to("/models") or "/" in read["model"]
    assert {*roles} == {"router", "prefill", "decode"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_time_to_drain(name: str, tmp_path: Path) -> None:
    for pod, container in containers(name):
        waits = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain_s = settings(name, pod, container, tmp_path)["drain_timeout_s"]
        assert pod["terminationGracePeriodSeconds"] >= waits + drain_s + SPARE_S


@pytest.mark.parametrize("name", OVERLAYS)
def test_addresses_are_those_of_services_ports_and_probes(name: str, tmp_path: Path) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in rendered(name) if each["kind"] == "Service"}
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in deployments(name)}
    for service in services.values():
        assert service["selector"].items() <= labels["baton-router"].items()
    assert services["baton-nodes"]["publishNotReadyAddresses"]
    assert services["baton-nodes"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in services["baton"]
    for pod, container in containers(name):
        read = settings(name, pod, container, tmp_path)
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        match container["args"][0]:
            case "router":
                told = {"http": read["port"], "nodes": _port(read["node_address"]), "ops": _port(read["ops_address"])}
                assert ports == told
                probed = {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")}
                targets = {port["targetPort"] for service in services.values() for port in service["ports"]}
                assert probed | targets <= {*ports}
            case _:
                (port,) = services["baton-nodes"]["ports"]
                assert read["router"] == f"tcp://baton-nodes:{port['port']}"
                first = _port(read["bind_host"])
                assert {*ports.values()} == {first, first + PAGE_PORTS}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("name", OVERLAYS)
def test_policies_let_pages_of_eight_ranks_through(name: str, tmp_path: Path) -> None:
    """From every node to every node, which fetch the pages of prompts or borrow cached ones."""
    policies = {each["metadata"]["name"]: each["spec"] for each in rendered(name) if each["kind"] == "NetworkPolicy"}
    (rule,) = policies["baton-nodes"]["ingress"]
    (source,) = rule["from"]
    assert source == {"podSelector": policies["baton-nodes"]["podSelector"]}
    allowed = {port for each in rule["ports"] for port in range(each["port"], each["endPort"] + 1)}
    nodes = [(pod, container) for pod, container in containers(name) if _is_node(container)]
    firsts = [_port(settings(name, pod, container, tmp_path)["bind_host"]) for pod, container in nodes]
    used = [start + rank for first in firsts for start in (first, first + PAGE_PORTS) for rank in range(8)]
    assert {*used} == allowed
    assert len(used) == len(allowed)  # so two nodes of one pod listen at unlike ports


def test_the_addresses_of_ipv6_that_comments_name_are_read(tmp_path: Path) -> None:
    for pod, container in containers("demo"):
        if _is_node(container):
            text = (KUBERNETES / f"base/{container['args'][0]}.yaml").read_text()
            (flag,) = re.findall(r"(--bind-host=\[\S+)", text)
            port = _port(settings("demo", pod, container, tmp_path)["bind_host"])
            args = [flag if arg.startswith("--bind-host") else arg for arg in container["args"]]
            read = settings("demo", pod, container | {"args": args}, tmp_path, pod_ip="fd00::7")
            assert read["bind_host"] == f"[fd00::7]:{port}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_containers_have_no_rights_and_write_to_volumes_alone(name: str) -> None:
    for pod, container in containers(name):
        rights = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert rights["capabilities"].get("add", []) == (["IPC_LOCK"] if name == "rdma" and _is_node(container) else [])
        if _is_node(container):
            mounted = {each["mountPath"] for each in container["volumeMounts"]}
            assert {"/tmp", "/run/baton", "/var/cache/baton"} <= mounted


def _is_node(container: Manifest) -> bool:
    return container["args"][0] != "router"


def test_images_and_manifests_agree() -> None:
    text = (ROOT / "deploy/container/Containerfile").read_text().replace("\\\n", " ")
    router, node = (text.partition(f" AS {target}\n")[2].partition("\nFROM")[0] for target in ("router", "node"))
    assert text.count("\nFROM") == 6
    for pod, container in containers("demo"):
        image = node if _is_node(container) else router
        (user,) = re.findall(r"^USER (\d+):(\d+)$", image, re.M)
        assert user == (str(pod["securityContext"]["runAsUser"]), str(pod["securityContext"]["runAsGroup"]))
        ports = {str(port["containerPort"]) for port in container.get("ports", ())}
        (exposed,) = re.findall(r"^EXPOSE (.+)$", image, re.M)
        assert ports <= {*exposed.split()}
        if _is_node(container):
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {*json.loads(re.findall(r"^VOLUME (.+)$", image, re.M)[0])} < mounts
            written = dict(re.findall(r"(\w+_DIR|\w+_HOME|HOME)=(\S+)", image))
            assert {"BATON_STATE_DIR", "HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"} < {*written}
            assert all(any(PurePosixPath(path).is_relative_to(at) for at in mounts) for path in written.values())


def test_nodes_of_one_pod_have_states_of_their_own() -> None:
    nodes = [container for _, container in containers("one-pod") if _is_node(container)]
    mounts = [mount for container in nodes for mount in container["volumeMounts"]]
    states = [mount["name"] for mount in mounts if mount["mountPath"] == "/run/baton"]
    assert len({*states}) == len(nodes) == 2


def test_autoscaling_asks_for_metrics_that_a_router_has() -> None:
    metrics = set(re.findall(r"^metric (\w+): ", (ROOT / "docs/stable_names.txt").read_text(), re.M))
    recorded, asked = set(), []
    for document in (*rendered("keda"), *rendered("hpa")):
        for key, value in _leaves(document):
            if key in ("query", "expr"):
                promql.parse(value)  # raises if it is no PromQL
                asked += [name.removesuffix("_bucket") for name in re.findall(r"baton_\w+", value)]
            elif key == "record":
                recorded.add(value)
    external = {
        metric["external"]["metric"]["name"]
        for each in rendered("hpa")
        if each["kind"] == "HorizontalPodAutoscaler"
        for metric in each["spec"]["metrics"]
    }
    assert len(asked) == 4
    assert {*asked} <= metrics
    assert external == recorded
    assert all(name.startswith(RECORDED) for name in recorded)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, key)
    else:
        yield key, value
