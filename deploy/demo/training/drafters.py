"""Train the demo drafters against the demo model, write their directories, and measure their accept lengths.

    python -m baton.deploy.demo.training.drafters --out DIR              # one GPU: all at once, one process per drafter
    python -m baton.deploy.demo.training.drafters --out DIR --only eagle,mtp3 --device cpu --steps 5 --max-files 40
    python -m baton.deploy.demo.training.drafters --out DIR --resume            # continue with the weights in DIR
    python -m baton.deploy.demo.training.drafters --out DIR --evaluate-only     # measure the directories in DIR

Layouts: docs/drafter_checkpoints.md and drafters_models.py. Training: drafters_training.py. Accept lengths:
drafters_reference.py. `hyper` first trains a small hyper-connection model, then its head, which is written as
hyper_eagle; with --resume the model stays as it is.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import SPECIAL_TOKENS, Corpus, conversations, read_corpus, standard_library
from .drafters_files import describe, layer_sizes, load, load_target, save
from .drafters_layers import LayerSizes
from .drafters_models import Drafter, Eagle, Eagle3, FrozenKvMtp, HyperEagle, Mtp, Target
from .drafters_reference import acceptance, generate
from .drafters_training import Schedule, drafter_loss, fit, text_loss
from .evaluate import pick_device

NAMES = ("eagle", "eagle3", "mtp3", "frozen_kv_mtp", "standalone", "hyper")
NUM_STEPS = {"mtp3": 3}  # proposals a round; the others NUM_PROPOSALS
NUM_PROPOSALS = 5
DRAFT_VOCAB_SHARE = 0.5
HYPER_SHARE = 0.6  # of hyper's time, for the target itself


@dataclass(frozen=True, slots=True)
class Job:
    """Inputs that the training of every drafter shares."""

    out: Path
    target_folder: Path
    device: torch.device
    schedule: Schedule
    token_counts: Tensor  # [vocab_size] int64, in the training text
    resume: bool  # start from the directories in `out` that exist

    def start(self, name: str, fresh: Drafter) -> Drafter:
        """Return the model to train: `fresh`, or with `resume` the one that `out` already holds."""
        if self.resume and (self.out / name / "model.safetensors").exists():
            fresh = load(self.out / name).train().requires_grad_()
        return fresh.to(self.device)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Held-out text to continue, and how far."""

    input_ids: Tensor  # [num_prompts, prompt_len] int64
    num_tokens: int


def train_drafter(name: str, job: Job, stream: Tensor) -> dict[str, list[float]]:
    """Train the drafter `name` on the tokens `stream`, write its directory; the losses by directory."""
    torch.manual_seed(job.schedule.seed)
    torch.set_float32_matmul_precision("high")
    target = load_target(job.target_folder).to(job.device)
    config = json.loads((job.target_folder / "config.json").read_text())
    context_len, vocab_size = config["max_position_embeddings"], config["vocab_size"]
    if name == "hyper":
        return _train_hyper(job, stream, vocab_size, context_len)
    model, sizes = _new_drafter(name, layer_sizes(config), config["num_hidden_layers"], job.token_counts)
    model = job.start(name, model)
    losses = fit(name, model, _loss(name, model, target), stream, job.schedule)
    tokenizer_from = job.target_folder if isinstance(model, Target) else None
    save(model, describe(model, sizes, vocab_size, context_len), job.out / name, tokenizer_from)
    return {name: losses}


