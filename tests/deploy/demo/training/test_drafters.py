"""Training of the demo drafters by the engine's layers: steps and gradients equal those of plain torch, files keep
their layouts, and the shipped weights get proposals accepted."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from heads import write_head
from oracle import Oracle
from plain_heads import Plain, PlainFrozenHead
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from baton.deploy.demo.training import weights
from baton.deploy.demo.training.drafters import Schedule, fit, main
from baton.deploy.demo.training.evaluate import acceptance, generate
from baton.deploy.demo.training.losses import drafter_loss, soft_cross_entropy
from baton.deploy.demo.training.weights import differentiable, fresh
from baton.deploy.demo.training.windows import Drafter, Model
from baton.kernels.operations import preferring

DEMO = Path(__file__).parents[4] / "deploy" / "demo"
CPU = torch.device("cpu")
KINDS = ("eagle", "eagle3", "mtp3-deepseek", "frozen-kv-mtp", "standalone")
VOCAB_SIZE, NUM_STEPS = 512, 3
TEXT = """<|endoftext|>import os


class Finder:
    def __init__(self, path, suffix=None):
        self.path = path
        self.suffix = suffix

    def find(self):
        for name in sorted(os.listdir(self.path)):
            if self.suffix is None or name.endswith(self.suffix):
"""


class Pair(NamedTuple):
    """A drafter and its target, in plain torch and by the engine's layers, of the same files."""

    kind: str
    directory: Path
    plain_target: Plain
    drafter: Drafter
    target: Model

    def propose(self, tokens: list[int], noise: Tensor | None) -> list[int]:
        """Draft NUM_STEPS tokens after `tokens` from scratch. The last of `tokens` has no target row yet."""

        def choose(logits: Tensor, drafted: list[int]) -> int:
            return best(logits, len(tokens) + len(drafted), noise)

        if self.kind == "standalone":
            plain, drafted = Plain(self.directory), list[int]()
            for _ in range(NUM_STEPS):
                drafted.append(choose(plain.model([*tokens, *drafted]).logits[-1], drafted))
            return drafted
        head, rows = Oracle(self.kind, self.directory, self.target.directory).head, None
        rows = self.plain_target.target_rows(tokens[:-1])
        if isinstance(head, PlainFrozenHead):
            drafted = []
            for _ in range(NUM_STEPS):
                drafted.append(choose(head.logits_after(rows.final[-1], tokens[-1], rows.kv, drafted), drafted))
            return drafted
        if len(head.prefixes) > 1:
            return head.layered(rows.final, tokens, choose)[1]
        return head.chain(head.extend(rows), tokens[1:], NUM_STEPS, choose)

    def speculate(self, prompt: list[int], num_tokens: int, noise: Tensor | None) -> tuple[list[int], list[int]]:
        """Return at least `num_tokens` tokens after `prompt`, and how many proposals each round accepted."""

        def logits(tokens: list[int]) -> Tensor:
            return self.plain_target.model(tokens).logits

        tokens, num_accepted = [*prompt, best(logits(prompt)[-1], len(prompt), noise)], list[int]()
        while len(tokens) < len(prompt) + num_tokens:
            proposals, num_known = self.propose(tokens, noise), len(tokens)
            rows = logits(tokens + proposals)
            for index in range(NUM_STEPS + 1):
                tokens.append(best(rows[num_known - 1 + index], num_known + index, noise))
                if index == NUM_STEPS or tokens[-1] != proposals[index]:
                    num_accepted.append(index)
                    break
        return tokens[len(prompt) :], num_accepted


def best(logits: Tensor, position: int, noise: Tensor | None) -> int:
    return int((logits if noise is None else logits + noise[position]).argmax())


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path: Path) -> Pair:
    kind = request.param
    own = checkpoint("llama", num_hidden_layers=3)
    directory = checkpoint("llama") if kind == "standalone" else write_head(tmp_path / "drafter", kind, own)
    target = Model(own, CPU).freeze()
    return Pair(kind, directory, Plain(own), Drafter(directory, target), target)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
@preferring("reference")
def test_unrolled_steps_equal_drafting_from_scratch(pair: Pair) -> None:
    for seed in range(5):
        tokens = prompt(9, seed)
        proposals = pair.propose(tokens, None)
        input_ids = torch.tensor([tokens + proposals + prompt(2)])  # what comes later must not matter
        steps = pair.drafter.unroll(pair.target.rows(input_ids), input_ids, NUM_STEPS)
        scores = [pair.drafter.of_all(logits)[0, len(tokens) - 2] for logits, _ in steps]
        assert [int(each.argmax()) for each in scores] == proposals


@pytest.mark.each_value
@pytest.mark.parametrize("is_sampled", [False, True])
def test_acceptance_counts_the_rounds_that_speculation_runs(pair: Pair, is_sampled: bool) -> None:
    noise = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) if is_sampled else None
    tokens = prompt(7)
    written, num_accepted = pair.speculate(tokens, 20, noise)
    text = generate(pair.target, torch.tensor([tokens]), 40, None if noise is None else noise[None])
    assert text[0, 7 : 7 + len(written)].tolist() == written

    text = text[:, : 7 + len(written)]
    num_anchors, anchor, counted = text.shape[1] - NUM_STEPS - 1, 6, []
    for count in num_accepted:
        counted += [count] if anchor < num_anchors else []
        anchor += count + 1
    length, shares = acceptance(pair.drafter, text, 7, NUM_STEPS, None if noise is None else noise[None])
    assert length == pytest.approx(sum(counted) / len(counted) + 1)
    assert shares == pytest.approx([sum(count > k for count in counted) / len(counted) for k in range(NUM_STEPS)])


