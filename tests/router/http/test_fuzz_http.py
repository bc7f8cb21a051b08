"""Every request gets an answer in bounded time: an error has the right shape, none is a 500, and nothing is left
behind.

The run is bounded by default; BATON_FUZZ_SECONDS=600 makes a long one. Inputs and answers are counted and printed at
the end.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.router.http.anthropic.types import CountTokensRequest, MessagesRequest
from baton.router.http.bodies.fields import sent_type
from baton.router.http.generation.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from baton.router.http.responses.types import ResponsesRequest
from baton.router.text.tokenizer import TextTokenizer

from ..conftest import RunningRouter, System
from .chats import TEMPLATE

SECONDS = float(os.environ.get("BATON_FUZZ_SECONDS", "0"))
MAX_BODY = 65536
ROUTES = [
    *[("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")],
    *[("POST", path) for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")],
    *[("GET", path) for path in ("/v1/models", "/v1/models/fake", "/health", "/ready", "/metrics", "/openapi.json")],
    *[("GET", path) for path in ("/debug/nodes", "/debug/handoff", "/debug/requests", "/debug/requests/x")],
    ("DELETE", "/v1/requests/x"),
    ("POST", "/admin/nodes/nobody/drain"),
    ("POST", "/admin/nodes/nobody/undrain"),
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, 1e-320]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=20),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
text = st.one_of(st.just("hello"), st.text(max_size=40), st.just("word " * 800))
token_ids = st.lists(st.integers(-1, 430), max_size=20)
tool_name = st.sampled_from(["f", "g", "f", "a b"])
flat_tool = st.fixed_dictionaries({"type": st.just("function"), "name": tool_name}, optional={"parameters": anything})
item = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": text}),
    st.fixed_dictionaries(
        {"type": st.just("reasoning")},
        optional={
            "content": st.lists(st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": text}), max_size=2),
            "summary": anything,
        },
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": st.sampled_from(["a", "b"]),
            "name": tool_name,
            "arguments": st.just("{}") | text,
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": st.sampled_from(["a", "b"]), "output": text | anything}
    ),
    st.fixed_dictionaries({"type": text}),
    anything,
)
tool_call = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["a", "b"]),
        "function": st.fixed_dictionaries({"name": tool_name}, optional={"arguments": text | st.just("{}") | anything}),
    }
)
tool = flat_tool | st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": tool_name}, optional={"parameters": anything, "strict": st.booleans()}
        ),
    }
)
custom_tool = st.fixed_dictionaries({"name": tool_name, "input_schema": anything}, optional={"strict": st.booleans()})
block = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": text}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": st.sampled_from(["a", "b"]), "name": tool_name, "input": st.just({})}
    ),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": st.sampled_from(["a", "b"])}, optional={"content": text}
    ),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": text}, optional={"signature": text}),
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "emperor"])},
    optional={
        "content": text | st.lists(block, max_size=3) | anything,
        "name": text,
        "tool_calls": st.lists(tool_call, max_size=2) | anything,
        "tool_call_id": st.sampled_from(["a", "b"]),
        "refusal": anything,
    },
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "fake", "fake", "other", ""]),
    "prompt": text | token_ids | st.lists(text | token_ids, max_size=3),
    "messages": st.lists(message, max_size=3),
    "tokens": token_ids,
    "n": st.integers(1, 4) | st.just(128),
    "best_of": st.integers(1, 4),
    "max_tokens": st.integers(1, 40) | st.just(511),
    "stop_sequences": st.lists(text, max_size=3),
    "system": text,
    "input": text | st.lists(item, max_size=3),
    "max_output_tokens": st.integers(1, 40),
    "text": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": st.just("json_object")})}),
    "max_completion_tokens": st.integers(1, 40),
    "min_tokens": st.integers(0, 40),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 100),
    "seed": st.integers(-(2**62), 2**62),
    "stop": text | st.lists(text, max_size=3),
    "stop_token_ids": token_ids,
    "logit_bias": st.dictionaries(st.integers(0, 430).map(str), st.floats(-101, 101), max_size=4),
    "logprobs": st.booleans() | st.integers(0, 21),
    "top_logprobs": st.integers(0, 21),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": st.none()}),
    "priority": st.integers(-101, 101),
    "timeout_s": st.floats(0.05, 4000),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=8), anything, max_size=3),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({"name": text, "schema": anything}) | anything},
    ),
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={
            "json": anything,
            "regex": text | st.sampled_from(["a+", "(", "[a-z]{3}"]),
            "choice": st.lists(text, max_size=3) | anything,
            "grammar": text | st.just('start: "a"'),
        },
    ),
    "tools": st.lists(tool, max_size=2) | st.lists(custom_tool, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
    | st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "none", "tool"])}, optional={"name": tool_name})
    | anything,
    "parallel_tool_calls": st.booleans(),
    "reasoning_effort": st.sampled_from(["low", "high"]),
    "thinking": st.fixed_dictionaries(
        {"type": st.sampled_from(["enabled", "adaptive", "disabled"])}, optional={"budget_tokens": st.integers(0, 40)}
    ),
}
needed = {
    "/v1/completions": ("model", "prompt"),
    "/v1/chat/completions": ("model", "messages"),
    "/detokenize": ("tokens",),
    "/v1/messages": ("model", "messages", "max_tokens"),
    "/v1/messages/count_tokens": ("model", "messages"),
    "/v1/responses": ("model", "input"),
}
kinds = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
}


def fields_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of a route: most fields have the right kind, some any kind, and some are unknown."""
    names = [name for name in kinds[path].__struct_fields__ if name not in needed.get(path, ())]
    values = {name: likely.get(name, anything) for name in names}
    sound = st.fixed_dictionaries({name: likely[name] for name in needed.get(path, ())}, optional=values)
    sent = st.sampled_from(sent_type(kinds[path]).__struct_fields__)
    wild = st.dictionaries(sent | st.text(max_size=8), anything, max_size=3)
    return st.builds(
        lambda a, b, is_wild: {**a, **b} if is_wild else a, sound, wild, st.sampled_from([False, False, True])
    )


