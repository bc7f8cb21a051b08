"""Baton runs also from a checkout that is not installed."""

from __future__ import annotations

from importlib import metadata

import pytest

from baton.metadata import version


def test_a_package_that_is_not_installed_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version.package_version() == metadata.version("baton-serve")

    def fail(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", fail)
    version.package_version.cache_clear()
    assert version.package_version() == "unknown"
    version.package_version.cache_clear()
