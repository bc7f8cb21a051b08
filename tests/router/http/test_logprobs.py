"""Log-probabilities as /v1/completions gives them."""

from __future__ import annotations

from baton.metadata.wire.request import TokenLogprobs
from baton.router.http.logprobs import LegacyColumns, chat_logprobs
from baton.router.text.tokenizer import TextTokenizer


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

    pieces = LegacyColumns(tokenizer, len(rivals))
    taken = [pieces.take([token_id], [entry]) for token_id, entry in zip(ids, entries, strict=True)]
    assert [offset for piece in taken for offset in piece.text_offset] == whole.text_offset


def test_chat_gives_every_token_its_bytes(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.inner.encode("a你b").ids
    content = chat_logprobs(tokenizer, ids, [TokenLogprobs(-1.0, (), ()) for _ in ids], 0).content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "a你b"
