"""Log directories of `baton up`: new ones are private, old ones are deleted unless they are in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.deploy.run_dir import make_run_dir
from baton.metadata.errors import ConfigError


def test_old_run_directories_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = tmp_path / "baton" / "runs"
    for index in range(15):
        (runs / f"20200101-0000{index:02d}-1").mkdir(parents=True)
    (runs / "20200101-000000-1" / "launcher.pid").write_text(str(os.getpid()))  # this one is in use
    path = make_run_dir(None)
    kept = sorted(item.name for item in runs.iterdir())
    assert path.name in kept
    assert "20200101-000000-1" in kept
    assert len(kept) == 11
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="--run-dir"):
        make_run_dir("/proc/no")
