"""Clients of the chaos tests. Each sends one request, reads its stream and compares it with the expected answer."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HANG_S = 100.0  # longest silence of a stream; the router ends a request before that


@dataclass(frozen=True, slots=True)
class Known:
    """A request and its expected answer: tokens, finish reason and stop id of each choice."""

    name: str
    body: dict[str, Any]
    ids: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[str, int | None], ...]


@dataclass
class Stream:
    """One request. `outcome` and `problems` are valid once `thread` has ended. `connect`: as `Cluster.connection`."""

    connect: Callable[[float], http.client.HTTPConnection]
    known: Known
    router: str = "router"  # that gets it
    rid: str = ""
    ids: list[list[int]] = field(default_factory=list)
    ends: list[tuple[str, int | None] | None] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # the server's error message
    is_cut: bool = False  # the connection ended without [DONE] or an error
    is_done: bool = False  # [DONE] came
    problems: list[str] = field(default_factory=list)  # violations of the expected answer
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
        connection = self.connect(HANG_S)
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
                self.problems.append(f"data after the end: {line[:200]!r}")
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
            index = choice["index"]
            if self.ends[index] is not None:
                self.problems.append(f"choice {index} continues after its end: {choice}")
            self.ids[index] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                stop = choice.get("stop_reason")
                self.ends[index] = (choice["finish_reason"], stop if isinstance(stop, int) else None)

    def _judge(self) -> None:
        for index, (ours, theirs) in enumerate(zip(self.ids, self.known.ids, strict=True)):
            if tuple(ours) != theirs[: len(ours)]:
                wrong = next(i for i, token in enumerate(ours) if i >= len(theirs) or token != theirs[i])
                self.problems.append(f"wrong token {wrong} of choice {index}: {ours[wrong:][:5]}")
            elif self.is_done and (len(ours) < len(theirs) or self.ends[index] != self.known.ends[index]):
                expected = f"{len(theirs)} tokens, {self.known.ends[index]}"
                self.problems.append(f"choice {index}: {len(ours)} tokens, {self.ends[index]} instead of {expected}")
        if self.is_done:
            counted = (self.usage.get("prompt_tokens"), self.usage.get("completion_tokens"))
            right = (len(self.known.body["prompt"]), sum(map(len, self.known.ids)))
            if counted != right:
                self.problems.append(f"usage {counted} instead of {right}")
