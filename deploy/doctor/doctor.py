"""`baton doctor`: checks this host or a running cluster, and says of each thing that is wrong how to mend it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

import msgspec

from ..client import Client
from .checks import check_host
from .cluster import check_cluster, read_cluster
from .config import DoctorConfig
from .facts import read_facts
from .finding import Finding, table

_MOST_COLUMNS = 100
_UNSEEN = (
    "The router does not see limits, drivers, key files and clocks of the nodes' hosts, nor the network between them: "
    "run `baton doctor --router tcp://ROUTER:5700` on each host."
)


def run(config: DoctorConfig) -> int:
    """Print the findings. Returns 1 if one is an error, else 0. Raises ConfigError, Unavailable and RequestError."""
    if config.cluster:
        client = Client(config.url, config.admin_key or config.api_key)
        findings = tuple(check_cluster(read_cluster(client)))
    else:
        is_watched = sys.stderr.isatty()
        if is_watched:
            print("asking torch and the system ...", end="", file=sys.stderr, flush=True)
        findings = tuple(check_host(read_facts(config)))
        if is_watched:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    if config.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        width = min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
        print("\n".join([*table(findings, width), "", _summary(findings)]))
        if config.cluster:
            print(textwrap.fill(_UNSEEN, width))
    return int(any(each.level == "error" for each in findings))


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(each.level == level for each in findings) for level in ("error", "warning", "note")}
    words = [f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count]
    return f"{', '.join(words)}." if words else "Nothing is wrong."
