"""Log directories of `baton up`: a new one per run, under the user's cache directory. Old ones are deleted."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from ..metadata.errors import ConfigError

_NUM_KEPT = 10
_OWNER = "launcher.pid"


def make_run_dir(wanted: str | None) -> Path:
    """Return the directory `wanted`, or a new one if it is None. Only the user can read a directory that is made here;
    one that exists keeps its permissions."""
    try:
        if wanted is not None:
            path = Path(wanted).expanduser().resolve()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            path = _new_run_dir()
        (path / _OWNER).write_text(f"{os.getpid()}\n")
    except OSError as error:
        raise ConfigError(f"--run-dir {error.filename}: {error.strerror}") from None
    return path


def _new_run_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    runs = cache / "baton" / "runs"
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in sorted(runs.iterdir())[: -_NUM_KEPT + 1]:
        if not _is_in_use(old):
            shutil.rmtree(old, ignore_errors=True)
    path = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path.mkdir(mode=0o700)
    return path


def _is_in_use(run_dir: Path) -> bool:
    try:
        os.kill(int((run_dir / _OWNER).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True
