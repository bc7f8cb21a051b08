"""Train the demo model on the standard library's source and write it as a Hugging Face model directory.

    python -m baton.deploy.demo.training.train --out DIR              # one GPU, minutes
    python -m baton.deploy.demo.training.train --out DIR --device cpu --steps 5 --max-files 40

corpus.py reads the text, vocabulary.py tokenizes it, model.py and muon.py learn it, evaluate.py scores it. Training
uses short windows first (`early_context_len`, for the first `early_share` of the steps) and the full context last. The
weights with the best held-out score are written.
"""

import argparse
import dataclasses
import math
import time
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import END_OF_TEXT, Corpus, conversations, read_corpus, standard_library
from .evaluate import bits_per_byte, encode_documents, pick_device, report
from .model import Llama, ModelConfig, save_model
from .muon import MuonAdamW
from .vocabulary import save_tokenizer, train_tokenizer


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything a run depends on; each field is a flag."""

    out: Path
    source: Path = field(default_factory=standard_library)
    device: str = "auto"
    steps: int = 5000
    max_files: int | None = None
    held_out_fraction: float = 0.02
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
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
    compile: bool = True

    @property
    def model(self) -> ModelConfig:
        """The sizes of the model."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(ModelConfig) if hasattr(self, f.name)}
        return ModelConfig(**fields)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run: the model with the best weights, and the mean training loss (nats) at each evaluation."""

    model: Llama
    tokenizer: Tokenizer
    corpus: Corpus
    losses: list[float]
    held_out_bits: float | None


def train(config: TrainConfig) -> TrainResult:
    """Train and write the model directory `config.out`. Raises ValueError when the text is too short for one batch."""
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    corpus = read_corpus(config.source, config.held_out_fraction, config.max_files)
    chats = conversations(corpus.train)
    tokenizer = train_tokenizer((file.text for file in corpus.train), config.vocab_size)
    texts = [file.text for file in corpus.train] + chats
    documents = _encode_documents(tokenizer, texts, device)
    print(
        f"{len(corpus.train)} files to train on ({sum(f.num_bytes for f in corpus.train) / 1e6:.1f} MB), {len(chats)} "
        f"conversations, {sum(map(len, documents))} tokens; {len(corpus.held_out)} files held out",
        flush=True,
    )
    model = Llama(config.model, config.dropout).to(device)
    held_out = encode_documents(tokenizer, corpus.held_out)
    losses, held_out_bits = _fit(model, documents, held_out, config)
    config.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, config.out, config.context_len)
    save_model(model, config.out)
    return TrainResult(model, tokenizer, corpus, losses, held_out_bits)


def _fit(
    model: Llama, documents: list[Tensor], held_out: list[tuple[list[int], int]], config: TrainConfig
) -> tuple[list[float], float | None]:
    """Run all steps, print a progress line at each evaluation, and leave the best weights in the model."""
    device = model.model.embed_tokens.weight.device
    optimizer = MuonAdamW(model, config.matrix_lr, config.other_lr, config.weight_decay)
    loss_of = torch.compile(model.loss, dynamic=False) if config.compile and device.type == "cuda" else model.loss
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    best_bits, best_weights = None, None
    losses: list[float] = []
    recent = torch.zeros((), device=device)
    started = time.monotonic()
    evaluated_at = 0
    for step, windows in enumerate(_batches(documents, config), start=1):
        with autocast:
            loss = loss_of(windows)
        loss.backward()
        optimizer.step(_lr_factor(step - 1, config))
        recent += loss.detach()
        if step % config.eval_every and step != config.steps:
            continue
        losses.append(recent.item() / (step - evaluated_at))
        recent.zero_()
        evaluated_at = step
        model.eval()
        with autocast:
            context_len = windows.shape[1] - 1
            bits = bits_per_byte(model, held_out, context_len, stride=context_len) if held_out else None
        model.train()
        if bits is None or best_bits is None or bits < best_bits:
            best_bits = bits
            best_weights = {name: value.clone() for name, value in model.state_dict().items()}
        _print_progress(step, losses[-1], bits, windows.numel(), time.monotonic() - started, config)
    assert best_weights is not None, config.steps
    model.load_state_dict(best_weights)
    model.eval()
    return losses, best_bits


def _print_progress(
    step: int, loss: float, bits: float | None, batch_tokens: int, elapsed_s: float, config: TrainConfig
) -> None:
    held_out = "" if bits is None else f"  held-out bits/byte {bits:.4f}"
    rate = step * batch_tokens / elapsed_s
    print(f"step {step}/{config.steps}  loss {loss:.4f}{held_out}  {elapsed_s:.0f} s  {rate:.0f} tokens/s", flush=True)


def _lr_factor(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    return warmup * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def _encode_documents(tokenizer: Tokenizer, texts: list[str], device: torch.device) -> list[Tensor]:
    """Each text as int64 token ids, followed by end of text."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return [torch.tensor([*code.ids, end_of_text], device=device) for code in tokenizer.encode_batch(texts)]


def _batches(documents: list[Tensor], config: TrainConfig) -> Iterator[Tensor]:
    """Yield `config.steps` batches [batch, context + 1] int64: first short windows, then full ones."""
    generator = torch.Generator().manual_seed(config.seed)
    num_early = int(config.steps * config.early_share)
    phases = ((num_early, min(config.early_context_len, config.context_len)), (config.steps, config.context_len))
    step = 0
    for last_step, context_len in phases:
        while step < last_step:
            for windows in _epoch(documents, context_len, config.batch_tokens, generator):
                if step == last_step:
                    break
                yield windows
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


def parse_arguments(arguments: Sequence[str] | None = None) -> TrainConfig:
    """A TrainConfig from flags; each flag is a field's name with dashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for entry in dataclasses.fields(TrainConfig):
        flag = "--" + entry.name.replace("_", "-")
        if entry.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=entry.default)
            continue
        is_optional = isinstance(entry.type, types.UnionType)
        kind = typing.get_args(entry.type)[0] if is_optional else entry.type
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        is_required = entry.default is dataclasses.MISSING and not callable(entry.default_factory)
        parser.add_argument(flag, type=kind, required=is_required, default=None if is_required else default)
    return TrainConfig(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Train, then print the score of the written weights and sample completions."""
    config = parse_arguments()
    started = time.monotonic()
    result = train(config)
    num_parameters = sum(parameter.numel() for parameter in result.model.parameters())
    print(f"{num_parameters} parameters, {time.monotonic() - started:.0f} s in all; written to {config.out}")
    report(config.out, config.source, config.held_out_fraction, config.max_files, pick_device(config.device))


if __name__ == "__main__":
    main()
