"""No body takes long in the event loop, whatever route, field and fault; and the processes give the loop's answers."""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from baton.metadata.garbage import Garbage
from baton.router.http.bodies import bodies
from baton.router.http.bodies.side_work import BODIES
from baton.router.http.server.routes import ROUTES

from ...conftest import System
from ..limit_bodies import LimitBody, limit_bodies

MOST_CPU_S = 0.05  # without the kernel's time for new memory
NUM_FAULTS = 1024
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or () %}<tool_call>{"name": "{{ call.function.name }}",
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def slowness() -> float:
    """Return how many times longer than a usual machine this one takes now, 1 for a faster one."""
    return max(1.0, min(_calibrated() for _ in range(3)) / 0.010)


@pytest.fixture
def _garbage() -> Iterator[None]:
    """Collect garbage as the router's process does."""
    thresholds = gc.get_threshold()
    Garbage()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def _calibrated() -> float:
    begun = time.thread_time()
    sum(len(str(each)) for each in range(50_000))
    return time.thread_time() - begun


def _used() -> tuple[float, int]:
    """Return the processor time of the calling thread in seconds, and how often it touched a page of new memory."""
    return time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _fault_s() -> float:
    """Return how long the kernel takes for a page of new memory: 0.2 us, and up to 20 in a virtual machine."""
    with mmap.mmap(-1, NUM_FAULTS * mmap.PAGESIZE) as memory:
        before, faults_before = _used()
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1
        after, faults_after = _used()
    return (after - before) / max(NUM_FAULTS, faults_after - faults_before)


def _chosen(size: int) -> Iterator[LimitBody]:
    """Yield one body per kind of field and fault of each route, and all those of many values."""
    seen = set[tuple[str, str]]()
    for each in limit_bodies(size):
        place, _, what = each.name.partition(" ")
        top = place.partition(".")[0].partition("[")[0]
        key = (each.route, f"{top} {what}" if what.startswith("of") else what)
        if key not in seen:
            seen.add(key)
            yield each


def _in_gate(bodies: list[LimitBody]) -> list[LimitBody]:
    """Return one in eight of the fields and faults, each at one of the routes that have it."""
    alike: defaultdict[str, list[LimitBody]] = defaultdict(list)
    for each in bodies:
        alike[each.name].append(each)
    return [same[i % len(same)] for i, same in enumerate([*alike.values()][::8])]


@pytest.mark.timing
@pytest.mark.usefixtures("_garbage")
def test_no_body_takes_long_in_the_event_loop(make_system: Callable[..., System], slowness: float) -> None:
    """A MiB holds about as many values as a body may have; eight of them are only longer texts. The best of three."""
    system = make_system(context_len=1 << 20, num_pages=1 << 20, template=TEMPLATE).up()
    bodies, slow = list(_chosen(1 << 20)), list[tuple[float, str, str]]()
    assert len(bodies) > 100
    routes = {each.route for each in bodies}
    bodies = bodies if "BATON_WHOLE_MATRIX" in os.environ else _in_gate(bodies)
    assert {each.route for each in bodies} == routes
    text = "the quick brown fox, " * 300_000
    bodies += [
        LimitBody("/v1/chat/completions", "whole", json.dumps({**CHAT, "user": text, "unknown": 1}).encode()),
        LimitBody("/v1/chat/completions", "without effect", json.dumps({**CHAT, "tags": [[]] * 120_000}).encode()),
        LimitBody("/v1/completions", "whole", json.dumps({"model": "fake", "prompt": [text]}).encode()),
        LimitBody(
            "/v1/messages", "whole", json.dumps({"model": "fake", "max_tokens": 1, "messages": _says(text)}).encode()
        ),
        LimitBody("/v1/responses", "whole", json.dumps({"model": "fake", "input": _says(text)}).encode()),
        LimitBody("/tokenize", "whole", json.dumps({"model": "fake", "messages": _says(text)}).encode()),
    ]
    ids = json.dumps([40 + place % 300 for place in range((1 << 20) - 40)]).encode()
    bodies += [
        LimitBody("/v1/completions", "ids", b'{"model": "fake", "max_tokens": 2, "prompt": [%b]}' % ids),
        LimitBody("/detokenize", "ids", b'{"model": "fake", "tokens": %b}' % ids),
    ]
    for each in bodies:
        for _ in range(3):
            before, faults_before = system.router.call(_used)
            begun = time.monotonic()
            system.router.request("POST", each.route, each.data)
            beside = 0.02 * (time.monotonic() - begun)  # what the loop does without requests
            after, faults_after = system.router.call(_used)
            spent = after - before - beside
            if spent >= MOST_CPU_S * slowness:
                spent -= (faults_after - faults_before) * _fault_s()
            if spent < MOST_CPU_S * slowness:
                break
        else:
            slow.append((round(spent, 4), each.route, each.name))
    assert not slow, "\n".join(map(str, sorted(slow)[::-1]))


def _says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CHAT = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "quick", "unknown": None},
        {"role": "user", "content": [{"type": "text", "text": "brown"}, {"type": "text", "text": "fox"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "dog", "tool_call_id": "c"},
        {"role": "user", "content": "lazy"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "max_tokens": 3,
    "return_token_ids": True,
}
ITEMS = [
    {"role": "user", "content": "quick", "unknown": None},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "dog"},
]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "dog"}
TURNS = [
    {"role": "user", "content": "quick"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}] * 600},
    {"role": "user", "content": [RESULT] * 600},
]
SAME: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "tool", "content": "x"}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x", "wrong": 1}]}),
    ("/v1/completions", {"model": "fake", "prompt": ["quick", "fox", "naïve"], "echo": True, "max_tokens": 3}),
    ("/v1/completions", {"model": "fake", "prompt": [[40, 41], [42]], "echo": True, "max_tokens": 3}),
    ("/v1/completions", {"model": "fake", "prompt": ["x" * 9000], "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": TURNS}),
    ("/v1/responses", {"model": "fake", "input": ITEMS, "instructions": "be brief", "max_output_tokens": 3}),
    ("/v1/responses", {"model": "fake", "input": [*ITEMS, {"role": "user", "content": 1}]}),
    ("/tokenize", {"model": "fake", "messages": CHAT["messages"], "return_token_strs": True}),
    ("/tokenize", {"model": "fake", "prompt": "naïve café"}),
    ("/detokenize", {"model": "fake", "tokens": [40, 41, 42]}),
]


def test_the_processes_answer_as_the_loop_does(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    system = make_system(router={"tool_parser": "hermes"}, context_len=4096, num_pages=4096, template=TEMPLATE).up()
    ask = partial(system.router.request, "POST")
    inside = [ask(route, body) for route, body in SAME]
    assert {status for status, _, _ in inside} == {200, 400}
    monkeypatch.setattr(bodies, "SMALL_VALUES", 0)
    outside = [ask(route, body) for route, body in SAME]
    work = system.router.router.api.side_work
    pids = [process.pid for process in work._all]  # type: ignore[attr-defined]
    assert any(pids), "a process has done it"
    for (route, _), one, other in zip(SAME, inside, outside, strict=True):
        assert _plain(one) == _plain(other), route


def test_the_processes_know_the_bodies_of_all_routes() -> None:
    bodies = {route.body for route in ROUTES if route.body is not None}
    assert set(BODIES.values()) == bodies


def _plain(answer: tuple[int, Any, Any]) -> tuple[int, Any]:
    status, body, _ = answer
    left_out = ("id", "created", "created_at", "output", "usage")
    return status, {name: value for name, value in body.items() if name not in left_out}
