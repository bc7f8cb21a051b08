"""A network of hosts, which are namespaces of Linux (switch.py), for tests of what happens between hosts.

    with Network(directory, ("router", "prefill", "decode")) as network:
        network.set("router", "decode", Conditions(is_cut=True))     # in this direction alone
        with network.inside("router"):
            connection = socket.create_connection(("decode", 7000))

`namespaces_of` names the files of a host for a process that is to run there. Each host has an address of IPv4 and one
of IPv6. All hosts know each other by name, by one file, which `rename` changes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from namespaces import NEW_MOUNTS, NEW_NETWORK, enter_descriptor
from switch import DEVICE, Conditions

Family = Literal["ipv4", "ipv6"]
_FORMATS: dict[Family, tuple[str, int]] = {"ipv4": ("10.77.0.{}", 24), "ipv6": ("fd77::{:x}", 64)}
_MOVED = 100  # is added to a host's number when it gets other addresses


class Network:
    """The hosts and the switch between them. Raises OSError if the kernel does not allow it (`reason_against`)."""

    def __init__(self, directory: Path, hosts: Sequence[str], family: Family = "ipv4") -> None:
        """`directory`: of the file of names. `family`: of the addresses that names stand for."""
        self.hosts = tuple(hosts)
        self._directory, self.family = directory, family
        self._numbers = {name: number for number, name in enumerate(hosts, start=1)}
        self._own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._lock, self._is_closed = threading.Lock(), False
        directory.mkdir(parents=True, exist_ok=True)
        self.write_names()
        made = [[name, [f"{self.address(name, each)}/{_FORMATS[each][1]}" for each in _FORMATS]] for name in hosts]
        program = [sys.executable, str(Path(__file__).with_name("switch.py")), str(directory), json.dumps(made)]
        self._switch = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._switch.stdout is not None
        pid, *handles = self._switch.stdout.readline().split() or [""]
        if not pid:
            self.close()
            raise OSError(f"the switch between hosts has ended with {self._switch.returncode}")
        self._files = {
            name: tuple(f"/proc/{pid}/fd/{handle}" for handle in handles[2 * at : 2 * at + 2])
            for at, name in enumerate(hosts)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the switch. A host ends with the last process in it. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for pipe in (self._switch.stdin, self._switch.stdout):
            assert pipe is not None
            pipe.close()
        self._switch.wait()
        os.close(self._own)

    def address(self, name: str, family: Family | None = None) -> str:
        """Return the address of a host, of the family that names stand for if none is given."""
        return _FORMATS[family or self.family][0].format(self._numbers[name])

    def namespaces_of(self, name: str) -> tuple[str, ...]:
        """Return the files that name a host's namespaces, of its network and of its mounts."""
        return self._files[name]

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Let sockets that this thread opens in the block be the host's. Other files stay those of the test."""
        handle = os.open(self._files[name][0], os.O_RDONLY | os.O_CLOEXEC)
        enter_descriptor(handle)
        try:
            yield
        finally:
            enter_descriptor(self._own)
            os.close(handle)

    def run(self, name: str, *command: str) -> None:
        """Run a command on a host. Raises CalledProcessError."""
        net, mounts = self._files[name]
        subprocess.run(["nsenter", f"--net={net}", f"--mount={mounts}", *command], check=True, capture_output=True)

    def set(self, source: str, target: str, conditions: Conditions) -> None:
        """Set how frames from one host to another travel from now on."""
        ends = {"source": self.hosts.index(source), "target": self.hosts.index(target)}
        self._command({**ends, "conditions": conditions.to_json()})

    def set_all(self, conditions: Conditions) -> None:
        """Set how frames between all hosts travel from now on."""
        for source in self.hosts:
            for target in self.hosts:
                if source != target:
                    self.set(source, target, conditions)

    def num_dropped(self, source: str, target: str) -> int:
        """Return how many frames from one host to another have been lost."""
        return self._counts(source, target)[1]

    def num_forwarded(self, source: str, target: str) -> int:
        """Return how many frames from one host to another have arrived, or are on their way."""
        return self._counts(source, target)[0]

    def _counts(self, source: str, target: str) -> tuple[int, int]:
        ends = [self.hosts.index(source), self.hosts.index(target)]
        return next((forwarded, dropped) for *of, forwarded, dropped in self._command({"counts": True}) if of == ends)

    def move(self, name: str) -> None:
        """Give a host other addresses. Its name stands for them from now on, and the old ones are nobody's."""
        old = {family: self.address(name, family) for family in _FORMATS}
        self._numbers[name] += _MOVED
        for family, (_, length) in _FORMATS.items():
            more = ["nodad"] if family == "ipv6" else []
            new = self.address(name, family)
            self.run(name, "ip", "address", "delete", f"{old[family]}/{length}", "dev", DEVICE)
            self.run(name, "ip", "address", "add", f"{new}/{length}", "dev", DEVICE, *more)
        self.write_names()

    def write_names(self, without: str = "") -> None:
        """Write the addresses of all hosts but one into the file that is /etc/hosts on each of them. The file stays the
        same one, because it is mounted."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self.address(name)} {name}" for name in self.hosts if name != without]
        (self._directory / "hosts").write_text("\n".join(lines) + "\n")

    def _command(self, command: dict[str, Any]) -> Any:
        with self._lock:
            assert self._switch.stdin is not None and self._switch.stdout is not None
            self._switch.stdin.write(json.dumps(command) + "\n")
            self._switch.stdin.flush()
            return json.loads(self._switch.stdout.readline())


@cache
def reason_against() -> str:
    """Return why there can be no such network on this machine; "" if there can."""
    if not sys.platform.startswith("linux"):
        return "hosts are namespaces of Linux"
    for command in ("ip", "nsenter"):
        if shutil.which(command) is None:
            return f"hosts need the command {command}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts need /dev/net/tun"
    tried = subprocess.run(
        [sys.executable, "-c", f"from namespaces import unshare; unshare({NEW_NETWORK | NEW_MOUNTS})"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"this process may make no namespaces: {tried.stderr.splitlines()[-1]}"
