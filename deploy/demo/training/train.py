"""Train the demo model on the standard library's source and write it as a Hugging Face model directory.

    python -m baton.deploy.demo.training.train --out DIR              # one GPU, minutes
    python -m baton.deploy.demo.training.train --out DIR --device cpu --steps 5 --max-files 40

corpus.py reads the text, vocabulary.py tokenizes it, the engine's layers (windows.py) and muon.py learn it, evaluate.py
scores it. The model has the sizes of the directory `--like`. Training uses short windows first (`early_context_len`,
for the first `early_share` of the steps) and the full context last. The weights with the best held-out score are
written.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import END_OF_TEXT, Corpus, conversations
from .evaluate import bits_per_byte, encode_documents, report
from .losses import descend, on_device
from .muon import MuonAdamW
from .options import DEMO, config_of, corpus_of, parse, parser_of
from .vocabulary import train_tokenizer
from .weights import fresh, save
from .windows import Model


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers that a run depends on; each field is a flag."""

    steps: int = 5000
    context_len: int = 4096
    early_context_len: int = 1024
    early_share: float = 0.7
    batch_tokens: int = 65536
    matrix_lr: float = 0.03
    other_lr: float = 0.003
    weight_decay: float = 0.1
    dropout: float = 0.15
    warmup_steps: int = 200
    eval_every: int = 500
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run: the model with the best weights, and the mean training loss (nats) at each evaluation."""

    model: Model
    tokenizer: Tokenizer
    corpus: Corpus
    losses: list[float]
    held_out_bits: float | None


def train(options: argparse.Namespace) -> TrainResult:
    """Train and write the model directory `options.out`. Raises ValueError when the text is too short for one batch."""
    recipe, out = config_of(Recipe, options), options.out
    torch.manual_seed(recipe.seed)
    corpus = corpus_of(options)
    chats = conversations(corpus.train)
    fresh(options.like, out, {})
    model = Model(out, options.device, recipe.dropout)
    tokenizer = train_tokenizer((file.text for file in corpus.train), model.config.vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    documents = _encode_documents(tokenizer, [file.text for file in corpus.train] + chats, options.device)
    print(
        f"{len(corpus.train)} files to train on ({sum(f.num_bytes for f in corpus.train) / 1e6:.1f} MB), {len(chats)} "
        f"conversations, {sum(map(len, documents))} tokens; {len(corpus.held_out)} files held out",
        flush=True,
    )
    losses, held_out_bits = _fit(model, documents, encode_documents(tokenizer, corpus.held_out), recipe)
    save(model.parameters, out)
    return TrainResult(model, tokenizer, corpus, losses, held_out_bits)


def _fit(
    model: Model, documents: list[Tensor], held_out: list[tuple[list[int], int]], recipe: Recipe
) -> tuple[list[float], float | None]:
    """Run all steps, print a progress line at each evaluation, and leave the best weights in the model."""
    optimizer = MuonAdamW(model.parameters, recipe.matrix_lr, recipe.other_lr, recipe.weight_decay)
    best_bits, best_weights = None, dict[str, Tensor]()
    losses: list[float] = []
    recent: list[Tensor] = []
    started = time.monotonic()
    for step, loss in enumerate(descend(optimizer, model.loss, _batches(documents, recipe)), start=1):
        recent.append(loss)
        if step % recipe.eval_every and step != recipe.steps:
            continue
        losses.append(torch.stack(recent).mean().item())
        recent.clear()
        context_len = _context_len(step - 1, recipe)
        with on_device(model.device):
            bits = bits_per_byte(model, held_out, context_len, stride=context_len) if held_out else None
        if bits is None or best_bits is None or bits < best_bits:
            best_bits = bits
            best_weights = {name: value.detach().clone() for name, value in model.parameters.items()}
        scored = "" if bits is None else f"  held-out bits/byte {bits:.4f}"
        print(
            f"step {step}/{recipe.steps}  loss {losses[-1]:.4f}{scored}  {time.monotonic() - started:.0f} s", flush=True
        )
    with torch.no_grad():
        for name, value in model.parameters.items():
            value.copy_(best_weights[name])
    return losses, best_bits


def _lr_factor(step: int, recipe: Recipe) -> float:
    """Return the factor of a linear warm-up, then half a cosine down to zero."""
    warmup = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    return warmup * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def _context_len(step: int, recipe: Recipe) -> int:
    is_early = step < int(recipe.steps * recipe.early_share)
    return min(recipe.early_context_len, recipe.context_len) if is_early else recipe.context_len


def _encode_documents(tokenizer: Tokenizer, texts: list[str], device: torch.device) -> list[Tensor]:
    """Return each text as int64 token ids, followed by end of text."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return [torch.tensor([*code.ids, end_of_text], device=device) for code in tokenizer.encode_batch(texts)]


def _batches(documents: list[Tensor], recipe: Recipe) -> Iterator[tuple[Tensor, float]]:
    """Yield `recipe.steps` batches [batch, context + 1] int64: first short windows, then full ones."""
    generator = torch.Generator().manual_seed(recipe.seed)
    step = 0
    while step < recipe.steps:
        context_len = _context_len(step, recipe)
        for windows in _epoch(documents, context_len, recipe.batch_tokens, generator):
            if step == recipe.steps or _context_len(step, recipe) != context_len:
                break
            yield windows, _lr_factor(step, recipe)
            step += 1


def _epoch(
    documents: list[Tensor], context_len: int, batch_tokens: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """One pass over all documents, in a new order, cut at new places."""
    order = torch.randperm(len(documents), generator=generator).tolist()
    stream = torch.cat([documents[i] for i in order])
    offset = int(torch.randint(min(context_len, max(1, len(stream) // 8)), (1,), generator=generator))
    windows = stream[offset:].unfold(0, context_len + 1, context_len)  # [num_windows, context_len + 1], a view
    batch = max(1, batch_tokens // context_len)
    if len(windows) < batch:
        raise ValueError(f"the text has {len(windows)} windows of {context_len} tokens; a batch needs {batch}")
    shuffled = torch.randperm(len(windows), generator=generator).to(stream.device)
    for start in range(0, len(windows) - batch + 1, batch):
        yield windows[shuffled[start : start + batch]]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = parser_of(__doc__, Recipe)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--like", type=Path, default=DEMO, metavar="DIR", help="a model directory of the same sizes")
    return parse(parser, arguments)


def main() -> None:
    """Train, then print the score of the written weights."""
    options = parse_arguments()
    started = time.monotonic()
    result = train(options)
    num_parameters = sum(parameter.numel() for parameter in result.model.parameters.values())
    print(f"{num_parameters} parameters, {time.monotonic() - started:.0f} s in all; written to {options.out}")
    report(options.out, corpus_of(options), options.device)


if __name__ == "__main__":
    main()
