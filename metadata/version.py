"""Version of the installed package, and the command that installs more of it."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any
from urllib.parse import unquote, urlsplit

_DISTRIBUTION = "baton-serve"


@cache
def package_version() -> str:
    """Return the installed version of Baton, "unknown" if it runs without being installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def install_command(extra: str = "") -> str:
    """Return the command that installs the packages of an extra, from the file or the folder that Baton came from."""
    try:
        origin = distribution(_DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    return command_for(origin, extra)


def command_for(origin: str | None, extra: str) -> str:
    """Return the command for a package with this direct_url.json (packaging.python.org, "Direct URL"), None if it has
    none. It never names a package index: Baton is in none, and anybody could put a package of its name there."""
    data: dict[str, Any] = json.loads(origin or "{}")
    url = urlsplit(str(data.get("url", "")))
    wanted = f"[{extra}]" if extra else ""
    if url.scheme == "file":
        flag = "-e " if data.get("dir_info", {}).get("editable") else ""
        return f"pip install {flag}'{unquote(url.path)}{wanted}'"
    return f"pip install 'WHEEL{wanted}', where WHEEL is the release's file baton_serve-....whl (README)"
