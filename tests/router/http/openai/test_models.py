"""The models that are served."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from ...conftest import System
from ...dispatching.test_runner import wait_until
from ...fake_nodes import TEMPLATE, FakeCluster


def test_models_are_listed_and_found_by_name(system: System) -> None:
    _, listed, _ = system.router.request("GET", "/v1/models")
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 512)
    assert system.router.request("GET", "/v1/models/fake")[:2] == (200, model)
    for name in ("other", "a/path", "fake%2Fmore"):
        status, body, _ = system.router.request("GET", f"/v1/models/{name}")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "not_found", "model")


def test_anthropics_client_lists_models(system: System) -> None:
    with anthropic.Anthropic(base_url=system.router.url, api_key="none", max_retries=0) as client:
        page = client.models.list()
        assert [model.id for model in page] == ["fake"] == [page.first_id] and page.has_more is False
        model = client.models.retrieve("fake")
        assert (model.type, model.display_name, model.lifecycle) == ("model", "fake", "active")


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


def test_tokenize_and_detokenize(system: System) -> None:
    ids = system.tokenizer.inner.encode("héllo").ids
    status, body, _ = system.router.request("POST", "/tokenize", {"model": "fake", "prompt": "héllo"})
    assert (status, body["tokens"], body["count"], body["max_model_len"]) == (200, ids, len(ids), 512)
    status, body, _ = system.router.request("POST", "/detokenize", {"tokens": ids})
    assert (status, body["prompt"]) == (200, "héllo")
    status, body, _ = system.router.request("POST", "/detokenize", {"tokens": [9999]})
    assert (status, body["error"]["param"]) == (400, "tokens")
    status, body, _ = system.router.request("POST", "/tokenize", {"messages": CHAT["messages"]})
    assert system.tokenizer.decode(body["tokens"]).startswith("<|im_start|>user")
    assert system.router.request("POST", "/tokenize", {})[0] == 400
    status, body, _ = system.router.request("POST", "/tokenize", {"prompt": "x" * 1_000_000})  # would take seconds
    assert (status, body["error"]["param"]) == (400, "prompt")


def test_a_tokenizer_is_described_under_the_names_of_hugging_face(system: System) -> None:
    status, body, _ = system.router.request("GET", "/tokenizer_info")
    assert (status, body) == (
        200,
        {
            "model": "fake",
            "model_max_length": 512,
            "vocab_size": 420,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": None,
            "unk_token": None,
            "bos_token_id": 0,
            "eos_token_ids": [1],
            "chat_template": TEMPLATE,
        },
    )


@pytest.fixture
def other(system: System, tokenizer_file: bytes) -> Iterator[FakeCluster]:
    """A second model of the same router."""
    address, script = system.router.router.node_address, system.cluster.script
    cluster = FakeCluster(address, script, tokenizer=tokenizer_file, model="org/other", context_len=256)
    for role in ("prefill", "decode"):
        cluster.add(role, f"other-{role}")
    wait_until(lambda: len(system.router.request("GET", "/v1/models")[1]["data"]) == 2)
    yield cluster
    cluster.close()


def test_one_of_several_tokenizers_must_be_named(system: System, other: FakeCluster) -> None:
    for name, context_len in (("fake", 512), ("org/other", other.context_len)):
        status, body, _ = system.router.request("GET", f"/tokenizer_info?model={name}")
        assert (status, body["model"], body["model_max_length"]) == (200, name, context_len)
    status, body, _ = system.router.request("GET", "/tokenizer_info")
    assert (status, body["error"]["param"]) == (400, "model")
    assert body["error"]["message"] == "model: must be named; served are: fake, org/other"
    status, body, _ = system.router.request("GET", "/tokenizer_info?model=missing")
    assert (status, body["error"]["param"]) == (404, "model")
