"""The file of keys that may connect: what it may say, and when it is read again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from key_files import Listed

from baton.metadata.bus.allow_list import KEY_LEN, AllowList, add_line, line_of
from baton.metadata.errors import ConfigError, ProtocolError

KEYS = [digit * KEY_LEN for digit in "123"]
ROUTER = f"router {KEYS[0]}\n"


def test_names_keys_and_remarks(tmp_path: Path) -> None:
    hashed = "0####" * 8  # a key may hold what begins a remark
    path = tmp_path / "list"
    lines = (
        "# who may come",
        "",
        ROUTER,
        f"  p0\t{KEYS[1]}   # {KEYS[2]}",
        f"#gone {KEYS[2]}",
        f"d {hashed} #",
    )
    path.write_text("\n".join(lines))
    read = AllowList(path)
    assert read.key_of("p0") == KEYS[1].encode()
    assert read.name_of(KEYS[0].encode()) == "router"
    assert read.key_of("d") == hashed.encode()
    assert read.name_of(KEYS[2].encode()) is None and read.key_of("#gone") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line of the router's key"),
        (f"prefill-0 {KEYS[1]}", "no line of the router's key"),
        (f"{ROUTER}decode-0", r"list, line 2: 'decode-0' is not `NAME KEY"),
        (f"{ROUTER}{KEYS[1]}", "line 2: .* is not `NAME KEY"),
        (f"{ROUTER}decode-0 {KEYS[1][:39]}", "line 2: .* is not `NAME KEY"),
        (f"{ROUTER}decode-0 {'~' * 40}", "line 2: .* is not `NAME KEY"),
        (f"{ROUTER}decode-0 {'#' * 40}", "line 2: .* is not `NAME KEY"),  # above 32 bits
        (f"{ROUTER}decode-0 {KEYS[1]} and more", "line 2: .*and more' is not `NAME KEY"),
        (f"{ROUTER}# x\nrouter {KEYS[1]}", "line 3: 'router' or its key stands in line 1"),
        (f"{ROUTER}other {KEYS[0]}", "line 2: 'other' or its key stands in line 1"),
        (f"{ROUTER}{'n' * 129} {KEYS[1]}", "line 2: the name .* longer than 128"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"#" * (1 << 20) + b"##", "longer than"),
    ],
)
def test_a_bad_list_is_told_with_its_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "list"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        AllowList(path)


def test_a_list_that_is_missing_or_anybodys(tmp_path: Path) -> None:
    path = tmp_path / "list"
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*baton keys"):
        AllowList(path)
    path.write_text(ROUTER)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="written by anybody: `chmod o-w"):
        AllowList(path)


def test_a_line_is_added_once(tmp_path: Path) -> None:
    path = tmp_path / "list"
    add_line(path, ROUTER)
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    add_line(path, line_of("decode-0", KEYS[1].encode()))
    assert AllowList(path).name_of(KEYS[1].encode()) == "decode-0"
    before = path.read_text()
    assert before.startswith("# ")
    for line in (line_of("decode-0", KEYS[2].encode()), line_of("other", KEYS[1].encode()), "two words " + KEYS[2]):
        with pytest.raises(ConfigError, match="line 4"):
            add_line(path, line)
    assert path.read_text() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        add_line(tmp_path / "no" / "folder", ROUTER)


def test_it_is_read_again_when_it_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    listed = Listed(tmp_path / "list", "router", "d0", "d1")
    read = AllowList(listed.path, lambda: now)
    assert read.is_due() and not read.is_due()
    listed.write("router", "d1")
    assert not read.is_due()
    assert read.key_of("d0") is not None
    now = 1.0
    with caplog.at_level(logging.WARNING):
        assert read.is_due()
        read.look()
    assert read.key_of("d0") is None and read.name_of(listed.pairs["d0"].public) is None
    assert read.key_of("d1") == listed.pairs["d1"].public
    assert [record.getMessage() for record in caplog.records] == [
        f"allow-list {listed.path}: shut out d0; let in nobody"
    ]


def test_a_file_that_breaks_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = Listed(tmp_path / "list", "router", "d0")
    read = AllowList(listed.path)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            listed.replace("")
            read.look()
        listed.replace("router x")
        read.look()
        listed.path.unlink()
        read.look()
        read.look()
    assert read.key_of("d0") is not None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and "line 1" in said[1], said
    assert all("stays in force" in line for line in said)
    listed.write("router")
    read.look()
    assert read.key_of("d0") is None


def test_who_speaks_under_which_name(tmp_path: Path) -> None:
    read = AllowList(Listed(tmp_path / "list", "router").path)
    read.require("d0", "d0")
    with pytest.raises(ProtocolError, match=r"the key of d0 is not in allow-list .*list any more"):
        read.require(None, "d0")
    with pytest.raises(ProtocolError, match=r"d0 has the key that allow-list .*list calls 'd1'"):
        read.require("d1", "d0")
    with pytest.raises(ConfigError, match="names no key of 'p0': add its line, `p0 KEY`"):
        read.server_key("p0")
