"""The folder that the files of a release are written to."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributions import empty


def test_only_a_folder_that_holds_a_release_is_emptied(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    for name in ("SHA256SUMS", "old.whl"):
        empty(out)
        assert [path.name for path in out.iterdir()] == ["SHA256SUMS"]
        (out / name).write_text("old")
    file = tmp_path / "file"
    file.write_text("mine")
    for mine in (tmp_path, file):
        with pytest.raises(SystemExit, match="holds no release"):
            empty(mine)
    assert file.read_text() == "mine" and (out / "old.whl").exists()
