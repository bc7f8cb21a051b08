"""Train the demo drafters against the demo model, write their directories, and measure their accept lengths.

    python -m baton.deploy.demo.training.drafters --out DIR              # one GPU: all at once, one process per drafter
    python -m baton.deploy.demo.training.drafters --out DIR --only eagle,mtp3 --device cpu --steps 5 --max-files 40
    python -m baton.deploy.demo.training.drafters --out DIR --resume            # continue with the weights in DIR
    python -m baton.deploy.demo.training.drafters --out DIR --evaluate-only     # measure the directories in DIR

A drafter has the layout and sizes of its directory in `--like` (docs/drafter_checkpoints.md), and the engine's own
layers (windows.py).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import SPECIAL_TOKENS, Corpus, conversations
from .evaluate import acceptance, generate
from .losses import descend, drafter_loss
from .muon import MuonAdamW
from .options import DEMO, config_of, corpus_of, parse, parser_of
from .weights import fresh, save
from .windows import Drafter, Model

NAMES = ("eagle", "eagle3", "mtp3", "frozen_kv_mtp", "standalone")
NUM_STEPS = {"mtp3": 3}  # proposals a round; the others NUM_PROPOSALS
NUM_PROPOSALS = 5


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and learning rates of a run. It ends after its last step or when its time is up, whichever comes first."""

    steps: int = 20000
    max_seconds: float = 480.0
    context_len: int = 512
    late_context_len: int = 1024
    late_share: float = 0.2  # share of the run on the longer windows
    batch_tokens: int = 32768
    matrix_lr: float = 0.02
    other_lr: float = 0.003
    weight_decay: float = 0.05
    warmup_steps: int = 50
    log_every: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """Inputs that the training of every drafter shares."""

    out: Path
    target: Path
    like: Path
    device: torch.device
    schedule: Schedule
    resume: bool  # start from the directories in `out` that exist

    def begin(self, name: str, stream: Tensor) -> None:
        """Make the directory `name` with new weights, unless the job resumes and has it."""
        if self.resume and (self.out / name / "model.safetensors").exists():
            return
        like = self.like / name
        tokenizer = self.target if (like / "tokenizer.json").exists() else None
        fresh(like, self.out / name, _draft_ids(stream, like) if name == "eagle3" else {}, tokenizer)


def _draft_ids(stream: Tensor, like: Path) -> dict[str, Tensor]:
    """Return the buffers of EAGLE-3: the ids that it can propose are the most frequent ones."""
    stored = load_file(like / "model.safetensors")
    counts, num_ids = torch.bincount(stream.long(), minlength=len(stored["t2d"])), len(stored["d2t"])
    ids = counts.argsort(descending=True)[:num_ids].sort().values
    return {"d2t": ids - torch.arange(num_ids), "t2d": torch.zeros(len(counts), dtype=torch.bool).index_fill(0, ids, 1)}


def train_drafter(name: str, job: Job, stream: Tensor) -> list[float]:
    """Train the drafter `name` on the tokens `stream`, write its directory; the losses."""
    torch.manual_seed(job.schedule.seed)
    torch.set_float32_matmul_precision("high")
    job.begin(name, stream)
    drafter = Drafter(job.out / name, Model(job.target, job.device).freeze())

    def loss_of(input_ids: Tensor) -> Tensor:
        return drafter_loss(drafter, input_ids, NUM_STEPS.get(name, NUM_PROPOSALS))

    losses = fit(name, drafter.parameters, loss_of, stream, job.schedule)
    save(drafter.parameters, job.out / name)
    return losses


def fit(
    name: str,
    parameters: Mapping[str, Tensor],
    loss_of: Callable[[Tensor], Tensor],
    stream: Tensor,
    schedule: Schedule,
) -> list[float]:
    """Train in place on windows of `stream` [num_tokens] integers; the mean loss (nats) of every `log_every` steps."""
    device = next(iter(parameters.values())).device
    optimizer = MuonAdamW(parameters, schedule.matrix_lr, schedule.other_lr, schedule.weight_decay)
    losses: list[float] = []
    recent: list[Tensor] = []
    started, step = time.monotonic(), 0
    for step, loss in enumerate(descend(optimizer, loss_of, _batches(stream, schedule, device)), start=1):
        recent.append(loss)
        if step % schedule.log_every == 0:
            losses.append(torch.stack(recent).mean().item())
            recent.clear()
            print(f"{name} step {step} loss {losses[-1]:.4f} {time.monotonic() - started:.0f} s", flush=True)
        if device.type == "cuda" and step % 4 == 0:
            torch.cuda.synchronize()  # so that time is the device's, not the queue's
    print(f"{name} ended after {step} steps of {schedule.batch_tokens} tokens", flush=True)
    return losses


