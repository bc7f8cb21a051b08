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


def test_the_command_for_an_extra_names_the_file_or_folder_that_baton_came_from_and_never_an_index() -> None:
    wheel = '{"archive_info": {}, "url": "file:///a%20b/baton_serve-0.1.0-py3-none-any.whl"}'
    folder = '{"dir_info": {"editable": true}, "url": "file:///home/ann/baton"}'
    assert version.command_for(wheel, "node") == "pip install '/a b/baton_serve-0.1.0-py3-none-any.whl[node]'"
    assert version.command_for(folder, "node") == "pip install -e '/home/ann/baton[node]'"
    assert version.command_for(folder, "") == "pip install -e '/home/ann/baton'"
    assert version.command_for(None, "hub").startswith("pip install 'WHEEL[hub]', where WHEEL is the release's file")
