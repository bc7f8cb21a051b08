"""Evaluate directories: bits per byte of a model on held-out files, and accept lengths of drafters.

python -m baton.deploy.demo.training.evaluate --model DIR --device auto
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from ....kernels.operations import preferring
from .corpus import END_OF_TEXT, SPECIAL_TOKENS, Corpus, SourceFile
from .options import DEMO, corpus_of, parse, parser_of
from .windows import Drafter, Model


@torch.no_grad()
@preferring("reference")
def bits_per_byte(model: Model, documents: Sequence[tuple[list[int], int]], context_len: int, stride: int) -> float:
    """Code length of `documents`, each (token ids after an end-of-text token, bytes of text), divided by their bytes.

    Each document is read alone, from its first token, in windows of `context_len` tokens that advance by `stride`; a
    token is scored in the first window that holds it, so it has at least context_len - stride tokens of context, or
    all that there are. The end-of-text token before the document is given, the one after it is not scored.
    """
    total_nats = torch.zeros((), dtype=torch.float64)
    for input_ids, _ in documents:
        tokens = torch.tensor(input_ids, device=model.device)
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
    """Return (token ids after an end-of-text token, bytes of text) of each file."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    return [([end_of_text, *tokenizer.encode(file.text).ids], file.num_bytes) for file in files]


@torch.no_grad()
@preferring("reference")
def generate(target: Model, prompts: Tensor, num_tokens: int, noise: Tensor | None = None) -> Tensor:
    """Return prompts [batch, prompt_len] and `num_tokens` more; noise [batch, prompt_len + num_tokens, vocab_size]."""
    input_ids = prompts
    for position in range(prompts.shape[1], prompts.shape[1] + num_tokens):
        last = target.rows(input_ids).states.final.unflatten(0, input_ids.shape)[:, -1]
        logits = target.logits(last).float()
        token = (logits if noise is None else logits + noise[:, position]).argmax(-1, keepdim=True)
        input_ids = torch.cat((input_ids, token), dim=1)
    return input_ids


@torch.no_grad()
@preferring("reference")
def acceptance(
    drafter: Drafter, input_ids: Tensor, prompt_len: int, num_steps: int, noise: Tensor | None = None
) -> tuple[float, list[float]]:
    """Return the accept length and, per proposal, the share of rounds that accepted it.

    The rounds run over input_ids [batch, seq_len]. The target generated them after `prompt_len` tokens with the same
    `noise` (see `generate`). A round that would pass the end is left out."""
    is_right = []
    for s, (logits, _) in enumerate(drafter.unroll(drafter.target.rows(input_ids), input_ids, num_steps)):
        places = slice(s + 2, s + 2 + logits.shape[1])
        logits = drafter.of_all(logits).float()
        proposals = (logits if noise is None else logits + noise[:, places]).argmax(-1)
        is_right.append(proposals == input_ids[:, places])
    counts = torch.stack(is_right, -1).int().cumprod(-1).sum(-1).cpu()  # [batch, num_anchors], 0..num_steps
    accepted: list[int] = []
    for sequence in counts.tolist():
        anchor = prompt_len - 1
        while anchor < len(sequence):
            accepted.append(sequence[anchor])
            anchor += sequence[anchor] + 1
    by_position = [sum(count > k for count in accepted) / len(accepted) for k in range(num_steps)]
    return sum(accepted) / len(accepted) + 1, by_position


def report(folder: Path, corpus: Corpus, device: torch.device) -> None:
    """Print bits per byte of the weights in `folder` on the held-out files."""
    model, tokenizer = Model(folder, device), Tokenizer.from_file(str(folder / "tokenizer.json"))
    context_len, held_out = model.config.context_len, corpus.held_out
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a program."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    options = parse(parser, arguments)
    report(options.model, corpus_of(options), options.device)


if __name__ == "__main__":
    main()
