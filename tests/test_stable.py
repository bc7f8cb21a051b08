"""The names that users rely on stay: docs/stable_names.txt lists them, and none goes without a deprecation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from baton.deploy import flags
from baton.metadata.deprecation import Replaced
from baton.router.figures import other_names
from baton.router.http.bodies import fields
from baton.router.http.generation.types import ChatRequest

_spec = importlib.util.spec_from_file_location("stable", Path(__file__).with_name("stable.py"))
assert _spec is not None and _spec.loader is not None
stable = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stable)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return stable.names()


def test_no_stable_name_has_gone_or_changed_and_new_ones_are_recorded(found: dict[str, str]) -> None:
    text = stable.RECORD.read_text(encoding="utf-8")
    recorded = stable.read(text)
    assert stable.faults(recorded, found, stable.current_release()) == []
    assert stable.written(recorded, found) == text, f"run `{stable.COMMAND}`, and read what it changed"


@pytest.mark.parametrize(
    ("name", "now", "fault"),
    [
        ("flag router --port", None, "is gone"),
        ("flag router --port", "str = null", "no longer takes int"),
        ("flag router --port", "int = 9000", None),
        ("flag decode --page-size", "int = 32", "has the default 32"),
        ("flag up --kv-dtype", 'str = "fp8"', "has the default"),
        ("key GET /metrics", "key", "has changed to"),
        ("flag router --port", "float or int = 8000", None),
        ("flag up --local-prefill=auto", None, "is gone"),
        ("field ChatRequest.temperature", "number = 0", "no longer takes null"),
        ("field ChatRequest.max_new_tokens", None, "is gone"),
        ("field ChatRequest.user", "string", None),
        ("answer Usage.prompt_tokens", "integer or null", "has changed to"),
        ("metric baton_requests", "counter by model", "has changed to"),
        ("route POST /v1/chat/completions", None, "is gone"),
        ("variable BATON_API_KEY", None, "is gone"),
        ("exit 3", None, "is gone"),
    ],
)
def test_a_name_that_goes_or_means_less_is_found(
    found: dict[str, str], name: str, now: str | None, fault: str | None
) -> None:
    after = {each: words for each, words in found.items() if each != name} | ({} if now is None else {name: now})
    faults = stable.faults(found, after, (0, 2))
    assert [fault in each for each in faults] == [True] if fault else faults == []


def test_a_deprecated_name_stays_for_one_minor_release(found: dict[str, str]) -> None:
    name = "flag router --port"
    deprecated = found | {name: "deprecated since 0.2: use --http-port"}
    gone = {each: words for each, words in found.items() if each != name}
    assert stable.faults(found, deprecated, (0, 2)) == []
    assert len(stable.faults(deprecated, gone, (0, 2))) == 1
    assert stable.faults(deprecated, gone, (0, 3)) == stable.faults(deprecated, gone, (1, 0)) == []


def test_a_protocol_stays_until_an_earlier_minor_release_speaks_another(found: dict[str, str]) -> None:
    recorded = {"protocol 7": "0.1", "protocol 8": "0.2"}
    assert stable.faults(recorded, {"protocol 8": "0.3"}, (0, 3)) == []
    assert len(stable.faults(recorded, {"protocol 8": "0.2"}, (0, 2))) == 1
    assert stable.written(recorded, {"protocol 8": "0.3", "protocol 9": "0.3"}) == "protocol 8: 0.2\nprotocol 9: 0.3\n"


def test_deprecations_of_the_program_are_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "REPLACED", (Replaced("--http-port", "--port", "0.2"),))
    monkeypatch.setattr(other_names, "REPLACED", (Replaced("baton_is_ready", "baton_ready", "0.2"),))
    row = ((ChatRequest,), (fields.Renamed("heat", "temperature", since="0.2"),))
    monkeypatch.setattr(fields, "_TABLE", (*fields._TABLE, row))
    monkeypatch.setitem(stable.DEPRECATED, "answer Usage.prompt_tokens", "deprecated since 0.2: use Usage.num_prompt")
    fields.rules_of.cache_clear()
    try:
        found = stable.names()
    finally:
        fields.rules_of.cache_clear()
    assert found["flag router --http-port"] == found["flag up --http-port"] == "deprecated since 0.2: use --port"
    assert "flag chat --http-port" not in found and found["flag router --port"] == "int = 8000"
    assert found["metric baton_is_ready"] == "deprecated since 0.2: use baton_ready"
    assert found["field ChatRequest.heat"] == "deprecated since 0.2: use temperature."
    assert found["answer Usage.prompt_tokens"] == "deprecated since 0.2: use Usage.num_prompt"


def test_writing_refuses_to_drop_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "docs" / "stable_names.txt"
    record.parent.mkdir()
    monkeypatch.setattr(stable, "RECORD", record)
    monkeypatch.setattr(stable, "ROOT", tmp_path)
    monkeypatch.setattr(stable, "current_release", lambda: (0, 1))
    monkeypatch.setattr(stable, "names", lambda: {"flag up --a": "int = 1", "route GET /": ""})
    record.write_text("flag up --a: int = 0\n", encoding="utf-8")
    assert stable.main([]) == 1 and stable.COMMAND in capsys.readouterr().out
    assert stable.main(["--write"]) == 0
    assert record.read_text(encoding="utf-8") == "flag up --a: int = 1\nroute GET /\n"
    monkeypatch.setattr(stable, "names", lambda: {"route GET /": ""})
    assert stable.main(["--write"]) == 1 and "--a" in record.read_text(encoding="utf-8")


def test_the_page_names_what_is_deprecated_and_the_protocols(found: dict[str, str]) -> None:
    page = " ".join((stable.ROOT / "docs" / "stability.md").read_text(encoding="utf-8").split())
    assert f"speaks protocols {stable.PROTOCOL_MIN} to {stable.PROTOCOL_MAX}" in page
    deprecated = [name.split()[-1] for name, words in found.items() if words.startswith("deprecated since ")]
    assert ("Deprecated now: nothing." in page) == (not deprecated)
    assert [name for name in deprecated if f"`{name}`" not in page] == []
