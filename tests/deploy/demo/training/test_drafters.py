"""The demo drafters: unrolled training equals drafting from scratch, files follow docs/drafter_checkpoints.md, and the
shipped weights get proposals accepted."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from baton.deploy.demo.training.drafters import main
from baton.deploy.demo.training.drafters_files import describe, load, load_target, save
from baton.deploy.demo.training.drafters_layers import LayerSizes
from baton.deploy.demo.training.drafters_models import Drafter, Eagle, Eagle3, FrozenKvMtp, HyperEagle, Mtp, Target
from baton.deploy.demo.training.drafters_reference import acceptance, generate, propose, speculate
from baton.deploy.demo.training.drafters_training import Schedule, drafter_loss, fit, soft_cross_entropy, unroll

M = TypeVar("M", bound=nn.Module)

DEMO = Path(__file__).parents[4] / "deploy" / "demo"
SIZES = LayerSizes(hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8)
NARROW = LayerSizes(hidden_size=24, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8)
VOCAB_SIZE, NUM_LAYERS, NUM_STREAMS, NUM_STEPS = 50, 3, 3, 3

MAKERS: dict[str, Callable[[], Drafter]] = {
    "eagle": lambda: Eagle(SIZES),
    "eagle3": lambda: Eagle3(SIZES, [1, 2, 3], VOCAB_SIZE, torch.arange(0, VOCAB_SIZE, 2)),
    "mtp3": lambda: Mtp(SIZES, NUM_LAYERS, 3),
    "mtp3, not chained": lambda: Mtp(SIZES, NUM_LAYERS, 3, chained=False),
    "frozen_kv_mtp": lambda: FrozenKvMtp(NARROW, SIZES.hidden_size, [2, 0], VOCAB_SIZE),
    "standalone": lambda: Target(NARROW, VOCAB_SIZE, 2),
    "hyper_eagle": lambda: HyperEagle(SIZES, NUM_STREAMS),
}
# Of each layout, the tensors that tell it from the others: docs/drafter_checkpoints.md.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle": {"fc.weight": (32, 64), "layers.0.self_attn.k_proj.weight": (16, 32)},
    "eagle3": {
        "fc.weight": (32, 96),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (25, 32),
        "d2t": (25,),
        "t2d": (50,),
    },
    "mtp3": {
        "model.layers.3.eh_proj.weight": (32, 64),
        "model.layers.4.enorm.weight": (32,),
        "model.layers.5.shared_head.norm.weight": (32,),
        "model.layers.5.input_layernorm.weight": (32,),
    },
    "frozen_kv_mtp": {
        "pre_projection.weight": (24, 64),
        "post_projection.weight": (32, 24),
        "model.layers.1.self_attn.q_proj.weight": (32, 24),
        "model.embed_tokens.weight": (50, 24),
    },
    "standalone": {"model.layers.1.self_attn.k_proj.weight": (16, 24), "model.norm.weight": (24,)},
    "hyper_eagle": {
        "fc.weight": (96, 128),
        "hidden_norm.weight": (96,),
        "layers.0.attn_hc.mix": (3, 3),
        "layers.0.ffn_hc.read": (3,),
        "norm.weight": (32,),
    },
}
TEXT = """<|endoftext|>import os


class Finder:
    def __init__(self, path, suffix=None):
        self.path = path
        self.suffix = suffix

    def find(self):
        for name in sorted(os.listdir(self.path)):
            if self.suffix is None or name.endswith(self.suffix):
"""


def perturbed(model: M, seed: int) -> M:
    """Return the model with every weight moved away from its neutral start, at which a branch does nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def target() -> Target:
    return perturbed(Target(SIZES, VOCAB_SIZE, NUM_LAYERS), 1)


@pytest.fixture(scope="module")
def hyper() -> Target:
    return perturbed(Target(SIZES, VOCAB_SIZE, NUM_LAYERS, NUM_STREAMS), 2)


@pytest.fixture(params=MAKERS)
def pair(request: pytest.FixtureRequest, target: Target, hyper: Target) -> tuple[Drafter, Target]:
    drafter = perturbed(MAKERS[request.param](), 3)
    return drafter, hyper if isinstance(drafter, HyperEagle) else target


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_unrolled_steps_equal_drafting_from_scratch(pair: tuple[Drafter, Target]) -> None:
    drafter, its_target = pair
    for seed in range(5):
        tokens = prompt(9, seed)
        proposals = propose(drafter, its_target, tokens, NUM_STEPS)
        input_ids = torch.tensor([tokens + proposals + prompt(2)])  # what comes later must not matter
        steps = unroll(drafter, its_target, its_target(input_ids), input_ids, NUM_STEPS)
        assert [int(drafter.logits(x, its_target)[0, len(tokens) - 2].argmax()) for x, _ in steps] == proposals


@pytest.mark.parametrize("is_sampled", [False, True])
def test_speculation_writes_the_targets_own_text(pair: tuple[Drafter, Target], is_sampled: bool) -> None:
    drafter, its_target = pair
    noise = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) if is_sampled else None
    tokens = prompt(7)
    result = speculate(drafter, its_target, tokens, 24, NUM_STEPS, noise)
    text = generate(its_target, torch.tensor([tokens]), 40, None if noise is None else noise[None])
    assert text[0, 7 : 7 + len(result.tokens)].tolist() == result.tokens

    text = text[:, : 7 + len(result.tokens)]
    num_anchors, anchor, counted = text.shape[1] - NUM_STEPS - 1, 6, []
    for count in result.num_accepted:
        counted += [count] if anchor < num_anchors else []
        anchor += count + 1
    length, shares = acceptance(drafter, its_target, text, 7, NUM_STEPS, None if noise is None else noise[None])
    assert length == pytest.approx(sum(counted) / len(counted) + 1)
    assert shares == pytest.approx([sum(count > k for count in counted) / len(counted) for k in range(NUM_STEPS)])


