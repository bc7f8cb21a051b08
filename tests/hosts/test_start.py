"""Processes on hosts of their own meet: by the words of the docs, and in networks that make it hard."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from host_cluster import DEMO, HostCluster
from network import Family, Network
from patience import wait_until
from switch import Conditions

from baton.metadata.bus.curve import KeyPair

DOCS = Path(__file__).parents[2] / "docs"
SECRETS = {"BATON_API_KEY": "client", "BATON_ADMIN_KEY": "operator"}


class ByHand(HostCluster):
    """Processes started by commands of a page, whose router has keys of clients."""

    host_of: ClassVar[dict[str, str]] = {}  # by process, if it has another name

    def environ(self, name: str) -> dict[str, str]:
        return super().environ(self.host_of.get(name, name)) | (SECRETS if name == "router" else {})


class OfTwoHosts(ByHand):
    host_of: ClassVar[dict[str, str]] = {"router": "host1", "prefill": "host1", "decode": "host2"}


def commands(page: str, section: str) -> list[list[str]]:
    """Return the lines of a section's code, in words without remarks."""
    text = (DOCS / page).read_text()
    part = re.split(r"^##+ ", text.partition(f"## {section}\n")[2], flags=re.MULTILINE)[0]
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (.*)$", part, re.MULTILINE)]


def prompts(page: str, section: str) -> dict[str, list[str]]:
    """Return the arguments of `baton` by the host whose prompt stands before them."""
    return {
        words[0][:-1]: words[2:] for words in commands(page, section) if words[0].endswith("$") and words[1] == "baton"
    }


def start_by_hand(cluster: HostCluster, page: str, section: str, replaced: dict[str, str]) -> None:
    """Start what the section says on the host that it says, with these words replaced, and wait until it is ready."""
    for host, words in prompts(page, section).items():
        replace = [replaced.get(word, word) for word in words]
        more = [] if words[0] == "router" else ["--threads", "1", "--chunk-tokens", "128"]
        cluster.start_process(host, *replace, *more)
    cluster.api_key = SECRETS["BATON_ADMIN_KEY"]
    cluster.client_host, cluster.router_host = "client", cluster.network.address("router")
    cluster.wait_ready(num_nodes=2)


@pytest.fixture
def by_hand(new_network: Callable[..., object], tmp_path: Path) -> ByHand:
    network = new_network("router", "host1", "host2", "client")
    return ByHand(tmp_path, None, network)


def test_the_commands_of_the_docs_start_baton_on_three_hosts(by_hand: ByHand) -> None:
    with by_hand:
        KeyPair.create(by_hand.keys)
        replaced = {"DIR": str(DEMO), "cluster.key": str(by_hand.keys)}
        start_by_hand(by_hand, "operations.md", "Several hosts", replaced)
        assert by_hand.complete("def main(", max_tokens=20, temperature=0)["usage"]["completion_tokens"] > 1
        assert "pages travel by aes" in by_hand.processes["host2"].log
        names = [node["node_id"] for node in by_hand.nodes()]  # of first processes, whose ids are alike
        assert len(names) == 2 and all(re.fullmatch(r"(prefill|decode)-.+-[0-9a-f]{8}", name) for name in names), names
        by_hand.api_key = "wrong"
        assert by_hand.get("/v1/models")[0] == 401
        by_hand.api_key = SECRETS["BATON_ADMIN_KEY"]


@pytest.mark.whole
def test_the_commands_of_the_docs_start_baton_on_two_hosts(new_network: Callable[..., Network], tmp_path: Path) -> None:
    with OfTwoHosts(tmp_path, None, new_network("host1", "host2", "client")) as cluster:
        KeyPair.create(cluster.keys)
        replaced = {"DIR": str(DEMO), "cluster.key": str(cluster.keys)}
        for words in commands("clusters.md", "Two hosts by hand"):
            if words[0] == "baton" and words[1] in cluster.host_of:
                more = [] if words[1] == "router" else ["--threads", "1", "--chunk-tokens", "128"]
                cluster.start_process(words[1], *(replaced.get(word, word) for word in words[1:]), *more)
        assert cluster.processes.keys() == cluster.host_of.keys()
        cluster.api_key = SECRETS["BATON_ADMIN_KEY"]
        cluster.client_host, cluster.router_host = "client", cluster.network.address("host1")
        cluster.wait_ready(num_nodes=2)
        assert cluster.complete("def main(", max_tokens=20, temperature=0)["usage"]["completion_tokens"] > 1
        assert "pages travel by aes" in cluster.processes["decode"].log


@pytest.mark.whole
def test_the_commands_of_the_docs_start_baton_with_a_key_per_process(by_hand: ByHand) -> None:
    with by_hand:
        allow_list = by_hand.directory / "allow-list"
        replaced = {"DIR": str(DEMO), "/etc/baton/allow-list": str(allow_list)}
        lines = []
        for words in commands("security.md", "Keys of nodes"):
            if words[0] == "ssh":
                _, _, _, _, path, _, _ = words
                replaced[path] = str(by_hand.directory / Path(path).name)
                keys = KeyPair.create(replaced[path])
                lines.append(f"{Path(path).stem} {keys.public.decode()}\n")
        allow_list.write_text("".join(lines))
        start_by_hand(by_hand, "security.md", "Keys of nodes", replaced)
        assert by_hand.complete("def main(", max_tokens=20, temperature=0)["usage"]["completion_tokens"] > 1


@pytest.mark.whole
@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(Conditions(delay_s=0.02, loss=0.01), id="20 ms, 1 % lost"),
        pytest.param(Conditions(delay_s=0.3), id="300 ms"),
    ],
)
def test_processes_meet_in_a_slow_or_lossy_network(new_cluster: Callable[..., HostCluster], worse: Conditions) -> None:
    cluster = new_cluster()
    cluster.network.set_all(worse)
    cluster.begin()
    cluster.complete("def main(", max_tokens=20)


def test_nodes_find_a_router_whose_name_is_new(new_cluster: Callable[..., HostCluster]) -> None:
    """While the name stands for nothing, nobody knows that its addresses will be of IPv6."""
    cluster = new_cluster("router", "decode-0", family="ipv6")
    cluster.network.write_names(without="router")
    node = cluster.start_wanted("decode-0")
    wait_until(lambda: "cannot be resolved" in node.log, lambda: node.log)
    cluster.start_router()
    cluster.network.write_names()
    wait_until(lambda: "joined router" in node.log, lambda: node.log)


@pytest.mark.whole
@pytest.mark.parametrize("families", [("ipv4", "ipv6"), ("ipv6", "ipv4")], ids=" to ".join)
def test_nodes_find_a_router_whose_name_has_addresses_of_the_other_family(
    new_cluster: Callable[..., HostCluster], families: tuple[Family, Family]
) -> None:
    cluster = new_cluster("router", "decode-0", family=families[0])
    cluster.start_router()
    node = cluster.start_wanted("decode-0")
    wait_until(lambda: "joined router" in node.log, lambda: node.log)
    with cluster.restarted("router"):
        cluster.network.family = families[1]
        cluster.network.write_names()
    wait_until(lambda: node.log.count("joined router") == 2, lambda: node.log)
