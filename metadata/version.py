"""Version of the installed package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    """Return the installed version of Baton, "unknown" if it runs without being installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"
