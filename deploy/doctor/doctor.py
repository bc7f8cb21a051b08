"""`baton doctor`: checks this host or a running cluster, and says of each thing that is wrong how to mend it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import msgspec

from .checks import check_host
from .config import DoctorConfig
from .facts import read_facts
from .finding import Finding, table

_MOST_COLUMNS = 100


def run(config: DoctorConfig) -> int:
    """Print the findings. Returns 1 if one is an error, else 0. Raises ConfigError, Unavailable and RequestError."""
    findings = tuple(check_host(read_facts(config)))
    if config.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        width = min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
        print("\n".join([*table(findings, width), "", _summary(findings)]))
    return int(any(each.level == "error" for each in findings))


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(each.level == level for each in findings) for level in ("error", "warning", "note")}
    words = [f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count]
    return f"{', '.join(words)}." if words else "Nothing is wrong."
