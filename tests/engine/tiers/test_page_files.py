"""Files of cached pages: what is written is read, and whatever else lies in the directory is not."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from baton.engine.tiers.page_files import MAGIC, PageFiles, PageHeader
from baton.metadata.cache.names import PageNames
from baton.metadata.errors import ConfigError

MODEL = bytes(range(16))
NAMES = PageNames(MODEL, 4, 1)
SIZES = {"page": 100, "tail": 40}
FIRST = PageHeader("page", "salt", b"", bytes(20))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[PageFiles]:
    with closing(PageFiles(str(tmp_path / "cache"), MODEL, NAMES, SIZES)) as files:
        yield files


def page(seed: int, kind: str = "page") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZES[kind], np.uint8)


def parts_of(slot: np.ndarray) -> list[np.ndarray]:
    """Return the bytes as those of two ranks, of unlike sizes."""
    return [slot[:13], slot[13:]]


def read(files: PageFiles, header: PageHeader) -> np.ndarray | None:
    slot = np.zeros(SIZES[header.kind], np.uint8)
    return slot if files.read(files.name_of(header), header, [slot]) else None


def test_pages_are_found_by_the_next_process_parents_first(tmp_path: Path) -> None:
    headers = [FIRST]
    with closing(PageFiles(str(tmp_path / "cache"), MODEL, NAMES, SIZES)) as files:
        for index in range(5):
            headers.append(PageHeader("page", "", files.name_of(headers[-1]), bytes([index]) * 20))
        for index, header in reversed(list(enumerate(headers))):
            files.write(files.name_of(header), header, parts_of(page(index)))
        tail = PageHeader("tail", "", headers[3].parent, headers[3].key)
        files.write(files.name_of(tail), tail, parts_of(page(9, "tail")))
        orphan = PageHeader("page", "", bytes(16), bytes(20))
        files.write(files.name_of(orphan), orphan, parts_of(page(10)))
    with closing(PageFiles(str(tmp_path / "cache"), MODEL, NAMES, SIZES)) as files:
        found = files.find()
        assert [each.header for each in found] == [*headers[:4], tail, *headers[4:]]
        assert all(each.name == files.name_of(each.header) for each in found)
        for index, header in enumerate(headers):
            assert (read(files, header) == page(index)).all()
        assert read(files, orphan) is None, "nobody can reach it"


def test_all_is_for_this_user_alone(files: PageFiles, tmp_path: Path) -> None:
    files.write(files.name_of(FIRST), FIRST, parts_of(page(0)))
    paths = [tmp_path / "cache", files.path, *files.path.iterdir(), *(tmp_path / "cache").glob("*.lock")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o700, 0o600, 0o600]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def other_tokens(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(bytes(20)) >= 1
    path.write_bytes(data.replace(bytes(20), b"\1" * 20, 1))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "magic": lambda path: flip(path, 0),
    "digest": lambda path: flip(path, len(MAGIC)),
    "header": lambda path: flip(path, 30),
    "tokens": other_tokens,
    "bytes": lambda path: flip(path, -1),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "readable by others": lambda path: path.chmod(0o644),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_ignored_and_removed(damage: str, files: PageFiles) -> None:
    files.write(files.name_of(FIRST), FIRST, parts_of(page(0)))
    [path] = files.path.iterdir()
    DAMAGES[damage](path)
    assert read(files, FIRST) is None
    assert not path.exists()


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"digest", "bytes"}))
def test_a_start_removes_files_that_are_no_pages_of_this_model(damage: str, files: PageFiles) -> None:
    files.write(files.name_of(FIRST), FIRST, parts_of(page(0)))
    [path] = files.path.iterdir()
    DAMAGES[damage](path)
    (files.path / "anything").write_text("x")
    assert files.find() == [] and not list(files.path.iterdir())


def test_links_are_not_followed(files: PageFiles, tmp_path: Path) -> None:
    files.write(files.name_of(FIRST), FIRST, parts_of(page(0)))
    [path] = files.path.iterdir()
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert read(files, FIRST) is None and not path.is_symlink() and elsewhere.exists()
    path.symlink_to(elsewhere)
    assert files.find() == [] and not path.is_symlink() and elsewhere.exists()
    (files.path / f"{files.name_of(FIRST).hex()}.new").symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    with pytest.raises(OSError) as error:
        files.write(files.name_of(FIRST), FIRST, parts_of(page(1)))
    assert error.value.errno == errno.ELOOP and elsewhere.read_bytes() == before


def test_a_directory_that_lets_others_in_or_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"mode 755.*holds prompts.*mode 700"):
        PageFiles(str(tmp_path / "open"), MODEL, NAMES, SIZES)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="name a directory that this user can write"):
        PageFiles(str(tmp_path / "link"), MODEL, NAMES, SIZES)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a directory that this user can write"):
        PageFiles(str(tmp_path / "file"), MODEL, NAMES, SIZES)


def test_nodes_of_a_model_have_directories_of_their_own_and_other_models_see_no_file(tmp_path: Path) -> None:
    directory = str(tmp_path / "cache")
    with closing(PageFiles(directory, MODEL, NAMES, SIZES)) as first:
        first.write(first.name_of(FIRST), FIRST, page(0))
        with closing(PageFiles(directory, MODEL, NAMES, SIZES)) as second:
            assert second.path != first.path and second.find() == []
        with closing(PageFiles(directory, bytes(16), PageNames(bytes(16), 4, 1), SIZES)) as other:
            assert other.find() == []
    with closing(PageFiles(directory, MODEL, NAMES, SIZES)) as again:
        assert again.path == first.path and len(again.find()) == 1


def test_a_write_that_fails_leaves_no_file(files: PageFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(files.name_of(FIRST), FIRST, parts_of(page(0)))
    assert not list(files.path.iterdir())
