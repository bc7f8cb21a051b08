"""The HTTP interface, tested on the demo model in real processes. All tests share a cluster and leave it idle."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from cluster import Cluster, held, wait_until
from thinned import is_whole
from ties import Reference
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "deploy" / "demo"
CODE = "import os\n\ndef "
OK = {"model": "demo", "prompt": CODE, "max_tokens": 5}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with JSON logs, whose lines are all checked in the end."""
    directory = tmp_path_factory.mktemp("http")
    with Cluster(directory, DEMO, is_forked=True) as cluster:
        flags = ["--log-format", "json"]
        cluster.start(router_flags=flags, node_flags=[*flags, "--chunk-tokens", "256", "--num-pages", "600"])
        yield cluster
    for path in directory.glob("*.log"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            assert entry["level"] in ("info", "warning"), f"{path.name}: {line}"
            assert "import os" not in line, f"{path.name} shows a prompt: {line}"
            assert "exception" not in entry and entry["event"].count(entry.get("rid", "\n")) == 0, line


@pytest.fixture
def demo(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    wait_until(lambda: not held(shared.ledger()), lambda: f"idle books: {held(shared.ledger())}")
    for name, process in shared.processes.items():
        assert process.popen.poll() is None, f"{name} died\n{process.log}"


@pytest.fixture
def client(demo: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none", max_retries=0)


def whole(client: openai.OpenAI, **fields: Any) -> tuple[dict[int, Any], Any]:
    """Return each choice of a completion, and the usage."""
    answer = client.completions.create(
        model="demo", extra_body={"return_token_ids": True, **fields.pop("extra", {})}, **fields
    )
    choices = {
        choice.index: (
            choice.text,
            choice.finish_reason,
            choice.token_ids,
            choice.logprobs and choice.logprobs.to_dict(),
        )
        for choice in answer.choices
    }
    return choices, answer.usage


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[int, Any], Any]:
    """Return the same as `whole`, joined from the events of a stream."""
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    ids: dict[int, list[int]] = {}
    columns: dict[int, dict[str, list[Any]]] = {}
    usage = None
    extra = {"return_token_ids": True, **fields.pop("extra", {})}
    options = {"include_usage": True}
    for chunk in client.completions.create(
        model="demo", stream=True, stream_options=options, extra_body=extra, **fields
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing comes after the end"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ids.setdefault(choice.index, []).extend(choice.token_ids or [])
            if choice.logprobs is not None:
                for name, values in choice.logprobs.to_dict().items():
                    columns.setdefault(choice.index, {}).setdefault(name, []).extend(values)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return {index: (text, ends[index], ids[index], columns.get(index)) for index, text in texts.items()}, usage


def byte_tokens(tokenizer: Tokenizer) -> dict[str, float]:
    """Return a bias for the bytes of emoji and Chinese characters, which makes valid and invalid UTF-8 likely."""
    return {str(tokenizer.token_to_id(character)): 30 for character in "ðŁĺĢä½ł"}


def test_streamed_equals_whole_with_the_official_client(client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    cases: list[dict[str, Any]] = [
        {"prompt": "😀🎉 你好 世界", "temperature": 1, "n": 2},
        {"prompt": "\x00\x7f é ñ", "temperature": 0},
        *({"prompt": "x", "temperature": 1.5, "seed": s, "logit_bias": byte_tokens(tokenizer)} for s in (1, 2, 3)),
        {"prompt": CODE, "temperature": 1, "seed": 7, "n": 3, "stop": ["\n\n", "):"], "logprobs": 2},
        {"prompt": ["a = 1\n", CODE], "temperature": 0.7, "seed": 9, "n": 2, "echo": True, "logprobs": 3},
        {
            "prompt": CODE + "😀",
            "temperature": 0,
            "echo": True,
            "stop": "path",
            "extra": {"include_stop_str_in_output": True},
        },
        {"prompt": CODE, "temperature": 1, "seed": 3, "max_tokens": 1, "n": 4},
    ]
    for case in cases:
        fields = {"max_tokens": 40, "seed": 5, **case}
        choices, usage = whole(client, **fields)
        assert_equal((choices, usage.completion_tokens), _as_first(streamed(client, **fields), usage))
        if "stop" not in fields and not fields.get("echo"):
            for text, reason, ids, _ in choices.values():
                assert text == tokenizer.decode(ids), fields
                assert reason == "stop" or len(ids) == fields["max_tokens"]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Return the choice with rounded log-probabilities, whose last digits depend on the batch."""
    if isinstance(ours, float) and isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-4)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert_equal(value, theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), (ours, theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert ours == theirs


def _as_first(other: tuple[dict[int, Any], Any], usage: Any) -> tuple[dict[int, Any], int]:
    choices, again = other
    assert again.prompt_tokens == usage.prompt_tokens and again.total_tokens == usage.total_tokens
    return choices, again.completion_tokens


def test_chat_streamed_equals_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Write a loop."}],
        "max_tokens": 40,
        "temperature": 0.9,
        "seed": 7,
        "n": 3,
        "stop": ["\n\n", "):"],
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = client.chat.completions.create(**fields)
    texts, ends, values = dict.fromkeys(range(3), ""), {}, {index: [] for index in range(3)}
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            values[choice.index] += [entry.to_dict() for entry in choice.logprobs.content] if choice.logprobs else []
            ends[choice.index] = choice.finish_reason
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert texts[choice.index] == choice.message.content
        assert ends[choice.index] == choice.finish_reason
        assert_equal(values[choice.index], [entry.to_dict() for entry in choice.logprobs.content])


def test_stop_strings_across_tokens_and_after_min_tokens(client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    (text, _, ids, _), _ = _only(whole(client, prompt=CODE, max_tokens=60, temperature=0))
    ends = [len(tokenizer.decode(ids[: place + 1])) for place in range(len(ids))]
    for stop in (text[3:9], text[20:28], text[10], text[50:70]):
        for min_tokens in (0, 1, 10, 30) if is_whole() else (0, 10):
            fields = {"prompt": CODE, "max_tokens": 60, "temperature": 0, "stop": stop}
            (cut, reason, cut_ids, _), usage = _only(whole(client, **fields, extra={"min_tokens": min_tokens}))
            # the first occurrence that a token completes which is not before min_tokens
            starts = (match.start() for match in re.finditer(f"(?={re.escape(stop)})", text))
            at = next((start for start in starts if _done(ends, start + len(stop)) >= min_tokens), None)
            expected = text if at is None else text[:at]
            assert (cut, reason) == (expected, "length" if at is None else "stop"), (stop, min_tokens)
            assert usage.completion_tokens == len(cut_ids) == (60 if at is None else _done(ends, at + len(stop)))


def _done(ends: list[int], length: int) -> int:
    """Return the number of tokens whose text has this length."""
    return next(place + 1 for place, end in enumerate(ends) if end >= length)


def _only(answer: tuple[dict[int, Any], Any]) -> tuple[Any, Any]:
    return answer[0][0], answer[1]


def test_logprobs_and_echo_are_transformers_own(client: openai.OpenAI) -> None:
    import torch

    reference = Reference(DEMO)
    prompt = "import os\n\ndef main(argv):\n    😀 "
    answer = client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=12,
        temperature=0,
        echo=True,
        logprobs=5,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    ids = [*choice.prompt_token_ids, *choice.token_ids]
    with torch.inference_mode():
        scores = torch.log_softmax(reference.model(torch.tensor([ids])).logits[0].float(), -1)
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None and len(logprobs.token_logprobs) == len(ids)
    for place in range(1, len(ids)):
        assert logprobs.token_logprobs[place] == pytest.approx(float(scores[place - 1, ids[place]]), abs=1e-3)
        best = sorted(logprobs.top_logprobs[place].values(), reverse=True)[:5]
        assert best == pytest.approx(scores[place - 1].topk(5).values.tolist(), abs=1e-3)
    scored = client.completions.create(model="demo", prompt=prompt, max_tokens=0, echo=True, logprobs=5).choices[0]
    num_prompt = len(choice.prompt_token_ids)
    assert (scored.text, scored.finish_reason) == (prompt, "length")
    assert scored.logprobs is not None
    assert scored.logprobs.tokens == (logprobs.tokens or [])[:num_prompt]
    assert scored.logprobs.token_logprobs == pytest.approx(logprobs.token_logprobs[:num_prompt], abs=1e-4)


def test_seeds_are_equal_across_choices_batches_and_restarts(demo: Cluster, client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> list[str]:
        answer = client.completions.create(model="demo", max_tokens=30, temperature=1, seed=42, **fields)
        return [choice.text for choice in answer.choices]

    before = ask(prompt=CODE, n=4)
    assert len(set(before)) == 4
    assert ask(prompt=CODE) == before[:1]
    assert ask(prompt=[CODE, CODE], n=4) == before * 2
    with ThreadPoolExecutor(6) as threads:
        noise = [threads.submit(demo.complete, f"noise {i}", max_tokens=60) for i in range(5)]
        assert ask(prompt=CODE, n=4) == before
    assert all(answer.result()["usage"]["completion_tokens"] for answer in noise)
    for role in ("router", "prefill-0", "decode-0"):
        demo.processes[role].send_signal(15)
        assert demo.processes[role].wait(10) == 0
    flags = ["--log-format", "json", "--num-pages", "600"]
    demo.start_router("--log-format", "json")
    demo.start_node("decode", "decode-0", *flags)
    demo.start_node("prefill", "prefill-0", *flags)
    demo.wait_ready(num_nodes=2)
    assert ask(prompt=CODE, n=4) == before


def test_cached_tokens_are_counted_also_when_a_stop_string_ends_at_once(client: openai.OpenAI) -> None:
    prompt = "value = 1\n" * 40
    (text, _, _, _), usage = _only(whole(client, prompt=prompt, max_tokens=4, temperature=0))
    for fields in ({"stop": text[0]}, {"stop": text[0], "n": 2}, {"max_tokens": 1}, {}):
        usage = whole(client, **{"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})[1]
        assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 32, fields


BAD: list[tuple[bytes, int, str | None]] = [
    (b"{", 400, None),
    (b'{"model": "demo", "prompt": "\xff"}', 400, None),
    (b'{"model": "demo", "prompt": "x", "user": "\xc3\x28"}', 400, None),
    (b'{"model": "demo", "prompt": "\\ud800"}', 400, "prompt"),
    (b'{"model": "demo", "prompt": ' + b"[" * 100_000, 400, "prompt"),
    (b'{"model": "demo", "prompt": ' + b"[" * 200_000, 400, None),
    (b'{"model": "demo", "prompt": "x", "metadata": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", 400, None),
    (b'{"model": "demo", "prompt": "' + b"x" * 10_000_000 + b'"}', 413, None),
    (b'{"model": "demo", "prompt": "' + b"x" * 8_000_000 + b'"}', 400, "prompt"),
    (b'{"model": "demo", "prompt": "x", "temperature": NaN}', 400, "temperature"),
    (b'{"model": "demo", "prompt": "x", "temperature": 1e999}', 400, "temperature"),
    *(
        (b'{"model": "demo", "prompt": "x", %s: %s}' % (json.dumps(field).encode(), b"1" + b"0" * 400), 400, field)
        for field in ("max_tokens", "seed", "temperature", "n", "top_k")
    ),
    (b'{"model": "demo", "prompt": [1%s]}' % (b"0" * 400), 400, "prompt"),
    *(
        (json.dumps({**OK, **fields}).encode(), status, param)
        for fields, status, param in (
            ({"max_tokens": 0}, 400, "max_tokens"),
            ({"max_tokens": -1}, 400, "max_tokens"),
            ({"temperature": -1}, 400, "temperature"),
            ({"model": "other"}, 404, "model"),
            ({"prompt": [4096]}, 400, "prompt"),
            ({"prompt": ""}, 400, "prompt"),
            ({"prompt": [5] * 4096}, 400, "prompt"),
            ({"prompt": [5] * 4000, "max_tokens": 97}, 400, "max_tokens"),
            ({"prompt": "word " * 5000}, 400, "prompt"),
            ({"stop": {"a": 1}}, 400, "stop"),
            ({"n": 0}, 400, "n"),
            ({"logit_bias": {"5": 100.5}}, 400, "logit_bias"),
            ({"no_such_field": 1}, 400, "no_such_field"),
        )
    ),
]


def test_bad_input_is_refused_and_the_system_serves(demo: Cluster) -> None:
    for body, status, param in BAD:
        got, answer = demo.post("/v1/completions", body)
        assert (got, answer["error"]["param"]) == (status, param), (body[:100], answer)
        assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]
        assert param is None or param in answer["error"]["message"]
    for encoding, status in (("gzip", 400), ("br", 415), ("zstd", 415)):
        got, answer = demo.post("/v1/completions", b"{}", headers={"Content-Encoding": encoding})
        assert got == status, answer
    for extreme in (
        {"temperature": 1e-300},
        {"top_p": 1e-300},
        {"min_p": 1},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 100},
        {"logit_bias": dict.fromkeys(map(str, range(4096)), -100)},
        {"stop_token_ids": list(range(128)), "min_tokens": 5},
        {"prompt": [5] * 4095, "max_tokens": 1},
        {"prompt": "a\x00b"},
        {"n": 40},
    ):
        assert demo.complete(**{"prompt": CODE, "max_tokens": 6, **extreme})["choices"], extreme


def test_clients_that_leave_in_any_phase_leave_nothing_behind(demo: Cluster) -> None:
    for is_streaming in (True, False):
        for num_choices, prompt in ((1, [5] * 1200), (6, [7] * 40)):
            for delay_s in (0.0, 0.01, 0.05, 0.3):
                fields = {**OK, "prompt": prompt, "max_tokens": 900, "ignore_eos": True, "n": num_choices}
                body = json.dumps({**fields, "stream": is_streaming}).encode()
                before = demo.num_generated()
                with socket.create_connection(("127.0.0.1", demo.http_port)) as connection:
                    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                    time.sleep(delay_s)
                    if delay_s > 0.02:  # a reset instead of an orderly end
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                wait_until(lambda: not held(demo.ledger()), f"all is free after {delay_s} s of {fields['n']}")
                assert demo.num_generated() - before < 900 * num_choices, "the request was computed to its end"


def test_metrics_are_documented_and_sane(demo: Cluster) -> None:
    demo.complete(CODE, max_tokens=8, ignore_eos=True)
    page = demo.get("/metrics")[1]
    documented = (ROOT / "docs" / "metrics.md").read_text()
    names = set(re.findall(r"(?m)^# TYPE (baton_\w+) ", page))
    for name in names:
        assert f"`{name}`" in documented or _is_of_nodes(name, documented), f"{name} is not in metrics.md"
    values = {key: float(value) for key, value in re.findall(r"(?m)^(baton_\S+) (\S+)$", page)}
    total = sum(books["capacity"]["num_pages"] for books in demo.nodes())
    assert sum(value for key, value in values.items() if key.startswith("baton_node_pages{")) == total
    assert values['baton_requests_total{model="demo",outcome="done"}'] > 0
    for name in ("ttft", "itl", "queue", "transfer", "e2e"):
        assert values[f'baton_{name}_seconds_count{{model="demo"}}'] > 0
        assert 0 <= values[f'baton_{name}_seconds_sum{{model="demo"}}'] < 600
    assert values['baton_transfer_bytes_total{model="demo"}'] > 0
    assert all(value >= 0 for value in values.values())


def _is_of_nodes(name: str, documented: str) -> bool:
    return (
        name.startswith("baton_node_") and f"`{name.removeprefix('baton_node_').removesuffix('_total')}`" in documented
    )


def test_openapi_describes_the_routes_that_are_there(demo: Cluster) -> None:
    status, document = demo.get("/openapi.json")
    assert status == 200 and document["openapi"].startswith("3.1")
    text = json.dumps(document)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method in methods:
            asked = path.replace("{model}", "demo") + ("?once=true" if path == "/live" else "")  # otherwise without end
            got, _ = demo.request(method.upper(), asked, b"{}" if method == "post" else None)
            assert got in ((404,) if "id}" in path or "{file}" in path else (200, 400)), (method, path, got)
    accepted = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert set(OK) <= set(accepted)
    answer = demo.complete(CODE, max_tokens=2)
    assert set(answer) <= set(document["components"]["schemas"]["Completion"]["properties"])


def test_head_requests_and_unknown_routes_are_answered(demo: Cluster) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", demo.http_port, timeout=10)
    connection.request("HEAD", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    assert demo.get("/no/such")[0] == 404
    assert demo.request("DELETE", "/v1/models")[0] == 405


def test_a_request_is_explained_by_spans_that_sum_up(demo: Cluster) -> None:
    """The trace of a request has the chunks, pulls and rounds that real nodes report."""
    prompt = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("explain " + CODE * 150).ids
    rid = demo.complete(prompt, n=2, max_tokens=20, temperature=0, ignore_eos=True)["id"]

    def life() -> dict[str, Any]:
        status, body = demo.get(f"/debug/requests/{rid}")
        assert status == 200, body
        return body["requests"][0]

    def part(name: str, choice: int = 0) -> dict[str, Any]:
        return next((each for each in life()["choices"][choice]["parts"] if each["name"] == name), {})

    wait_until(lambda: "prefill_times" in part("prefill"), lambda: str(life()), 10.0)
    for choice in life()["choices"]:
        assert sum(each.get("seconds", 0.0) for each in choice["parts"]) == pytest.approx(life()["total_s"], abs=1e-9)
        assert sum(each.get("num_tokens", 0) for each in choice["parts"]) == choice["num_tokens"] == 20
    prefill, pull, decode = part("prefill"), part("pull"), part("decode", 1)
    assert prefill["num_prompt"] + prefill.get("num_cached", 0) == len(prompt)
    assert sum(chunk[1] for chunk in prefill["prefill_times"]["chunks"]) == prefill["num_prompt"]
    assert len(prefill["prefill_times"]["chunks"]) >= 2
    assert prefill["prefill_times"]["early_pages"] > 0
    assert (pull["pull_times"]["transport"], pull["num_bytes"] > 0, pull["gb_per_s"] > 0) == ("local", True, True)
    assert 0 < decode["num_steps"] <= decode["num_tokens"] == 19


def test_sampled_tokens_follow_the_softmax(demo: Cluster) -> None:
    """Sampled first tokens (prefill) and second tokens (decode) have the distribution that transformers computes."""
    import torch

    reference = Reference(DEMO)
    prompt = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("class Foo:\n    def __init__(sel").ids
    outputs: list[list[int]] = []
    for seed in range(8):
        answer = demo.complete(
            prompt, n=128, max_tokens=2, temperature=1, seed=seed, return_token_ids=True, ignore_eos=True
        )
        outputs += [choice["token_ids"] for choice in answer["choices"]]
    likeliest = int(reference.logits(prompt).argmax())
    _assert_distribution([ids[0] for ids in outputs], torch.softmax(reference.logits(prompt), -1))
    seconds = [ids[1] for ids in outputs if ids[0] == likeliest]
    _assert_distribution(seconds, torch.softmax(reference.logits([*prompt, likeliest]), -1))


def _assert_distribution(drawn: list[int], probabilities: Any) -> None:
    """Return chi-square over the tokens that are expected five times or more, with all others in one bin."""
    expected = probabilities * len(drawn)
    bins = (expected >= 5).nonzero().flatten().tolist()
    assert len(bins) >= 3, "a prompt with a richer distribution is needed"
    rest = len(drawn) - float(expected[bins].sum())
    chi2 = sum((drawn.count(token) - float(expected[token])) ** 2 / float(expected[token]) for token in bins)
    others = sum(token not in set(bins) for token in drawn)
    chi2 += (others - rest) ** 2 / max(rest, 1.0)
    degrees = len(bins)
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5, (chi2, degrees)