def _batches(stream: Tensor, schedule: Schedule, device: torch.device) -> Iterator[tuple[Tensor, float]]:
    """Yield batches [batch, context_len] int64 of windows at random places, and the factors of the learning rates: a
    linear warm-up, then half a cosine down to zero."""
    generator = torch.Generator().manual_seed(schedule.seed)
    started, progress, step = time.monotonic(), 0.0, 0
    while progress < 1:
        is_late = progress >= 1 - schedule.late_share
        context_len = schedule.late_context_len if is_late else schedule.context_len
        if len(stream) <= context_len:
            raise ValueError(f"the text has {len(stream)} tokens; a window needs {context_len}")
        batch = max(1, schedule.batch_tokens // context_len)
        starts = torch.randint(len(stream) - context_len, (batch, 1), generator=generator)
        warmup = min(1.0, (step + 1) / max(1, schedule.warmup_steps))
        windows = stream[starts + torch.arange(context_len)].long()
        yield windows.to(device), warmup * 0.5 * (1 + math.cos(math.pi * progress))
        step += 1
        progress = max(step / schedule.steps, (time.monotonic() - started) / schedule.max_seconds)


def read_tokens(tokenizer: Tokenizer, corpus: Corpus) -> Tensor:
    """Return all training text in one row [num_tokens] int32: the training files, then the conversations made of
    them."""
    end_of_text = SPECIAL_TOKENS.index("<|endoftext|>")
    texts = [file.text for file in corpus.train] + conversations(corpus.train)
    return torch.cat(
        [torch.tensor([end_of_text, *code.ids], dtype=torch.int32) for code in tokenizer.encode_batch(texts)]
    )


class Prompts(NamedTuple):
    """Held-out text to continue, and how far."""

    input_ids: Tensor  # [num_prompts, prompt_len] int64
    num_tokens: int


def held_out_prompts(
    tokenizer: Tokenizer, corpus: Corpus, num_prompts: int, prompt_len: int, num_tokens: int
) -> Prompts:
    """Return prompts from random places of the held-out files, always the same. ValueError when no file is long
    enough."""
    documents = [tokenizer.encode(file.text).ids for file in corpus.held_out]
    documents = [ids for ids in documents if len(ids) > prompt_len]
    if not documents:
        raise ValueError(f"no held-out file has more than {prompt_len} tokens")
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(num_prompts):
        ids = documents[index % len(documents)]
        start = int(torch.randint(len(ids) - prompt_len, (1,), generator=generator))
        rows.append(ids[start : start + prompt_len])
    return Prompts(torch.tensor(rows), num_tokens)


def evaluate(out: Path, target: Path, prompts: Prompts, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the accept length of every directory below `out`, greedy and at temperature 1. Print them with shares by
    position."""
    results: dict[str, dict[str, float]] = {}
    model, prompt_len = Model(target, device), prompts.input_ids.shape[1]
    shape = len(prompts.input_ids), prompt_len + prompts.num_tokens, model.config.vocab_size
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    gumbel = -(-uniform.clamp(1e-7, 1 - 1e-7).log()).log().to(device)
    for label, noise in (("greedy", None), ("temperature 1", gumbel)):
        input_ids = generate(model, prompts.input_ids.to(device), prompts.num_tokens, noise)
        for name in (name for name in NAMES if (out / name / "model.safetensors").exists()):
            num_steps = NUM_STEPS.get(name, NUM_PROPOSALS)
            length, shares = acceptance(Drafter(out / name, model), input_ids, prompt_len, num_steps, noise)
            results.setdefault(name, {})[label] = length
            detail = " ".join(f"{share:.3f}" for share in shares)
            print(f"{name}, {label}, K = {num_steps}: accept length {length:.3f}; accepted {detail}", flush=True)
    return results


def train_all(names: Sequence[str], job: Job, stream: Tensor) -> None:
    """Train one drafter after another on CPU, all at once on a GPU, in one process per drafter.

    Raises RuntimeError that names the drafters whose process failed.
    """
    if job.device.type != "cuda" or len(names) == 1:
        for name in names:
            train_drafter(name, job, stream)
        return
    context = torch.multiprocessing.get_context("spawn")
    stream.share_memory_()
    workers = {name: context.Process(target=train_drafter, args=(name, job, stream)) for name in names}
    for worker in workers.values():
        worker.start()
    for worker in workers.values():
        worker.join()
    if failed := [name for name, worker in workers.items() if worker.exitcode != 0]:
        raise RuntimeError(f"training failed: {', '.join(failed)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a program."""
    parser = parser_of(__doc__, Schedule)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {','.join(NAMES)}")
    parser.add_argument("--target", type=Path, default=DEMO)
    parser.add_argument("--like", type=Path, default=DEMO, metavar="DIR", help="of the drafters' layouts and sizes")
    parser.add_argument("--evaluate-only", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=128, help="tokens to generate after each prompt")
    options = parse(parser, arguments)
    tokenizer, corpus = Tokenizer.from_file(str(options.target / "tokenizer.json")), corpus_of(options)
    prompts = held_out_prompts(tokenizer, corpus, options.num_prompts, options.prompt_len, options.num_tokens)
    if not options.evaluate_only:
        schedule = config_of(Schedule, options)
        job = Job(options.out, options.target, options.like, options.device, schedule, options.resume)
        train_all(options.only.split(","), job, read_tokens(tokenizer, corpus))
    evaluate(options.out, options.target, prompts, options.device)


if __name__ == "__main__":
    main()
