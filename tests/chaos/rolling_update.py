"""A rolling update of all pods with streams running, in podman, as deploy/kubernetes describes the pods.

    python tests/chaos/rolling_update.py --streams 8

Run by hand, as root, where the images `localhost/baton-router` and `localhost/baton-node` are (docs/clusters.md). Takes
the overlay `demo` as it is, but for what podman cannot do: it names addresses itself, mounts the keys as files, and
plays the part of Kubernetes' controllers, which put a new pod in place of an old one, and of the service for clients,
which sends them to routers that stay. Clients stream all the time; each text must be that of the first, quiet run. At
the end a router, whose time to drain is set to 2 s, is stopped in the middle of streams that take longer.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import secrets
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
NETWORK, ADDRESSES = "baton-rolling", "10.99.77"
LEAVE_S = 10  # between the word to the service and SIGTERM: preStop of a router
USER = 10001
START_S = 300.0
NUM_PROMPTS = 12


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise SystemExit(f"podman {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


@dataclass
class Pods:
    """Pods of the manifests, by name. `close` removes them and the network."""

    documents: list[dict[str, Any]]
    folder: Path  # holds the keys, and what is given to podman
    num_started: int = 0
    alive: dict[str, str] = field(default_factory=dict)  # addresses by name

    def start(self, role: str) -> str:
        """Start a new pod of a role, and return its name."""
        self.num_started += 1
        name, address = f"baton-{role}-{self.num_started}", f"{ADDRESSES}.{9 + self.num_started}"
        deployments = [each for each in self.documents if each["kind"] == "Deployment"]
        (template,) = (each["spec"]["template"] for each in deployments if each["metadata"]["name"] == f"baton-{role}")
        pod = json.loads(json.dumps(template).replace("$(POD_NAME)", name).replace("$(POD_IP)", address))
        for container in pod["spec"]["containers"]:
            container["image"] = f"localhost/{container['image'].split(':')[0]}:latest"
            container["env"] = _SECRETS if role == "router" else []
            for key in ("livenessProbe", "ports", "resources"):  # podman would open ports on the host
                container.pop(key, None)
        parts = [*pod["spec"]["volumes"], *(each for one in pod["spec"]["containers"] for each in one["volumeMounts"])]
        (keys,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "keys")
        del keys["secret"]
        keys["hostPath"] = {"path": str(self.folder / "keys")}
        for part in parts:  # podman shares volumes of one name between pods
            part["name"] = part["name"] if part["name"] == "config" else f"{name}-{part['name']}"
        maps = [each for each in self.documents if each["kind"] == "ConfigMap"]
        pod = {"apiVersion": "v1", "kind": "Pod", **pod}
        pod["metadata"]["name"] = name
        (self.folder / "pod.yaml").write_text(yaml.safe_dump_all([*maps, pod]))
        aliases = ",alias=baton-nodes" if role == "router" else ""
        self.alive[name] = address
        podman("play", "kube", "--network", f"{NETWORK}:ip={address}{aliases}", str(self.folder / "pod.yaml"))
        return name

    def wait_ready(self, name: str) -> None:
        """Ask the probe of a node or router until it says yes."""
        deadline = time.monotonic() + START_S
        while not self._is_ready(name):
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} is not ready:\n{self.log(name)}")
            time.sleep(0.5)

    def _is_ready(self, name: str) -> bool:
        role = name.split("-")[1]
        if role != "router":
            probe = ["podman", "exec", f"{name}-{role}", "test", "-e", "/run/baton/ready"]
            return subprocess.run(probe, check=False).returncode == 0
        connection = http.client.HTTPConnection(self.alive[name], 9090, timeout=5)
        with suppress(OSError), closing(connection):
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        return False

    def stop(self, name: str, grace_s: int) -> int:
        """Stop a pod as Kubernetes does: SIGTERM, and SIGKILL after the grace period. Returns the exit status."""
        container = f"{name}-{name.split('-')[1]}"
        podman("stop", "--time", str(grace_s), container)
        status = int(podman("inspect", container, "--format", "{{.State.ExitCode}}"))
        podman("pod", "rm", "-f", name)
        del self.alive[name]
        return status

    def log(self, name: str) -> str:
        return podman("logs", "--tail", "20", f"{name}-{name.split('-')[1]}", check=False)

    def close(self) -> None:
        for name in [*self.alive]:
            podman("pod", "rm", "-f", "-t", "0", name, check=False)
        podman("network", "rm", "-f", NETWORK, check=False)


@dataclass
class Clients:
    """Streams that follow each other on some threads, and what became of them."""

    routers: list[str]  # addresses; the service for clients
    key: str
    tokens: int
    texts: dict[int, str] = field(default_factory=dict)  # by prompt: what the quiet run said
    ends: Counter[str] = field(default_factory=Counter)
    is_over: threading.Event = field(default_factory=threading.Event)

    def stream(self, prompt: int) -> tuple[str, str]:
        """Return the text of one stream, and how it ended: done, an error event, or cut off."""
        body = {"model": "demo", "prompt": f"def function_{prompt}(", "max_tokens": self.tokens, "seed": prompt}
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(random.choice(self.routers), 8000, timeout=120)
        text, end = "", "cut off"
        try:
            connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return "", f"{answer.status} {answer.read().decode()[:200]}"
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    end = "done"
                elif data.startswith("{"):
                    event = json.loads(data)
                    if "error" in event:
                        return text, f"error: {event['error']['message']}"
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
        except (OSError, http.client.HTTPException) as error:
            return text, f"{end}: {error}"
        finally:
            connection.close()
        return text, end

    def learn(self) -> None:
        for prompt in range(NUM_PROMPTS):
            self.texts[prompt], end = self.stream(prompt)
            assert end == "done", end

    def start(self, num_streams: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.run, args=(first,)) for first in range(num_streams)]
        for thread in threads:
            thread.start()
        return threads

    def run(self, first: int) -> None:
        """Stream until `is_over`, but at least once."""
        for prompt in itertools.cycle((*range(first % NUM_PROMPTS, NUM_PROMPTS), *range(first % NUM_PROMPTS))):
            text, end = self.stream(prompt)
            wanted = self.texts[prompt]
            is_right = text == wanted if end == "done" else text.startswith(wanted) or wanted.startswith(text)
            self.ends[end if is_right else "WRONG TEXT"] += 1
            if self.is_over.is_set():
                return


def start_network(folder: Path) -> tuple[Pods, str]:
    """Render the manifests, and make keys and a network. Returns the pods, none started, and the clients' key."""
    command = ["kubectl", "kustomize", str(ROOT / "deploy/kubernetes/overlays/demo")]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (folder / "keys").mkdir()
    subprocess.run(["baton", "keys", str(folder / "keys/cluster.key")], check=True, capture_output=True)
    key = secrets.token_hex(24)
    (folder / "keys/api-keys").write_text(f"{key}\n")
    for path in (folder, folder / "keys", *(folder / "keys").iterdir()):
        os.chown(path, USER, USER)
    podman("network", "create", "--subnet", f"{ADDRESSES}.0/24", NETWORK)
    return Pods(list(yaml.safe_load_all(rendered)), folder), key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8, help="streams at a time (default: 8)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per stream (default: 200)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pods, key = start_network(Path(folder))
        stack.callback(pods.close)
        routers = [pods.start("router"), pods.start("router")]
        _fix_bridge()
        nodes = [pods.start(role) for role in ("prefill", "decode", "decode")]
        for name in (*nodes, *routers):
            pods.wait_ready(name)
        clients = Clients([pods.alive[name] for name in routers], key, arguments.tokens)
        clients.learn()
        threads = clients.start(arguments.streams)
        begin = time.monotonic()
        for name in nodes:
            status = pods.stop(name, 150)
            new = pods.start(name.split("-")[1])
            pods.wait_ready(new)
            print(
                f"{name} left with status {status}, {new} is ready after {time.monotonic() - begin:.0f} s", flush=True
            )
        text = json.dumps(pods.documents).replace("drain_timeout_s = 60.0", "drain_timeout_s = 2.0")
        pods.documents = json.loads(text)  # of new routers
        for name in routers:
            new = pods.start("router")
            pods.wait_ready(new)
            clients.routers.append(pods.alive[new])
            clients.routers.remove(pods.alive[name])
            time.sleep(LEAVE_S)
            status = pods.stop(name, 70)  # it has 60 s to drain
            print(f"{name} left with status {status} after {time.monotonic() - begin:.0f} s", flush=True)
        clients.is_over.set()
        for thread in threads:
            thread.join()
        print(f"streams during the update: {dict(clients.ends)}")
        last = Clients([clients.routers[0]], key, 8 * arguments.tokens, clients.texts)
        last.is_over.set()
        threads = last.start(arguments.streams)
        time.sleep(1)
        (name,) = (name for name, address in pods.alive.items() if address == last.routers[0])
        print(f"{name} left with status {pods.stop(name, 70)}")
        for thread in threads:
            thread.join()
        print(f"longer streams while a router left: {dict(last.ends)}")


_SECRETS = [{"name": "BATON_ADMIN_KEY", "value": "admin"}, {"name": "BATON_CACHE_SECRET", "value": "same"}]


def _fix_bridge() -> None:
    """Give the bridge of the network an address of its own. Else it takes that of a pod, and another one when this pod
    goes: then what other pods send to the host is lost until they ask for the address again, half a minute later."""
    bridge = podman("network", "inspect", NETWORK, "--format", "{{.NetworkInterface}}")
    address = Path(f"/sys/class/net/{bridge}/address").read_text().strip()
    subprocess.run(["ip", "link", "set", "dev", bridge, "address", address], check=True)


if __name__ == "__main__":
    main()
