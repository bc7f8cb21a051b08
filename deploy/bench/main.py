"""`baton bench`: measures a server under requests that arrive independently of its answers."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from ...metadata.errors import ConfigError, RequestError, Unavailable
from ...metadata.version import package_version
from ..client import Client, failure
from ..flags import to_argv
from ..simulation.traffic import Arrival
from ..terminal import printable
from .client import Reply, Target, ask, open_session
from .compare import compared_text, read_report
from .config import BenchConfig
from .figures import Report, load_figures
from .load import Vocabulary, plan
from .sender import Sender, joined, run_on_uvloop
from .table import chart, head_text, load_text

_COUNTED_PIECES = 200  # of the prompt that tells how many tokens words have
_LINE_S = 0.5  # between two lines of progress
_WIDTH = 80
_Answer = TypeVar("_Answer")


class Server(NamedTuple):
    """A server as it describes itself. None: it does not tell."""

    name: str
    model: str
    context_len: int | None
    vocab_size: int | None


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None
    max_model_len: Annotated[int, msgspec.Meta(gt=0)] | None = None


class _Models(msgspec.Struct):
    data: list[_Model] | None = None


class _Version(msgspec.Struct):
    version: str | None = None


class _Tokenizer(msgspec.Struct):
    vocab_size: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] | None = None


def run(config: BenchConfig, compare: Sequence[str] | None) -> int:
    """Measure, or compare two files. Return 0, 1 if no request was answered, or 130 after Ctrl-C. Raises BatonError."""
    if compare is not None:
        print(compared_text(*(read_report(Path(each)) for each in compare)))
        return 0
    loads = list(config.loads())
    client = Client(config.url, config.key)
    server = meet(client, config)
    longest = max(config.shape.longest(each) for _, arrivals in loads for each in arrivals)
    if server.context_len is not None and longest > server.context_len:
        raise ConfigError(
            f"the longest request has {longest:,} tokens, and {server.model} takes {server.context_len:,}: lower "
            "--prompt-len, --tokens or --turns"
        )
    return run_on_uvloop(_measure(config, client.url, server, loads))


def meet(client: Client, config: BenchConfig) -> Server:
    """Ask a server what it is. Raises Unavailable or RequestError."""
    status, body = client.get("/v1/models")
    if status in (401, 403):
        raise RequestError(f"{failure(status, body)}; set BATON_API_KEY or OPENAI_API_KEY")
    models = _read(body, _Models)
    if status != 200 or models is None:
        raise Unavailable(f"{client.url} has no OpenAI-compatible interface: GET /v1/models answers HTTP {status}")
    named = {each.id: each for each in models.data or ()}
    model = config.model or next(iter(named), None)
    if model is None:
        raise Unavailable(f"{client.url} serves no model yet")
    if model not in named:
        raise RequestError(f"{client.url} does not serve {model}; it serves {', '.join(named)}")
    about, version = named[model], _asked(client, "/version", _Version)
    tokenizer = _asked(client, "/tokenizer_info", _Tokenizer) if not config.chat else None
    name = " ".join(each for each in (about.owned_by, version and version.version) if each)
    return Server(
        name or "unknown server", model, about.max_model_len, None if tokenizer is None else tokenizer.vocab_size
    )


def _asked(client: Client, path: str, kind: type[_Answer]) -> _Answer | None:
    """Return what GET `path` answers, None if the server has no such route."""
    status, body = client.get(path)
    return _read(body, kind) if status == 200 else None


def _read(body: bytes, kind: type[_Answer]) -> _Answer | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None


async def _measure(config: BenchConfig, url: str, server: Server, loads: Sequence[tuple[float, list[Arrival]]]) -> int:
    """Send all loads. Print each, and write the files anew after each."""
    fields: dict[str, Any] = {"ignore_eos": True} if config.ignore_eos else {}
    if server.vocab_size is not None and config.turns > 1:
        fields["return_token_ids"] = True
    target = Target(url, server.model, config.chat, config.key, fields | config.extra_fields)
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    status = 0
    async with open_session(target, config.timeout_s) as session:
        vocabulary = await learn(session, target, server)
        report = _report(config, url, server, vocabulary)
        print(head_text(report, width))
        for rate, arrivals in loads:
            for repeat in range(1, config.repeat + 1):
                sender = Sender(session, target, config.think_s)
                planned = plan(arrivals, config.shape, vocabulary, f"{report.prompt_seed}/{len(report.loads)}")
                progress = asyncio.create_task(_progress(sender, len(planned) * config.turns))
                await sender.run(planned)
                progress.cancel()
                await asyncio.gather(progress, return_exceptions=True)
                load = load_figures(sender, rate, repeat, config.slos)
                report.loads.append(load)
                print(load_text(load, width), flush=True)
                _write(config, report)
                status = 1 if not load.answered else status
                if not load.is_complete:
                    return 130
    return status


async def learn(session: Any, target: Target, server: Server) -> Vocabulary:
    """Send the first requests, which also open the way for those that are measured. Return the pieces of prompts: token
    ids if the server tells their number, else words, whose tokens it counts. Raises RequestError."""
    if server.vocab_size is not None:
        ids = Vocabulary(range(server.vocab_size))
        reply = await _first(session, target, joined(ids.draw(Random(0), 16)), 2)
        if reply.ids or not target.fields.get("return_token_ids"):
            return ids
    words, counts = Vocabulary(), list[int | None]()
    for num_pieces in (1, min(_COUNTED_PIECES, max(2, (server.context_len or 4096) // 16))):
        text = joined(words.draw(Random(0), num_pieces))
        counts.append((await _first(session, target, text, 2)).prompt_len)
    if None in counts:
        return words
    one, many = (count or 0 for count in counts)
    per_piece = max(0.1, (many - one) / (num_pieces - 1))
    return Vocabulary(words.pieces, per_piece, max(0.0, one - per_piece))


async def _first(session: Any, target: Target, prompt: Any, num_tokens: int) -> Reply:
    reply = await ask(session, target, [{"role": "user", "content": prompt}] if target.is_chat else prompt, num_tokens)
    if reply.error not in (None, "no token"):
        raise RequestError(f"the first request failed, {reply.error}: {reply.message}")
    return reply


async def _progress(sender: Sender, num_requests: int) -> None:
    """Redraw a line on a terminal's stderr. Does nothing elsewhere."""
    if not sys.stderr.isatty():
        return
    try:
        while True:
            num_ended = sum(each.reply.end_s > 0 for each in sender.asked)
            line = f"{len(sender.asked):,} of {num_requests:,} sent, {num_ended:,} ended"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(_LINE_S)
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _report(config: BenchConfig, url: str, server: Server, vocabulary: Vocabulary) -> Report:
    path = "chat completions" if config.chat else "completions"
    counted = f"{vocabulary.tokens_per_piece:.2f} tokens per word"
    prompts = "random token ids" if vocabulary.is_ids else f"random English words, {counted}"
    secret = {"api_key"}
    return Report(
        baton=package_version(),
        command=shlex.join(["baton", "bench", *to_argv(config)]),
        prompt_seed=time.time_ns() if config.seed is None else config.seed,
        settings={each.name: getattr(config, each.name) for each in fields(config) if each.name not in secret},
        started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        url=url,
        server=printable(server.name),
        model=printable(server.model),
        prompts=f"streamed {path}; prompts of {prompts}",
        python=platform.python_version(),
        cpus=os.cpu_count() or 1,
    )


def _write(config: BenchConfig, report: Report) -> None:
    """Write the files that are asked for. Raises ConfigError."""
    try:
        if config.json is not None:
            Path(config.json).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        if config.svg is not None and any(load.answered for load in report.loads):
            Path(config.svg).write_text(chart(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
