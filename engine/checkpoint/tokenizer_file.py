"""The tokenizer of a checkpoint, as the contents of tokenizer.json: the file itself, or made of tiktoken.model.

tiktoken.model has a token and its rank per line. A text is cut into words by a pattern. The bytes of a word are merged
pair by pair, the pair that makes the token of the lowest rank first, unless the whole word is a token. Pattern and
special tokens are in a program of the checkpoint, which is never run: `_PATTERNS` has them by model type.

BPE of the tokenizers library merges pairs that are listed. All pairs that make a token are listed here, in the order of
its rank. At most one of them can ever lie side by side: bytes that lie between the same two borders are merged in the
same order, whatever is around them.
"""

from __future__ import annotations

import base64
import binascii
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ...metadata.errors import ModelError
from .config_file import ConfigFile
from .model_files import RANKS, TOKENIZER

_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        + _ENDING,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        + _ENDING,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_PATTERNS = {
    "kimi_k2": _KIMI,
    "kimi_k25": _KIMI,
    "kimi_linear": _KIMI,
}  # by model_type, of the whole or of its text model
_Special = tuple[str, bool]  # an added token, and whether texts leave it out


def has_tokenizer(model_dir: Path) -> bool:
    """Return whether the directory has a tokenizer in one of the two formats."""
    return (model_dir / TOKENIZER).is_file() or (model_dir / RANKS).is_file()


def tokenizer_bytes(model_dir: Path) -> bytes:
    """Return the contents of tokenizer.json. Raises ModelError if there is none and none can be made."""
    path = model_dir / TOKENIZER
    if path.is_file():
        return path.read_bytes()
    if not has_tokenizer(model_dir):
        raise ModelError(f"{model_dir} has no {TOKENIZER}: save the model's fast tokenizer there (save_pretrained)")
    config = ConfigFile(model_dir / "config.json")
    pattern = next((_PATTERNS[each] for each in (config.model_type, config.whole_type) if each in _PATTERNS), None)
    if pattern is None:
        raise ModelError(
            f"{model_dir} has {RANKS} and no {TOKENIZER}, and Baton knows the words of {', '.join(_PATTERNS)} alone,"
            f" not those of {config.model_type}; make {TOKENIZER} in an environment that trusts the checkpoint"
        )
    ranks = _read_ranks(model_dir / RANKS)
    specials = _specials(model_dir / "tokenizer_config.json", len(ranks), config.integer("vocab_size"))
    return _made(ranks, pattern, specials)


def _read_ranks(path: Path) -> tuple[bytes, ...]:
    """Return the tokens in the order of their ranks, which are their ids."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        found = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
        tokens = tuple(found[rank] for rank in range(len(lines)))
    except (OSError, ValueError, KeyError, binascii.Error) as error:
        raise ModelError(f"{path} is no list of tokens and ranks ({error!r}); copy the checkpoint again") from None
    if len(set(tokens)) != len(tokens) or not {bytes([byte]) for byte in range(256)}.issubset(tokens):
        raise ModelError(f"{path} lacks a byte or has a token twice; copy the checkpoint again")
    return tokens


def _specials(path: Path, first: int, vocab_size: int) -> tuple[_Special, ...]:
    """Return the special tokens, whose ids follow those of the ranks. Ids without a name are reserved."""
    fields: Any = json.loads(path.read_bytes()) if path.is_file() else {}
    named = cast(dict[str, Any], fields.get("added_tokens_decoder") or {})
    found: list[_Special] = []
    for token_id in range(first, vocab_size):
        entry = named.get(str(token_id)) or {}
        found.append((entry.get("content", f"<|reserved_token_{token_id}|>"), entry.get("special", True)))
    return tuple(found)


@lru_cache(maxsize=1)  # a node asks several times
def _made(tokens: tuple[bytes, ...], pattern: str, specials: tuple[_Special, ...]) -> bytes:
    """Return a tokenizer.json."""
    alphabet = _characters()
    known = {token: "".join(alphabet[byte] for byte in token) for token in tokens}
    merges = [
        (known[token[:cut]], known[token[cut:]])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    vocab = {text: token_id for token_id, text in enumerate(known.values())}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_tokens([tokenizers.AddedToken(text, normalized=False, special=special) for text, special in specials])
    return made.to_str().encode()


def _characters() -> list[str]:
    """Return the character that stands for each byte: itself if it is printable, else one of those behind 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(each) for each in alphabet if ord(each) < 256}
    others = iter(alphabet[len(printable) :])
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
