"""Grammars for tests, and what they allow, found one token at a time by llguidance alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import llguidance
import numpy as np
import torch
from torch import Tensor

from baton.metadata.wire.request import SamplingParams

EOS = 0  # of random checkpoints

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "tag": {"enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
OBJECT = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
LETTERS = llguidance.LLMatcher.grammar_from_regex(r"([a-f]{1,3} )+")
WORDS = llguidance.LLMatcher.grammar_from_regex(r"[a-e]{2,4}( [0-9]{1,3}){0,4}")
BUDGET = 6  # tokens of thoughts before CLOSE
CLOSE = 7  # of random checkpoints: '


def thoughts(close: int, item: str, answer: str = "<[*]>*") -> str:
    """Return the grammar of at most BUDGET tokens, the token `close`, and an answer. `item`: the Lark form of `close`.
    The answer may be anything unless it is given."""
    return f"start: thoughts answer\nthoughts: <[^{EOS},{close}]>{{0,{BUDGET}}} {item}\nanswer: {answer}"


THOUGHTS = thoughts(CLOSE, '"\'"')
THOUGHTS_AND_OBJECT = thoughts(CLOSE, '"\'"', f"%json {json.dumps(SCHEMA)}")


@cache
def tokenizer(model: Path, vocab_size: int) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(str(model / "tokenizer.json"), n_vocab=vocab_size, eos_token=EOS)


def allowed(model: Path, params: SamplingParams, ids: Sequence[int], vocab_size: int) -> Tensor:
    """Return the mask of each token of a text, [len(ids), num_words] int32: what the grammar allows after the tokens
    before it, without the tokens that would end the text before `min_tokens`, unless they alone are left."""
    assert params.grammar is not None
    masks = np.zeros((len(ids), -(-vocab_size // 32)), np.int32)
    for index in range(len(ids)):
        matcher = llguidance.LLMatcher(tokenizer(model, vocab_size), params.grammar)
        for token_id in ids[:index]:
            assert matcher.consume_token(token_id), (ids, index, matcher.get_error())
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocab_size]
        others = bits.copy()
        if index < params.min_tokens:
            others[list(params.stop_ids)] = 0
        bits = others if others.any() else bits
        assert bits.any(), (ids, index)
        padded = np.zeros(masks.shape[1] * 32, np.uint8)
        padded[:vocab_size] = bits
        masks[index] = np.packbits(padded, bitorder="little").view(np.int32)
    return torch.from_numpy(masks)