def test_gradients_of_the_engines_layers_are_torchs(checkpoint: Callable[..., Path]) -> None:
    """Layers overwrite their residual stream; what a gradient needs of it is kept."""
    directory, windows = checkpoint("llama"), torch.tensor([prompt(12), prompt(12, 1)])
    plain = Plain(directory)
    for each in plain.tensors.values():
        each.requires_grad_()
    logits = torch.stack([plain.model(row[:-1].tolist()).logits for row in windows])
    expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    expected.backward()
    model = Model(directory, CPU)
    with differentiable():
        loss = model.loss(windows)
        loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, each in model.parameters.items():
        torch.testing.assert_close(each.grad, plain.tensors[name.removeprefix("model.")].grad, atol=1e-5, rtol=1e-4)


def test_soft_cross_entropy_is_torchs() -> None:
    logits = torch.randn(3, 4, 11, dtype=torch.float32, requires_grad=True)
    probs = torch.randn(3, 4, 11).softmax(-1)
    other = logits.detach().clone().requires_grad_()
    loss = soft_cross_entropy(logits, probs)
    expected = F.cross_entropy(other.flatten(0, 1), probs.flatten(0, 1))
    torch.testing.assert_close(loss, expected)
    (2 * loss).backward()
    (2 * expected).backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_new_weights_have_the_layout_of_the_old_and_are_saved_in_it(pair: Pair, tmp_path: Path) -> None:
    fresh(pair.directory, tmp_path / "new", {})
    again = Drafter(tmp_path / "new", pair.target)
    assert again.parameters.keys() == pair.drafter.parameters.keys()
    weights.save(pair.drafter.parameters, tmp_path / "new")
    old, new = (load_file(each / "model.safetensors") for each in (pair.directory, tmp_path / "new"))
    for name in old.keys() | new.keys():
        assert torch.equal(old[name].to(new[name].dtype), new[name])
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == VOCAB_SIZE


def test_a_new_layer_is_the_identity(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    fresh(checkpoint("llama"), tmp_path, {})
    with preferring("reference"):
        aux = Model(tmp_path, CPU).freeze().rows(torch.tensor([prompt(5)])).states.aux
    assert all(torch.equal(each, aux[0]) for each in aux)


def test_every_drafter_learns(pair: Pair) -> None:
    stream = torch.tensor(prompt(400, 6), dtype=torch.int32)
    schedule = Schedule(
        steps=12, max_seconds=60, context_len=16, late_context_len=24, batch_tokens=96, warmup_steps=2, log_every=3
    )

    def loss_of(input_ids: Tensor) -> Tensor:
        return drafter_loss(pair.drafter, input_ids, NUM_STEPS)

    losses = fit("test", pair.drafter.parameters, loss_of, stream, schedule)
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.05, losses


@pytest.mark.whole
def test_the_program_trains_continues_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        f"--out {tmp_path} --device cpu --only eagle,standalone --max-files 40 --held-out-fraction 0.2 "
        "--batch-tokens 128 --context-len 32 --late-context-len 48 --num-prompts 2 --prompt-len 32 --num-tokens 12"
    )
    main([*flags.split(), "--steps", "1"])
    first = load_file(tmp_path / "eagle" / "model.safetensors")["fc.weight"]
    main([*flags.split(), "--steps", "1", "--resume"])
    again = load_file(tmp_path / "eagle" / "model.safetensors")["fc.weight"]
    assert not torch.equal(first, again) and (first - again).abs().max() < 0.1 * first.abs().max()
    lines = [line.split(": accept length")[0] for line in capsys.readouterr().out.splitlines()]
    for name in ("eagle", "standalone"):
        assert lines.count(f"{name}, greedy, K = 5") == lines.count(f"{name}, temperature 1, K = 5") == 2
    assert {path.name for path in (tmp_path / "standalone").iterdir()} >= {"config.json", "tokenizer.json"}


@functools.cache
def continued(model: Path) -> tuple[Any, torch.Tensor, int]:
    """Return a target, TEXT continued by it, and the length of TEXT."""
    target = Model(model, CPU).freeze()
    input_ids = torch.tensor([Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT).ids])
    return target, generate(target, input_ids, 40), input_ids.shape[1]


@pytest.mark.parametrize(
    ("name", "num_steps", "bound"),
    [
        ("eagle", 5, 2.5),
        ("eagle3", 5, 2.5),
        ("mtp3", 3, 2.2),
        ("frozen_kv_mtp", 5, 2.2),
        ("standalone", 5, 2.5),
    ],
)
def test_shipped_drafters_are_accepted(name: str, num_steps: int, bound: float) -> None:
    target, text, prompt_len = continued(DEMO)
    length, _ = acceptance(Drafter(DEMO / name, target), text, prompt_len, num_steps)
    assert length > bound