def test_a_drafter_that_is_the_target_is_always_right(target: Target) -> None:
    noise = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    assert set(speculate(target, target, prompt(7), 20, NUM_STEPS, noise).num_accepted) == {NUM_STEPS}


def test_one_stream_with_neutral_connections_is_an_ordinary_llama(target: Target) -> None:
    """Streams that are read one at a time and written alike stay equal, so they collapse to the plain residual."""
    streams = Target(SIZES, VOCAB_SIZE, NUM_LAYERS, NUM_STREAMS)
    missing, unexpected = streams.load_state_dict(target.state_dict(), strict=False)
    assert not unexpected and all("_hc." in name for name in missing)
    input_ids = torch.tensor([prompt(12)])
    rows, expected = streams(input_ids), target(input_ids)
    torch.testing.assert_close(rows.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
    assert rows.handoff.shape[-1] == NUM_STREAMS * SIZES.hidden_size
    torch.testing.assert_close(rows.handoff[..., -1], expected.residuals[-1][..., -1], atol=1e-4, rtol=1e-4)


def test_eagle3_proposes_only_its_own_ids(target: Target) -> None:
    drafter = perturbed(MAKERS["eagle3"](), 3)
    assert isinstance(drafter, Eagle3)
    features = torch.randn(2, SIZES.hidden_size)
    logits = drafter.logits(features, target)
    assert torch.isinf(logits[:, 1::2]).all()
    torch.testing.assert_close(logits[:, ::2], drafter.draft_logits(features))
    assert drafter.t2d.nonzero().flatten().tolist() == drafter.draft_ids.tolist() == list(range(0, VOCAB_SIZE, 2))


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


def test_files_have_the_documented_tensors_and_load_again(pair: tuple[Drafter, Target], tmp_path: Path) -> None:
    drafter, its_target = pair
    sizes = NARROW if isinstance(drafter, FrozenKvMtp | Target) else SIZES
    save(drafter, describe(drafter, sizes, VOCAB_SIZE, 64), tmp_path)
    name = next(name for name in MAKERS if type(MAKERS[name]()) is type(drafter))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {key: tuple(tensors[key].shape) for key in SHAPES[name]} == SHAPES[name]
    assert not any(key in tensors for key in ("layers.0.input_layernorm.weight",) if name == "eagle")
    assert all(v.dtype == torch.bfloat16 for key, v in tensors.items() if key not in ("d2t", "t2d"))

    again = load(tmp_path)
    assert type(again) is type(drafter) and again.state_dict().keys() == drafter.state_dict().keys()
    rounded = {k: v.bfloat16().float() if v.is_floating_point() else v for k, v in drafter.state_dict().items()}
    drafter.load_state_dict(rounded)
    assert propose(again, its_target, prompt(9), NUM_STEPS) == propose(drafter, its_target, prompt(9), NUM_STEPS)


def test_every_drafter_learns(pair: tuple[Drafter, Target]) -> None:
    drafter, its_target = pair
    drafter.requires_grad_()
    stream = torch.tensor(prompt(400, 6), dtype=torch.int32)
    schedule = Schedule(
        steps=24, max_seconds=60, context_len=16, late_context_len=24, batch_tokens=96, warmup_steps=2, log_every=6
    )

    def loss_of(input_ids: Tensor) -> Tensor:
        return drafter_loss(drafter, its_target, input_ids, NUM_STEPS)

    losses = fit("test", drafter, loss_of, stream, schedule)
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.05, losses


@pytest.mark.whole
def test_the_program_trains_continues_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        f"--out {tmp_path} --device cpu --only eagle,hyper --max-files 40 --held-out-fraction 0.2 --batch-tokens 128 "
        "--context-len 32 --late-context-len 48 --num-prompts 2 --prompt-len 32 --num-tokens 12"
    )
    main([*flags.split(), "--steps", "1"])
    first = load_file(tmp_path / "eagle" / "model.safetensors")["fc.weight"]
    main([*flags.split(), "--steps", "1", "--resume"])
    again = load_file(tmp_path / "eagle" / "model.safetensors")["fc.weight"]
    assert not torch.equal(first, again) and (first - again).abs().max() < 0.1 * first.abs().max()
    lines = [line.split(": accept length")[0] for line in capsys.readouterr().out.splitlines()]
    for name in ("eagle", "hyper_eagle"):
        assert lines.count(f"{name}, greedy, K = 5") == lines.count(f"{name}, temperature 1, K = 5") == 2
    assert {path.name for path in (tmp_path / "hyper").iterdir()} >= {"config.json", "tokenizer.json"}


@functools.cache
def continued(model: Path) -> tuple[Any, torch.Tensor, int]:
    """Return a target, TEXT continued by it, and the length of TEXT."""
    target = load_target(model)
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
        ("hyper_eagle", 5, 2.5),
    ],
)
def test_shipped_drafters_are_accepted(name: str, num_steps: int, bound: float) -> None:
    its_target, text, prompt_len = continued(DEMO / "hyper" if name == "hyper_eagle" else DEMO)
    length, _ = acceptance(load(DEMO / name), its_target, text, prompt_len, num_steps)
    assert length > bound
