"""The table of findings, and the exit status of the command."""

from __future__ import annotations

import pytest

from baton.deploy import cli
from baton.deploy.doctor import doctor
from baton.deploy.doctor.facts import Facts, Tried
from baton.deploy.doctor.finding import Finding, table

FINDINGS = [
    Finding("ok", "a process may open 20,000 files", "", "open files"),
    Finding(
        "warning", "HTTP_PROXY=http://proxy.example catches loopback " * 3, "Run `export NO_PROXY=...`.", "proxies"
    ),
]


@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_table_fits_the_terminal_and_says_everything(width: int) -> None:
    lines = list(table(FINDINGS, width))
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    for finding in FINDINGS:
        assert " ".join(finding.what.split()) in words
    assert "-> Run `export NO_PROXY=...`." in words


def test_no_text_of_a_server_controls_the_terminal() -> None:
    finding = Finding("error", "the router says\n\x1b[2Jno", "Read \x1b]0;title\x07 again.", "service")
    assert (
        " ".join(" ".join(table([finding], 80)).split())
        == "error service the router says ?[2Jno -> Read ?]0;title? again."
    )


def test_a_path_stays_whole_so_that_it_can_be_pasted() -> None:
    path = "/a/very/long/path/of/a/key/file/that/is/longer/than/the/terminal.key"
    assert any(path in line for line in table([Finding("error", f"chmod 600 {path}", "", "key files")], 40))


@pytest.mark.parametrize(
    ("keys", "status", "words"),
    [(None, 0, "1 note."), (Tried("a.key", "a.key is malformed"), 1, "1 error, 1 note.")],
)
def test_only_an_error_makes_the_exit_status_1(
    keys: Tried | None,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = Facts(python=(3, 11, 0), baton="0.1.0", max_open_files=65536, free_memory=8 << 30, keys=keys)
    monkeypatch.setattr(doctor, "read_facts", lambda _: facts)
    assert cli.main(["doctor"]) == status
    assert words in capsys.readouterr().out.replace("\n", " ")