def _new_drafter(name: str, sizes: LayerSizes, num_layers: int, token_counts: Tensor) -> tuple[Drafter, LayerSizes]:
    """An untrained drafter and its own layer sizes, derived from the target's."""
    vocab_size = len(token_counts)
    match name:
        case "eagle":
            return Eagle(sizes), sizes
        case "eagle3":
            ids = token_counts.argsort(descending=True)[: int(vocab_size * DRAFT_VOCAB_SHARE)].sort().values
            return Eagle3(sizes, [2, num_layers - num_layers // 3 - 1, num_layers], vocab_size, ids), sizes
        case "mtp3":
            return Mtp(sizes, num_layers, 3), sizes
        case "frozen_kv_mtp":
            own = dataclasses.replace(sizes, hidden_size=_share(sizes, 3, 4), intermediate_size=2 * sizes.hidden_size)
            return FrozenKvMtp(own, sizes.hidden_size, [num_layers - 1] * 2, vocab_size), own
        case "standalone":
            own = _small(sizes)
            return Target(own, vocab_size, 4), own
        case _:
            raise ValueError(f"no demo drafter is called {name}; there are {', '.join(NAMES)}")


def _train_hyper(job: Job, stream: Tensor, vocab_size: int, context_len: int) -> dict[str, list[float]]:
    """Train the hyper-connection target, then its drafter against the target as written (rounded to bfloat16)."""
    sizes = _small(layer_sizes(json.loads((job.target_folder / "config.json").read_text())))
    losses: dict[str, list[float]] = {}
    head_share = 1.0
    if not (job.resume and (job.out / "hyper").exists()):
        head_share = 1 - HYPER_SHARE
        hyper = Target(sizes, vocab_size, 6, num_streams=4).to(job.device)
        schedule = _part(job.schedule, HYPER_SHARE)
        losses["hyper"] = fit("hyper", hyper, lambda input_ids: text_loss(hyper, input_ids), stream, schedule)
        save(hyper, describe(hyper, sizes, vocab_size, context_len), job.out / "hyper", job.target_folder)
    target = load_target(job.out / "hyper").to(job.device)
    head = job.start("hyper_eagle", HyperEagle(sizes, target.num_streams))
    schedule = _part(job.schedule, head_share)
    losses["hyper_eagle"] = fit("hyper_eagle", head, _loss("", head, target), stream, schedule)
    save(head, describe(head, sizes, vocab_size, context_len), job.out / "hyper_eagle")
    return losses


def _part(schedule: Schedule, share: float) -> Schedule:
    """The same schedule over a share of its length."""
    steps = max(1, int(schedule.steps * share))
    return dataclasses.replace(schedule, steps=steps, max_seconds=schedule.max_seconds * share)


def _loss(name: str, model: Drafter, target: Target) -> Callable[[Tensor], Tensor]:
    return lambda input_ids: drafter_loss(model, target, input_ids, NUM_STEPS.get(name, NUM_PROPOSALS))


def _small(sizes: LayerSizes) -> LayerSizes:
    """Half the width: the standalone model and the hyper-connection target."""
    return dataclasses.replace(
        sizes,
        hidden_size=_share(sizes, 1, 2),
        intermediate_size=sizes.intermediate_size // 2,
        num_heads=sizes.num_heads // 2,
        num_kv_heads=max(1, sizes.num_kv_heads // 2),
    )


def _share(sizes: LayerSizes, numerator: int, denominator: int) -> int:
    return sizes.hidden_size * numerator // denominator


def read_tokens(tokenizer: Tokenizer, corpus: Corpus) -> Tensor:
    """All training text in one row [num_tokens] int32: the training files, then the conversations made of them."""
    end_of_text = SPECIAL_TOKENS.index("<|endoftext|>")
    texts = [file.text for file in corpus.train] + conversations(corpus.train)
    return torch.cat(
        [torch.tensor([end_of_text, *code.ids], dtype=torch.int32) for code in tokenizer.encode_batch(texts)]
    )


def held_out_prompts(
    tokenizer: Tokenizer, corpus: Corpus, num_prompts: int, prompt_len: int, num_tokens: int
) -> Prompts:
    """Prompts from random places of the held-out files, always the same. ValueError when no file is long enough."""
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


def evaluate(out: Path, target_folder: Path, prompts: Prompts, device: torch.device) -> dict[str, dict[str, float]]:
    """Accept length of every directory below `out`, greedy and at temperature 1, printed with shares by position."""
    results: dict[str, dict[str, float]] = {}
    for folder, group in ((target_folder, _present(out, hyper=False)), (out / "hyper", _present(out, hyper=True))):
        if not group:
            continue
        target = load_target(folder).to(device)
        num_positions = prompts.input_ids.shape[1] + prompts.num_tokens
        uniform = torch.rand(
            len(prompts.input_ids), num_positions, len(target.embedding), generator=torch.Generator().manual_seed(2)
        )
        gumbel = -(-uniform.clamp(1e-7, 1 - 1e-7).log()).log().to(device)
        for label, noise in (("greedy", None), ("temperature 1", gumbel)):
            input_ids = generate(target, prompts.input_ids.to(device), prompts.num_tokens, noise)
            for name in group:
                drafter, num_steps = load(out / name).to(device), NUM_STEPS.get(name, NUM_PROPOSALS)
                length, shares = acceptance(drafter, target, input_ids, prompts.input_ids.shape[1], num_steps, noise)
                results.setdefault(name, {})[label] = length
                detail = " ".join(f"{share:.3f}" for share in shares)
                print(f"{name}, {label}, K = {num_steps}: accept length {length:.3f}; accepted {detail}", flush=True)
    return results


def _present(out: Path, hyper: bool) -> list[str]:
    names = ("hyper_eagle",) if hyper else tuple(name for name in NAMES if name != "hyper")
    return [name for name in names if (out / name / "model.safetensors").exists()]


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
    """Run as a program; every field of Schedule is a flag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {','.join(NAMES)}")
    parser.add_argument("--target", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--source", type=Path, default=standard_library(), help="folder of the standard library")
    parser.add_argument("--held-out-fraction", type=float, default=0.02)
    parser.add_argument("--max-files", type=int, default=None)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--evaluate-only", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=128, help="tokens to generate after each prompt")
    for field in dataclasses.fields(Schedule):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    corpus = read_corpus(options.source, options.held_out_fraction, options.max_files)
    device = pick_device(options.device)
    prompts = held_out_prompts(tokenizer, corpus, options.num_prompts, options.prompt_len, options.num_tokens)
    if not options.evaluate_only:
        stream = read_tokens(tokenizer, corpus)
        schedule = Schedule(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Schedule)})
        counts = torch.bincount(stream.long(), minlength=tokenizer.get_vocab_size())
        job = Job(options.out, options.target, device, schedule, counts, options.resume)
        train_all(options.only.split(","), job, stream)
    evaluate(options.out, options.target, prompts, device)


if __name__ == "__main__":
    main()
