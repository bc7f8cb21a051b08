"""Evaluate a model directory: print bits per byte on held-out files, and sample completions.

python -m baton.deploy.demo.training.evaluate --model DIR --device auto
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from .corpus import (
    ASSISTANT,
    END_OF_TEXT,
    END_OF_TURN,
    SPECIAL_TOKENS,
    SourceFile,
    read_corpus,
    render_chat,
    standard_library,
)
from .model import Llama, load_model

PROMPTS = (
    END_OF_TEXT + '"""A small stack machine."""\n\nimport ',
    "def read_json(path):\n",
    "class Counter:\n    def __init__(self):\n        self.counts = {}\n\n    def add(self, ",
    "    for name in sorted(os.listdir(path)):\n        if name.endswith('.py'):\n",
    "import unittest\n\nclass QueueTest(unittest.TestCase):\n    def test_empty(self):\n",
    END_OF_TEXT + render_chat([("user", "Write a function to return the absolute path of a file.")]) + ASSISTANT,
)


@torch.no_grad()
def bits_per_byte(model: Llama, documents: Sequence[tuple[list[int], int]], context_len: int, stride: int) -> float:
    """Code length of `documents`, each (token ids after an end-of-text token, bytes of text), divided by their bytes.

    Each document is read alone, from its first token, in windows of `context_len` tokens that advance by `stride`; a
    token is scored in the first window that holds it, so it has at least context_len - stride tokens of context, or
    all that there are. The end-of-text token before the document is given, the one after it is not scored.
    """
    total_nats = torch.zeros((), dtype=torch.float64)
    for input_ids, _ in documents:
        tokens = torch.tensor(input_ids, device=model.model.embed_tokens.weight.device)
        scored_end = 1  # tokens [1, scored_end) are scored; token 0 is given
        for start in range(0, len(input_ids) - 1, stride):
            window = tokens[start : start + context_len + 1]
            if start + len(window) <= scored_end:
                break
            logits = model(window[None, :-1])[0, scored_end - start - 1 :].float()
            nats = F.cross_entropy(logits, window[scored_end - start :], reduction="sum")
            total_nats += nats.double().cpu()
            scored_end = start + len(window)
    return total_nats.item() / math.log(2) / sum(num_bytes for _, num_bytes in documents)


def encode_documents(tokenizer: Tokenizer, files: Iterable[SourceFile]) -> list[tuple[list[int], int]]:
    """(token ids after an end-of-text token, bytes of text) of each file."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    return [([end_of_text, *tokenizer.encode(file.text).ids], file.num_bytes) for file in files]


@torch.no_grad()
def complete(model: Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int, temperature: float) -> str:
    """Continue `prompt` by up to `max_tokens` tokens or to an end token; temperature 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(0)
    ends = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)}
    input_ids = tokenizer.encode(prompt).ids
    num_prompt = len(input_ids)
    device = model.model.embed_tokens.weight.device
    while len(input_ids) - num_prompt < max_tokens:
        window = torch.tensor([input_ids[-model.config.context_len :]], device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        input_ids.append(token)
        if token in ends:
            break
    return tokenizer.decode(input_ids[num_prompt:], skip_special_tokens=False)


def pick_device(name: str) -> torch.device:
    """The device of this name; "auto" is cuda where there is one, else cpu."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def report(folder: Path, source: Path, held_out_fraction: float, max_files: int | None, device: torch.device) -> None:
    """Print bits per byte of the weights in `folder` on the held-out files, and the sample completions."""
    torch.manual_seed(0)
    model = load_model(folder).to(device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    context_len = model.config.context_len
    held_out = read_corpus(source, held_out_fraction, max_files).held_out
    groups = {
        "all held-out files": held_out,
        "  library": [file for file in held_out if not file.is_test],
        "  tests": [file for file in held_out if file.is_test],
    }
    for name, files in groups.items():
        documents = encode_documents(tokenizer, files)
        if documents:
            num_bytes, num_tokens = sum(n for _, n in documents), sum(len(ids) - 1 for ids, _ in documents)
            bits = bits_per_byte(model, documents, context_len, stride=max(1, context_len // 4))
            print(f"{name}: {bits:.4f} bits per byte ({len(files)} files, {num_bytes} bytes, {num_tokens} tokens)")
    for prompt in PROMPTS:
        for temperature in (0.0, 0.7):
            text = complete(model, tokenizer, prompt, min(160, context_len // 2), temperature)
            print(f"--- temperature {temperature}\n{prompt}⟦{text}⟧")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--source", type=Path, default=standard_library(), help="folder of the standard library")
    parser.add_argument("--held-out-fraction", type=float, default=0.02)
    parser.add_argument("--max-files", type=int, default=None)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    report(options.model, options.source, options.held_out_fraction, options.max_files, device)


if __name__ == "__main__":
    main()