raw = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda depth, mark: mark * depth, st.integers(1, MAX_BODY), st.sampled_from([b"[", b'{"a":', b"[[],"])),
    st.integers(MAX_BODY - 50, MAX_BODY + 50).map(lambda size: b'{"model":"fake","prompt":"' + b"x" * size + b'"}'),
    st.just(b'{"model":"fake","prompt":"\xff\xfe","max_tokens":3}'),
    st.builds(lambda value, cut: json.dumps(value).encode()[:cut], anything, st.integers(0, 60)),
    anything.map(lambda value: json.dumps(value).encode()),
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "x-request-id": st.text(
            st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=200
        ),
        "Content-Type": st.sampled_from(["application/json", "text/plain", "application/json; charset=utf-16", "x"]),
        "Content-Encoding": st.sampled_from(["identity", "gzip", "deflate", "br", "zstd", "nonsense"]),
        "Authorization": st.sampled_from(["Bearer x", "Basic eDp5", "Bearer", ""]),
        "Expect": st.just("100-continue"),
    },
)
INSIDES = re.compile(
    r"Traceback|\.py\b|baton\.|aiohttp|msgspec|site-packages|tcp://|[Pp]lease install| at 0x[0-9a-f]{8}"
)
requests = st.one_of(
    *[st.tuples(st.just("POST"), st.just(path), fields_of(path), headers) for path in kinds for _ in range(2)],
    st.tuples(st.just("POST"), st.sampled_from(list(kinds)), raw, headers),
    st.tuples(
        st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]), st.sampled_from(ROUTES), raw, headers
    ),
    st.tuples(
        st.sampled_from(["GET", "DELETE"]),
        st.binary(max_size=12).map(lambda tail: f"/v1/{tail.hex()}%{tail.hex()}"),
        st.just(b""),
        headers,
    ),
)


class Target:
    """A router with fake nodes, and counts of its answers."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.answers: Counter[int] = Counter()
        self.slowest_s = 0.0

    def send(self, method: str, path: str, body: Any, given: dict[str, str]) -> None:
        """Send one request on its own connection, and check the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.system.router.url.removeprefix("http://"), timeout=20)
        begun = time.monotonic()
        try:
            connection.request(method, path, data, {name: value.encode("latin-1") for name, value in given.items()})
            response = connection.getresponse()
            answer = response.read()
        except (BrokenPipeError, ConnectionResetError):  # it closed before it had read a body that it will not take
            self.answers[-1] += 1
            return
        finally:
            connection.close()
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
        self.answers[response.status] += 1
        assert response.status != 500, answer
        if response.status >= 400 and method != "HEAD":
            error = json.loads(answer)["error"]
            names = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
            assert set(error) == names, answer
            assert error["message"]
            assert not INSIDES.search(error["message"]), error
        elif response.getheader("Content-Type", "").startswith("text/event-stream"):
            last = answer.strip().split(b"\n\n")[-1].rpartition(b"data: ")[2]
            ends = {"message_stop", "response.completed", "response.incomplete", "response.failed"}
            assert last == b"[DONE]" or "error" in json.loads(last) or json.loads(last)["type"] in ends, last


@pytest.fixture(scope="module")
def target(tokenizer: TextTokenizer, tokenizer_file: bytes) -> Iterator[Target]:
    router = RunningRouter(max_body_bytes=MAX_BODY, max_waiting=512)
    output = [300, 301, 302, 303, 1] * 128
    system = System(router, tokenizer, tokenizer_file, script=lambda prompt, choice: output, template=TEMPLATE)
    system.behaviour.step_tokens = 64
    system.up()
    target = Target(system)
    yield target
    print(
        f"\n{sum(target.answers.values())} requests; answers by status {dict(sorted(target.answers.items()))};", end=" "
    )
    print(f"the slowest took {target.slowest_s:.2f} s")
    system.cluster.close()
    router.close()


def test_random_requests_get_declared_answers(target: Target) -> None:
    @settings(
        max_examples=num_examples(250),  # a batch; a long run makes many
        deadline=None,
        database=None,
        derandomize=not SECONDS,  # a failure must not hide when the test is repeated
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests)
    def send(request: tuple[str, Any, Any, dict[str, str]]) -> None:
        method, path, body, given = request
        if isinstance(path, tuple):
            path = path[1]
        target.send(method, path, body, given)

    begun = time.monotonic()
    while time.monotonic() - begun < max(SECONDS, 0.001):
        send()
    target.system.router.wait_idle(timeout=10)
    assert all(node.is_alive() for node in target.system.cluster.nodes), "a node died of a request"
    status, body, _ = target.system.complete(max_tokens=5)
    assert status == 200, body
    status, ledger, _ = target.system.router.request("GET", "/debug/ledger")
    assert ledger["router"]["requests"] == []
    assert {name: node["requests"] for name, node in ledger["nodes"].items()} == {"p0": [], "d0": []}
    assert not target.system.router.errors
