"""A small model that says one text, whatever the prompt is, if the prompt ends with ">" and sampling is greedy.

Its layers write nothing to the residual stream, so the logits depend on the last token alone. The output matrix makes
each token of the text the answer to the token before it. So that no token has two answers, the text is divided into
pieces that all differ, and each piece gets a token of its own.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from checkpoints import END, make_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

LEAD = 20.0  # logits of the right tokens are about eight times this


def make_speaker(path: Path, text: str, template: str) -> Path:
    """Write a float32 llama that says `text` after prompts that `template` makes, and return `path`."""
    make_checkpoint(path, vocab_size=1024, max_position_embeddings=2048)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    first = max(vocab.values()) + 1
    pieces = _pieces(text, set(vocab))
    vocab |= {piece: first + index for index, piece in enumerate(pieces)}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (start,) = Tokenizer.from_str(json.dumps(tokenizer)).encode(">").ids
    chain = [start, *range(first, first + len(pieces)), vocab[END]]
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=-1)
    tensors["model.embed_tokens.weight"] = embedding
    head = torch.zeros_like(tensors["lm_head.weight"])
    for before, after in pairwise(chain):
        head[after] += LEAD * embedding[before]
    tensors["lm_head.weight"] = head
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def _pieces(text: str, taken: set[str]) -> list[str]:
    """Divide a text into pieces that differ from each other and from the tokens that there are, in the characters that
    stand for bytes in a byte-level vocabulary."""
    (split,) = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)]
    left = "".join(piece for piece, _ in split)
    pieces = list[str]()
    while left:
        length = next(size for size in range(2, len(left) + 1) if left[:size] not in taken)
        pieces.append(left[:length])
        taken.add(left[:length])
        left = left[length:]
    return pieces
