"""Text to token ids and back over HTTP."""

from __future__ import annotations

from ..conftest import System

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
