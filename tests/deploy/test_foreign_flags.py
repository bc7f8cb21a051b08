"""Flags of other servers lead to Baton's own."""

from __future__ import annotations

import re

import pytest

from baton.deploy.cli import _settings, main
from baton.deploy.foreign_flags import COMMANDS, FLAGS, hint

OURS = {setting.flag for command in ("up", "router", "prefill", "decode") for setting in _settings(command).values()}


def test_the_table_names_flags_that_exist_and_none_of_its_own() -> None:
    assert not OURS & FLAGS.keys()
    switches = {f"--no-{flag.removeprefix('--')}" for flag in OURS}
    for name, clause in FLAGS.items():
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", clause):
            assert flag in OURS | switches, (name, flag)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("--tensor-parallel-size", "the flag is --tp"),
        ("--tensor_parallel_size", "the flag is --tp"),
        ("-tp", "the flag is --tp"),
        ("--served-model-name", "the flag is --model-name"),
        ("--max-model-len", "the flag is --context-len"),
        ("--trust-remote-code", "no code of a checkpoint is ever run; leave the flag out"),
    ],
)
def test_what_to_do_instead(name: str, words: str) -> None:
    assert hint(name, OURS) == words


def test_a_flag_of_another_command_says_so() -> None:
    router = {setting.flag for setting in _settings("router").values()}
    assert hint("--tp-size", router) == "the flag is --tp (of `baton up` and the nodes)"
    assert hint("--szie", router) is None


def test_commands_of_others_lead_to_up() -> None:
    assert "baton up --model MODEL" in COMMANDS["serve"] and "baton up --model MODEL" in COMMANDS["launch"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["up", "--tensor-parallel-size", "2"], ["unknown argument '--tensor-parallel-size'; the flag is --tp (see"]),
        (["up", "-tp", "2"], ["'-tp'; the flag is --tp"]),
        (["router", "--tp-size=2"], ["the flag is --tp (of `baton up` and the nodes)"]),
        (["router", "--model", "x"], ["'--model'; it is a flag of `baton up`, `baton prefill`, `baton decode`"]),
        (["up", "org/name"], ["unknown argument 'org/name'; did you mean --model org/name?"]),
        (["up", "--tensor-parallel-shards", "2"], ["unknown argument '--tensor-parallel-shards' (see"]),
        (["--port", "3", "up"], ["the command stands before its flags: `baton up --port ...`"]),
        (["prefill", "--router", "[::1]:5700"], ["address '[::1]:5700' is neither", "; write tcp://[::1]:5700"]),
        (["serve", "org/name"], ["no command 'serve'; `baton up --model MODEL` serves a model"]),
        (["decode", "--model", "/no/such/model"], ["--model /no/such/model: no such directory"]),
    ],
)
def test_a_wrong_command_line_says_what_to_do(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("baton: error: ") and said.err.count("\n") == 1
    for word in words:
        assert word in said.err
