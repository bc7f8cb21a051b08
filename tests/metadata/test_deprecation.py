"""A name that was replaced works for a release more, and a warning says once what to use: planted old names of each
kind go through the real program."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from baton.deploy import flags
from baton.deploy.cli import main
from baton.metadata.deprecation import Replaced, warn_once
from baton.metadata.errors import ConfigError
from baton.router.figures import other_names
from baton.router.figures.metrics import MetricNames, Metrics
from baton.router.http.bodies import fields, refused_bodies
from baton.router.http.bodies.bodies import decode
from baton.router.http.generation.types import ChatMessage, ChatRequest
from baton.router.http.server import openapi
from baton.router.http.server.routes import ROUTES

FLAGS = (
    Replaced("--http-port", "--port", "0.2"),
    Replaced("--origin-allowed", "--allow-origin", "0.2"),
    Replaced("--reuse-prefix", "--prefix-cache", "0.2"),
    Replaced("--max-attempts", None, "0.2"),
)
HTTP_PORT = "--http-port is deprecated since Baton 0.2, and goes in the minor release after it: use --port"


@pytest.fixture
def old_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "REPLACED", FLAGS)


@pytest.fixture
def old_fields(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = (
        ((ChatRequest,), (fields.Renamed("heat", "temperature", since="0.2"),)),
        ((ChatMessage,), (fields.Renamed("body", "content", since="0.2"),)),
    )
    monkeypatch.setattr(fields, "_TABLE", (*fields._TABLE, *rows))
    caches = (fields.rules_of, refused_bodies._described, warn_once)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("old_flags")
def test_an_old_flag_sets_what_the_new_one_sets(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--http-port=81", "--origin-allowed", "http://a", "--allow-origin", "http://b", "--no-reuse-prefix"]
    assert main(["up", *command, "--print-config"]) == 0
    printed = capsys.readouterr()
    assert "port = 81\n" in printed.out and 'allow_origin = ["http://a", "http://b"]' in printed.out
    assert "prefix_cache = false" in printed.out
    warnings = [line.removeprefix("baton: warning: ") for line in printed.err.splitlines()]
    assert warnings[0] == HTTP_PORT and len(warnings) == 3, "one per old flag"
    assert main(["router", "--max-attempts", "2", "--print-config"]) == 0
    printed = capsys.readouterr()
    assert "max_attempts = 2\n" in printed.out and printed.err.endswith("after it: leave it out\n")


@pytest.mark.usefixtures("old_flags")
def test_old_flags_are_not_in_the_help_and_only_of_commands_with_the_new_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["router", "--help"])
    assert "--http-port" not in capsys.readouterr().out
    assert main(["chat", "--http-port", "81"]) == 2
    assert "unknown argument '--http-port'" in capsys.readouterr().err


@pytest.mark.usefixtures("old_flags")
def test_an_old_key_of_the_configuration_sets_what_the_new_one_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[router]\nhttp_port = 81\n")
    assert main(["router", "--config", str(file), "--print-config"]) == 0
    printed = capsys.readouterr()
    assert "port = 81\n" in printed.out
    assert printed.err == (
        f"baton: warning: {file}: [router] http_port is deprecated since Baton 0.2, and goes in the minor release "
        "after it: use port\n"
    )
    file.write_text("[router]\nport = 80\nhttp_port = 81\n")
    assert main(["router", "--config", str(file)]) == ConfigError.exit_status
    assert "[router] sets port twice, once by its old name; keep port" in capsys.readouterr().err


@pytest.mark.usefixtures("old_fields")
def test_an_old_field_of_a_body_is_served_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"model": "m", "heat": 0.5, "messages": [{"role": "user", "body": "a"}, {"role": "user", "body": "b"}]}'
    with caplog.at_level(logging.WARNING, "baton.metadata.deprecation"):
        for _ in range(2):
            decoded = decode(body, ChatRequest)
            assert decoded.temperature == 0.5
            assert [message.content for message in decoded.messages] == ["a", "b"]
    assert [record.getMessage().partition(" is deprecated")[0] for record in caplog.records] == [
        "the field heat of requests",
        "the field messages.body of requests",
    ]
    assert caplog.records[0].getMessage().endswith("use temperature")
    described = openapi.document(ROUTES)["components"]["schemas"]["ChatRequest"]["properties"]["heat"]
    assert described == {"deprecated": True, "description": "Deprecated since 0.2: use temperature."}


@pytest.mark.parametrize("names", get_args(MetricNames))
def test_an_old_metric_repeats_the_new_one_and_says_so(monkeypatch: pytest.MonkeyPatch, names: MetricNames) -> None:
    rows = (Replaced("baton_answers", "baton_requests", "0.2"), Replaced("baton_release", "baton_build_info", "0.2"))
    monkeypatch.setattr(other_names, "REPLACED", rows)
    metrics = Metrics(names)
    nodes: Any = SimpleNamespace(nodes={}, groups={}, histories=())
    queues: Any = SimpleNamespace(num_waiting_of={})
    metrics.watch_service(nodes, queues, {}, lambda: True)
    metrics.count_request("m", "done")
    page = metrics.page().decode().splitlines()

    def series(name: str) -> set[str]:
        return {line.removeprefix(name) for line in page if line.startswith(name)}

    assert series("baton_answers_total{") == series("baton_requests_total{") != set()
    assert series("baton_release{") == series("baton_build_info{") != set()
    assert any(
        line.startswith("# HELP baton_answers_total baton_answers is deprecated since Baton 0.2") for line in page
    )
    assert any(line.startswith("# HELP vllm:") for line in page) == (names == "vllm")
