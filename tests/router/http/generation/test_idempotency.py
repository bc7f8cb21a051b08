"""`Idempotency-Key` gives a repeated request its seed, and an answer can be continued from tokens that arrived."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any

import pytest

from baton.metadata.errors import RequestError
from baton.metadata.wire import messages as m
from baton.metadata.wire.request import unpack_ids
from baton.router.http.generation.idempotency import MAX_LEN, SEED_HEADER, keyed_seed

from ...conftest import System
from ...dispatching.test_runner import own


def ask(system: System, key: str | None, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any, str | None]:
    """Return status, body and seed of an answer."""
    address = urllib.parse.urlsplit(system.router.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Idempotency-Key": key})
    try:
        connection.request("POST", path, json.dumps({"model": "fake", **prompt, **fields}), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.getheader(SEED_HEADER)
    finally:
        connection.close()


def sent(system: System) -> list[m.Prefill]:
    return own(system.cluster.by_name("p0"), m.Prefill)


def test_a_key_makes_the_seed_and_the_answer_names_it(system: System) -> None:
    first, again, other, bare = (ask(system, key, max_tokens=5) for key in ("a", "a", "b", None))
    assert first[0] == 200 and first[2] is not None
    assert first[2] == again[2] != other[2] and bare[2] is None
    assert ask(system, "a", max_tokens=6)[2] != first[2], "another body"
    assert ask(system, "a", max_tokens=5, seed=7)[2] == "7"
    seeds = [message.request.params.seed for message in sent(system)]
    assert [str(seed) for seed in seeds[:3]] == [first[2], again[2], other[2]]
    assert ask(system, "a", "/v1/chat/completions", max_tokens=5)[2] is not None


def test_tenants_keys_and_bodies_are_not_mixed_up() -> None:
    seeds = {
        keyed_seed(key, tenant, body) for key, tenant, body in [("a", "b", b"c"), ("ab", "", b"c"), ("a", "", b"bc")]
    }
    assert len(seeds) == 3 and all(0 <= seed < 2**62 for seed in seeds)


@pytest.mark.parametrize("key", ["", "x" * (MAX_LEN + 1), "a\tb", "\u00e9"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(RequestError, match="1 to 255, all printable ASCII"):
        keyed_seed(key, "t", b"")


def test_an_answer_continues_after_tokens_that_the_client_has(system: System) -> None:
    fields = {"max_tokens": 8, "return_token_ids": True, "seed": 3}
    whole = ask(system, None, **fields)[1]
    ids, text = whole["choices"][0]["token_ids"], whole["choices"][0]["text"]
    for num_received in (1, 5):
        status, body, _ = ask(system, None, received_token_ids=ids[:num_received], **fields)
        assert status == 200, body
        choice = body["choices"][0]
        assert choice["token_ids"] == ids[num_received:] and text.endswith(choice["text"]) and choice["text"]
        assert body["usage"]["completion_tokens"] == len(ids)
        assert unpack_ids(sent(system)[-1].request.received_ids) == ids[:num_received]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 2}, "it has 2 tokens, and max_tokens is 2"),
        ({"n": 2}, "n must be 1"),
        ({"echo": True}, "echo false"),
        ({"prompt": ["a", "b"]}, "there are 2 prompts"),
        ({"received_token_ids": [1 << 30]}, "is out of range; the vocabulary has"),
        ({"stop_token_ids": [6]}, "its last token, 6, ends the output"),
    ],
)
def test_output_that_cannot_go_on_is_refused(fields: dict[str, Any], words: str, system: System) -> None:
    status, body, _ = ask(system, None, **{"received_token_ids": [5, 6], "max_tokens": 9, **fields})
    assert status == 400 and words in body["error"]["message"], body
