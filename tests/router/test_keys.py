"""The file of API keys: what its lines may be, and how it is read again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from baton.metadata.errors import ConfigError
from baton.router.keys import MAX_BYTES, ApiKey, KeysFile, parse_keys
from baton.router.tenants.fair_share import DEFAULT, Tenant

TEXT = """# ours
k1            # rack 7
  bob k#2
ann k3 acme 2
eve k4 acme   # the weight stands above
ann k5 acme
"""
ACME = Tenant("acme", 2.0)


def test_a_line_is_a_key_with_a_name_a_tenant_and_a_weight() -> None:
    assert parse_keys("f", TEXT) == [
        ApiKey("k1", "", DEFAULT),
        ApiKey("k#2", "bob", DEFAULT),
        ApiKey("k3", "ann", ACME),
        ApiKey("k4", "eve", ACME),
        ApiKey("k5", "ann", ACME),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        ("k1\na secret acme 1 more", "line 2: it has 5 words"),
        ("secret\nbob k2\nann secret", "line 3: its key stands in line 1 already"),
        ("a secret acme much", "line 1: the fourth word is the tenant's weight"),
        ("a secret acme 0", "0.001..1000"),
        ("a secret acme -1", "weight"),
        ("a secret acme nan", "weight"),
        ("a secret acme 1e9", "weight"),
        ("a secret acme 2\nb k2 acme 3", "line 2: its tenant has another weight in line 1"),
        (f"{'n' * 129} secret", "line 1: a name is longer"),
        (f"a secret {'n' * 129}", "line 1: a name is longer"),
        ("a\x07b secret", "cannot be printed"),
    ],
)
def test_a_mistake_is_named_by_its_line_and_without_a_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys("the-file", text)
    assert words in str(caught.value) and "the-file" in str(caught.value)
    assert "secret" not in str(caught.value) and "k2" not in str(caught.value)


def test_the_file_is_read_again_when_it_changes_and_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    file = KeysFile(str(path))
    assert not file.look()

    def written(data: bytes) -> bool:
        path.write_bytes(data)
        return file.look()

    assert written(b"\xef\xbb\xbfbob two acme\r\n") and [key.key for key in file.keys] == ["two"]
    with caplog.at_level(logging.INFO, "baton.router.keys"):
        for wrong, words in (
            (b"bob two acme\nthree three three three three\n", "line 2"),
            (b"", "no key"),
            (b"\xff\xfe", "UTF-8"),
            (b"k" * (MAX_BYTES + 1), "longer"),
        ):
            assert not written(wrong) and not file.look(), "a mistake is reported once"
            assert [key.key for key in file.keys] == ["two"]
            assert words in caplog.messages[-1] and "stay in force" in caplog.messages[-1]
        num_lines = len(caplog.messages)
        assert not file.look(force=True) and len(caplog.messages) == num_lines + 1, "a reload reports it again"
        num_lines += 1
        path.unlink()
        assert not file.look() and not file.look()
        assert len(caplog.messages) == num_lines + 1 and "cannot be read" in caplog.messages[-1]
    other = tmp_path / "new"
    other.write_text("four\n")
    other.replace(path)
    assert file.look() and [key.key for key in file.keys] == ["four"]


def test_a_file_that_comes_back_is_in_force_again(tmp_path: Path) -> None:
    path, away = tmp_path / "keys", tmp_path / "away"
    path.write_text("one")  # at start a last line may be without a newline
    file = KeysFile(str(path))
    path.rename(away)
    assert not file.look() and "cannot be read" in file.complaint
    away.rename(path)
    assert not file.look() and file.look() and not file.complaint
    assert file.look(force=True) and not file.look()


@pytest.mark.parametrize("wrong", [b"\xff\xfe", b"k" * (MAX_BYTES + 1), b"a b c d e\n"])
def test_a_file_with_a_mistake_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"one\n")
    file = KeysFile(str(path))
    path.write_bytes(wrong)
    assert not file.look() and file.complaint
    monkeypatch.setattr(file, "_read", lambda: pytest.fail("the file was read again"))
    assert not file.look()


def test_a_line_that_is_still_being_written_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann sk-aaaa\n")
    file = KeysFile(str(path))
    path.write_text("eve sk-bbbb\nann sk-a")
    for rest in ("a", "a", "a\n"):
        assert not file.look() and not file.complaint
        assert [key.key for key in file.keys] == ["sk-aaaa"]
        with path.open("a") as end:
            end.write(rest)
    assert file.look() and [key.key for key in file.keys] == ["sk-bbbb", "sk-aaaa"]


def test_a_last_line_without_a_newline_counts_when_it_has_not_changed_since_the_last_look(tmp_path: Path) -> None:
    """Secrets that Kubernetes mounts have this form. Whoever asks for a reload says that the file is complete."""
    path = tmp_path / "keys"
    path.write_text("one")
    file = KeysFile(str(path))
    path.write_text("two two")
    assert not file.look() and file.look() and [key.key for key in file.keys] == ["two"]
    assert not file.look()
    path.write_text("three three")
    assert file.look(force=True) and [key.key for key in file.keys] == ["three"]
    path.write_text("four four four four")
    assert not file.look() and not file.look() and "the fourth word" in file.complaint
    assert [key.key for key in file.keys] == ["three"] and not file.look()
