"""Log-probabilities: names and bytes of tokens, joined, are the text, for tokenizers of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import num_examples
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from baton.metadata.wire.request import TokenLogprobs
from baton.router.http.openai.logprobs import LegacyColumns, chat_logprobs
from baton.router.text.detokenizer import TokenBytes, make_detokenizer, skipped_ids
from baton.router.text.tokenizer import TextTokenizer

from ...conftest import RunningRouter, System
from ...fake_nodes import make_tokenizer

CORPUS = [
    "the quick brown fox  jumps over the lazy dog",
    "naïve café über “quotes” 你好",
    "def f(x):\n    return x",
] * 5
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|end of turn|>"]


def unigram(decoder: Any, byte_fallback: bool) -> TextTokenizer:
    """Return a vocabulary as of T5 or Gemma."""
    pieces = sorted(
        {char for text in CORPUS for char in text.replace(" ", "▁")} | {"▁the", "▁quick", "▁▁", "▁na", "qu"}
    )
    vocab = [*((token, 0.0) for token in SPECIAL), *((piece, -2.0 - 1 / len(piece)) for piece in pieces)]
    vocab += [(token, -20.0) for token in BYTES if byte_fallback]
    inner = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never" if byte_fallback else "always")
    inner.decoder = decoder
    inner.add_special_tokens(SPECIAL)
    return TextTokenizer(inner.to_str().encode())


def word_pieces() -> TextTokenizer:
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece(cleanup=False)
    inner.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return TextTokenizer(inner.to_str().encode())


def with_added(data: bytes) -> TextTokenizer:
    inner = tokenizers.Tokenizer.from_buffer(data)
    inner.add_tokens(["<think>", "    ", "\n\n"])
    inner.add_special_tokens(["<|end of turn|>"])
    return TextTokenizer(inner.to_str().encode())


def metaspace_fallback() -> TextTokenizer:
    """Return a vocabulary as newer conversions of Llama 2 and Mistral write it."""
    description = json.loads(make_tokenizer("sentencepiece"))
    inner = tokenizers.Tokenizer.from_str(json.dumps(description))
    inner.normalizer = None
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return with_added(inner.to_str().encode())


GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
TOKENIZERS = {
    "byte-level": with_added(make_tokenizer("byte")),
    "llama 2": with_added(make_tokenizer("sentencepiece")),
    "mistral": metaspace_fallback(),
    "t5": unigram(decoders.Metaspace(), byte_fallback=False),
    "gemma": unigram(GEMMA, byte_fallback=True),
    "bert": word_pieces(),
}


def entries(count: int, tops: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    return [TokenLogprobs(-1.0, tops, tuple(-0.1 * place for place in range(len(tops)))) for _ in range(count)]


def shown(tokenizer: TextTokenizer, prompt: list[int], ids: list[int], *, skip_special: bool) -> str:
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special=skip_special)
    return "".join(map(detokenizer.step, ids)) + detokenizer.flush()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=num_examples(60), deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["the", " quick", "  ", " ", "\n", "naïve", "👩", "你", "x", "<s>", "<|end of turn|>"])
    ),
    prompt=st.sampled_from(["", "the", "<s>", "naïve </s>"]),
    skip_special=st.booleans(),
)
def test_the_bytes_of_all_tokens_are_the_text(name: str, text: list[str], prompt: str, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    before = tokenizer.inner.encode(prompt).ids if prompt else []
    ids = tokenizer.inner.encode("".join(text)).ids
    skipped = skipped_ids(tokenizer, skip_special=skip_special)
    content = chat_logprobs(
        tokenizer, ids, entries(len(ids), (5, 7)), 2, TokenBytes(tokenizer, before, skipped)
    ).content
    expected = shown(tokenizer, before, ids, skip_special=skip_special)
    assert b"".join(bytes(each.bytes) for each in content).decode("utf-8", "replace") == expected
    assert all(each.token for each, token_id in zip(content, ids, strict=True) if token_id in skipped)
    whole = LegacyColumns(tokenizer, 2, TokenBytes(tokenizer, before, skipped)).take(ids, entries(len(ids), (5, 7)))
    for token_id, token, offset, top in zip(ids, whole.tokens, whole.text_offset, whole.top_logprobs, strict=True):
        assert token_id in skipped or token.startswith("bytes:") or expected[offset:].startswith(token)
        assert top is not None and top[token] in (-1.0, 0.0, -0.1)
    columns = LegacyColumns(tokenizer, 2, TokenBytes(tokenizer, before, skipped))
    parts = [columns.take([token_id], entries(1, (5, 7))) for token_id in ids]
    assert [part.text_offset[0] for part in parts] == whole.text_offset
    assert [part.tokens[0] for part in parts] == whole.tokens


def test_tokens_of_sentencepiece_are_named_by_their_text() -> None:
    tokenizer, text = TOKENIZERS["llama 2"], "the naïve 👩 world"
    ids = tokenizer.inner.encode(text).ids
    fragment = tokenizer.inner.token_to_id("<0x9F>")
    content = chat_logprobs(tokenizer, ids, entries(len(ids), (fragment,)), 1).content
    assert b"".join(bytes(each.bytes) for each in content) == text.encode()
    assert not any("▁" in each.token or "<0x" in each.token for each in content)
    assert [(top.token, top.bytes) for top in content[0].top_logprobs] == [("\ufffd", [0x9F])]
    columns = LegacyColumns(tokenizer, 1).take(ids, entries(len(ids)))
    assert "bytes:\\xf0" in columns.tokens and "".join(columns.tokens).startswith("the na")


def test_fragments_of_characters_keep_their_names_and_offsets(tokenizer: TextTokenizer) -> None:
    rivals = tokenizer.inner.encode("😀").ids
    ids = tokenizer.inner.encode("a你b").ids
    fragments = [token_id for token_id in (*ids, *rivals) if "�" in tokenizer.token_text(token_id)]
    assert len(set(fragments)) >= 4, "the tokenizer must split these characters"
    entries = [TokenLogprobs(-3.0, tuple(rivals), tuple(-0.1 * i for i in range(len(rivals)))) for _ in ids]
    whole = LegacyColumns(tokenizer, len(rivals)).take(ids, entries)

    for token_id, token, top in zip(ids, whole.tokens, whole.top_logprobs, strict=True):
        assert (top is not None and top[token] == -3.0) or token_id in rivals
        assert len(top or {}) == len({*rivals, token_id})
    data = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in whole.tokens
    )
    assert data.decode() == "a你b"
    assert whole.text_offset == [0, *[1] * (len(ids) - 2), 2]


def test_a_hidden_token_adds_nothing(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.inner.encode("ab").ids
    last = len(ids) - 1
    content = chat_logprobs(tokenizer, ids, entries(len(ids)), 0, hidden=(last,)).content
    assert content[last].token and content[last].bytes == []
    columns = LegacyColumns(tokenizer, 0)
    columns.take(ids, entries(len(ids)), hidden=(last,))
    assert columns.take(ids, entries(len(ids))).text_offset[0] == len(tokenizer.decode(ids[:last]))


def with_mark(data: bytes, mark: str) -> bytes:
    """Return a tokenizer that writes a special token before each text."""
    inner = tokenizers.Tokenizer.from_buffer(data)
    inner.post_processor = TemplateProcessing(single=f"{mark} $A", special_tokens=[(mark, inner.token_to_id(mark))])
    return inner.to_str().encode()


@pytest.mark.parametrize(("kind", "mark"), [("byte", "<s>"), ("sentencepiece", "</s>")])  # token 1 ends the text
def test_answers_have_the_bytes_of_their_text(make_router: Callable[..., RunningRouter], kind: str, mark: str) -> None:
    """With the prompt echoed or not, and with or without special tokens."""
    data = with_mark(make_tokenizer(kind), mark)
    system = System(make_router(), TextTokenizer(data), data).up()
    try:
        said = system.tokenizer.inner.encode(f"naïve 👩 café{mark}x", add_special_tokens=False).ids
        system.cluster.script = lambda prompt, choice: [*said, 1]
        for more in ({}, {"skip_special_tokens": False}):
            asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 99, "model": "fake", **more}
            chat = {**asked, "messages": [{"role": "user", "content": "hi"}]}
            _, body, _ = system.router.request("POST", "/v1/chat/completions", chat)
            choice = body["choices"][0]
            tokens = choice["logprobs"]["content"]
            assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == choice["message"]["content"]
            assert len(tokens) == len(said) + 1 and all(each["token"] for each in tokens)
            for prompt in ("the quick", system.tokenizer.inner.encode("the quick").ids, mark):
                for fields in ({"echo": True}, {}):
                    _, body, _ = system.complete(prompt=prompt, logprobs=2, **fields, **more)
                    assert_points_into_the_text(body["choices"][0])
    finally:
        system.cluster.close()


def assert_points_into_the_text(choice: dict[str, Any]) -> None:
    """Each token stands at its offset, and the tokens leave no part of the text out."""
    text, columns = choice["text"], choice["logprobs"]
    ends = [*columns["text_offset"][1:], len(text)]
    assert columns["text_offset"][0] == 0
    for token, start, end in zip(columns["tokens"], columns["text_offset"], ends, strict=True):
        assert text[start:end] in ("", token) or token.startswith("bytes:"), (token, text[start:end])
