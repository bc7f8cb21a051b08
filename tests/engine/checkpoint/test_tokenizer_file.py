"""A tokenizer made of tiktoken.model gives the ids that the published program gives, without running it."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from node_pair import node_pairs, params
from tokenizers import models, pre_tokenizers, trainers

from baton.engine.checkpoint.model_card import read_card
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.tokenizer_file import tokenizer_bytes
from baton.metadata.errors import ModelError

WORDS = (  # the published pattern
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "She'LL say it's 12345 o'clock; we've 3.5 of 10 left.\r\n\r\n  def f(x):\n\treturn x  ",
    "月亮出来了。한글 문장입니다. これはテストです。漢字カナ混じり文",
    "Привет, мир! Ça va? Größe ŞİĞ ﬁ Ǆ ǅ ʰ é e\u0301 नमस्ते สวัสดี שלום مرحبا 😀👩‍👩‍👧 \u2028\u00a0x",
    "the theme of there then thesis: thethethe",
)
NAMED = {1: ("[EOS]", True), 3: ("<|im_user|>", True), 4: ("<think>", False)}  # by their place behind the ranks
NUM_SPECIAL = 8


@cache
def learned() -> tuple[bytes, ...]:
    """Return the tokens of a small vocabulary by rank. Bytes come first, in no order. The last one is no sum of two."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=440, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(table[character] for character in text) for text, _ in by_id]
    random.Random(1).shuffle(tokens[:256])
    return (*tokens, b" zqxj")


def write(directory: Path, **config: Any) -> Path:
    """Write the files of a tokenizer as they are published."""
    directory.mkdir(exist_ok=True)
    ranks = learned()
    lines = (b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    fields = {"model_type": "kimi_k2", "vocab_size": len(ranks) + NUM_SPECIAL} | config
    (directory / "config.json").write_text(json.dumps(fields))
    named = {str(len(ranks) + i): {"content": text, "special": special} for i, (text, special) in NAMED.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(tokenizer_bytes(write(tmp_path_factory.mktemp("kimi") / "model")))


def expected(text: str) -> list[int]:
    """Return the ids as tiktoken describes them: words, whole words first, then the pair of the lowest rank."""
    ranks = {token: rank for rank, token in enumerate(learned())}
    names = {name: len(ranks) + i for i, (name, _) in NAMED.items()}
    found: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, names)) + ")", text):
        if part in names:
            found.append(names[part])
            continue
        for word in regex.findall(WORDS, part, regex.V1):
            found += _merged(word.encode(), ranks)
    return found


def _merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        if not pairs or min(pairs) == len(ranks):
            return [ranks[part] for part in parts]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def texts(count: int) -> Iterator[str]:
    yield from TEXTS
    random_ = random.Random(0)
    pieces = [*"".join(TEXTS), " ", "\n", *(name for name, _ in NAMED.values()), " zqxj", " zqxjk"]
    pieces += [chr(random_.randrange(0xD800)) for _ in range(200)]
    for _ in range(count):
        yield "".join(random_.choices(pieces, k=random_.randrange(1, 30)))


def test_every_id_is_that_of_the_published_program(made: tokenizers.Tokenizer, tmp_path: Path) -> None:
    assert tokenizer_bytes(write(tmp_path / "linear", model_type="kimi_linear")).decode() == made.to_str()
    for text in texts(300):
        ids = made.encode(text).ids
        assert ids == expected(text), text
        assert made.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_ids_behind_the_ranks(made: tokenizers.Tokenizer) -> None:
    first = len(learned())
    assert made.get_vocab_size() == first + NUM_SPECIAL
    assert made.encode(f"a<think>b[EOS]<|reserved_token_{first}|>").ids[1::2] == [first + 4, first + 1]
    assert made.token_to_id(f"<|reserved_token_{first + 7}|>") == first + 7
    assert made.decode([first + 1, first + 4, first]) == "<think>", "those that are not special stay in a text"


def test_a_pair_of_nodes_serves_such_a_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its grammars too."""
    directory = write(tmp_path / "model")
    source = checkpoint("deepseek_v3", vocab_size=len(learned()) + NUM_SPECIAL)
    fields = json.loads((source / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "model.safetensors").symlink_to(source / "model.safetensors")
    end = len(learned()) + 1
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    card = read_card(directory, read_model_config(directory), "kimi", 512)
    with node_pairs() as start:
        pair = start(directory, prefill={"page_size": 4}, decode={"page_size": 4})
        pair.submit("r", expected("the moon"), params(20, grammar='start: "there" | "theme"', stop_ids=(end,)))
        ids = pair.run()["r", 0].ids
    made = tokenizers.Tokenizer.from_buffer(tokenizer_bytes(directory))
    assert made.decode(ids) in ("there", "theme") and card.eos_token_ids == (end,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, r"has tiktoken\.model and no tokenizer\.json, and Baton knows the words of kimi_k2"),
        ({"tiktoken.model": b"YQ== 0\nYg==\n"}, "is no list of tokens and ranks"),
        ({"tiktoken.model": b"YQ== 0\nYg== 2\n"}, "is no list of tokens and ranks"),
        ({"tiktoken.model": b"YQ== 0\n"}, "lacks a byte or has a token twice"),
        ({"tiktoken.model": None}, r"has no tokenizer\.json"),
    ],
)
def test_refusals_name_the_file(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    ranks = change.pop("tiktoken.model", ...)
    path = write(tmp_path / "model", **change) / "tiktoken.model"
    if ranks is None:
        path.unlink()
    elif ranks is not ...:
        path.write_bytes(ranks)
    with pytest.raises(ModelError, match=words):
        tokenizer_bytes(path.parent)


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    (directory / "tokenizer.json").write_bytes(b"{}")
    assert tokenizer_bytes(directory) == b"{}"
