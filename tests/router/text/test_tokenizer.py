"""Tokenizer files from nodes, and chat templates."""

from __future__ import annotations

import zlib

import pytest
import xxhash
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from baton.metadata.errors import ProtocolError
from baton.router.text.tokenizer import TextTokenizer


def test_a_compressed_tokenizer_is_read_and_damage_is_refused(tokenizer_file: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(tokenizer_file)
    packed = zlib.compress(tokenizer_file)
    assert TextTokenizer.from_compressed(packed, digest).is_byte_level
    for damaged in (b"", b"junk", packed[:-20], zlib.compress(b"{}"), zlib.compress(tokenizer_file + b" ")):
        with pytest.raises(ProtocolError, match="tokenizer"):
            TextTokenizer.from_compressed(damaged, digest)
    nonsense = b'{"model": 5}'
    with pytest.raises(ProtocolError, match=r"tokenizer\.json"):
        TextTokenizer.from_compressed(zlib.compress(nonsense), xxhash.xxh3_128_hexdigest(nonsense))


def test_grammars_name_the_tokens_by_id_that_llguidance_calls_special(tokenizer_file: bytes) -> None:
    inner = Tokenizer.from_buffer(tokenizer_file)
    inner.add_tokens([AddedToken(text, special=False) for text in ("<think>", "[CALL]", "< |", "|>")])
    inner.add_special_tokens([AddedToken("[END]", special=True)])
    named = TextTokenizer(inner.to_str().encode()).grammar_ids
    vocabulary = LLTokenizer(inner.to_str())
    special = {token_id for token_id in range(inner.get_vocab_size()) if vocabulary.is_special_token(token_id)}
    assert special == {*named.values(), inner.token_to_id("ÿ")}, "its mark of a special token is the byte 255"
    assert {"<think>", "[END]"} < named.keys() and "[CALL]" not in named


async def test_encoding_and_decoding_give_the_text_back(tokenizer: TextTokenizer) -> None:
    text = "naïve café " * 100
    ids = await tokenizer.encode(text, add_special_tokens=True)
    assert ids == tokenizer.inner.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_the_end_of_a_text_keeps_the_special_tokens_that_are_added(
    tokenizer_file: bytes, add_special_tokens: bool
) -> None:
    inner = Tokenizer.from_buffer(tokenizer_file)
    special = [("<s>", 0), ("</s>", 1)]
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer = TextTokenizer(inner.to_str().encode())
    text = "<|im_start|>user naïve café, twice</s> or more"
    whole = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
    for num_kept in range(3, len(whole) + 3):
        inner.enable_truncation(num_kept, direction="left")
        expected = inner.encode(text, add_special_tokens=add_special_tokens).ids
        assert await tokenizer.encode_end(text, num_kept, add_special_tokens=add_special_tokens) == expected
        assert (expected == whole) == (num_kept >= len(whole))
    for num_kept in (1, 2):  # the special tokens alone fill these
        ids = await tokenizer.encode_end(text, num_kept, add_special_tokens=add_special_tokens)
        assert ids == ([0, 1] if add_special_tokens else whole)[-num_kept:]
