"""Clients: each sends one request whose right answer is known, reads the stream, and judges what came."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

HANG_S = 100.0  # without a byte. max_attempts x (answer to a reservation) is what a request may take at worst


@dataclass(frozen=True, slots=True)
class Known:
    """A request and its right answer: tokens, finish reason and stop id of each choice."""

    name: str
    body: dict[str, Any]
    ids: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[str, int | None], ...]


@dataclass
class Stream:
    """One request under way. Read `outcome` and `problems` when `thread` has ended."""

    port: int
    known: Known
    rid: str = ""
    ids: list[list[int]] = field(default_factory=list)
    ends: list[tuple[str, int | None] | None] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # how it failed, in the server's words
    is_cut: bool = False  # the connection broke without a last word
    is_done: bool = False  # [DONE] came
    problems: list[str] = field(default_factory=list)  # what must never be
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.ids = [[] for _ in self.known.ids]
        self.ends = [None for _ in self.known.ids]
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def outcome(self) -> str:
        return "done" if self.is_done else "failed" if self.error is not None else "cut"

    def _run(self) -> None:
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            body = json.dumps(self.known.body | {"stream": True, "stream_options": {"include_usage": True}})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self.error = f"{response.status}: {json.loads(response.read())['error']['message']}"
            else:
                self._read(response)
        except TimeoutError:
            self.problems.append(f"hung: not a byte for {HANG_S:g} s after {self.num_tokens} tokens")
        except (OSError, http.client.HTTPException):
            self.is_cut = True
        finally:
            connection.close()
            self.seconds = time.monotonic() - started
        self._judge()

    def _read(self, response: http.client.HTTPResponse) -> None:
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            if self.is_done or self.error is not None:
                self.problems.append(f"something after the end: {line[:200]!r}")
            elif line.strip() == b"data: [DONE]":
                self.is_done = True
            else:
                self._take(json.loads(line[6:]))
        self.is_cut = not self.is_done and self.error is None

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.rid = event["id"]
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            place = choice["index"]
            if self.ends[place] is not None:
                self.problems.append(f"choice {place} goes on after its end: {choice}")
            self.ids[place] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                stop = choice.get("stop_reason")
                self.ends[place] = (choice["finish_reason"], stop if isinstance(stop, int) else None)

    def _judge(self) -> None:
        for place, (ours, theirs) in enumerate(zip(self.ids, self.known.ids, strict=True)):
            if tuple(ours) != theirs[: len(ours)]:
                wrong = next(i for i, token in enumerate(ours) if i >= len(theirs) or token != theirs[i])
                self.problems.append(f"wrong token {wrong} of choice {place}: {ours[wrong:][:5]}")
            elif self.is_done and (len(ours) < len(theirs) or self.ends[place] != self.known.ends[place]):
                expected = f"{len(theirs)} tokens, {self.known.ends[place]}"
                self.problems.append(f"choice {place}: {len(ours)} tokens, {self.ends[place]} instead of {expected}")
        if self.is_done:
            counted = (self.usage.get("prompt_tokens"), self.usage.get("completion_tokens"))
            right = (len(self.known.body["prompt"]), sum(map(len, self.known.ids)))
            if counted != right:
                self.problems.append(f"usage {counted} instead of {right}")
