"""The training of a demo drafter: several steps on its own states, each against the target's distribution.

For a window of text, the target computes its states and its distribution of the next token at every row. The drafter
starts at every anchor row r at once and takes `num_steps` steps. At step s it receives the true token r + 1 + s and its
own state of step s - 1, and must propose token r + 2 + s. So it is trained on the states that it meets when drafting
(training-time test, as in EAGLE-3). A proposal counts only if those before it were right, so the same pass measures
acceptance.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .drafters_models import Drafter, Eagle, Eagle3, FrozenKvMtp, KeyValue, Mtp, Target, TargetRows
from .muon import MuonAdamW

STEP_DECAY = 0.8  # weight of a step's loss relative to the one before it (EAGLE-3)
REGRESSION_WEIGHT = 0.1  # of EAGLE's smooth L1 between its state and the target's
ADAM_NAMES = ("embed", "lm_head", ".mix")  # matrices that AdamW updates; Muon updates the others


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


def unroll(
    drafter: Drafter, target: Target, rows: TargetRows, input_ids: Tensor, num_steps: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (input of the drafter's head, its state) per step, both [batch, num_anchors, size]. The state is None for
    a standalone drafter. Anchors are the rows 0..num_anchors-1; num_anchors = seq_len - num_steps - 1."""
    num_anchors = input_ids.shape[1] - num_steps - 1
    anchors = torch.arange(num_anchors, device=input_ids.device)
    if isinstance(drafter, Target):
        hidden = drafter(input_ids).hidden
        yield from ((hidden[:, s + 1 : s + 1 + num_anchors], None) for s in range(num_steps))
        return
    hidden = drafter.begin(rows)[:, :num_anchors]
    own_steps: list[KeyValue] = []
    for s in range(num_steps):
        tokens = input_ids[:, s + 1 : s + 1 + num_anchors]
        if isinstance(drafter, Mtp):
            state, features = drafter.depths[s].step(hidden, tokens, anchors, target)
        elif isinstance(drafter, FrozenKvMtp):
            state, features = drafter(hidden, tokens, anchors, target, rows.kv)
        else:
            state, features = drafter(hidden, tokens, anchors + s, target, own_steps)
        yield features, state
        hidden = state if not isinstance(drafter, Mtp) or drafter.chained else hidden


def drafter_loss(drafter: Drafter, target: Target, input_ids: Tensor, num_steps: int) -> Tensor:
    """Mean cross-entropy against the target's distribution over all steps, decayed; EAGLE adds the regression."""
    with torch.no_grad():
        rows = target(input_ids)
        probs = target.logits(rows.hidden).softmax(-1).bfloat16()  # [batch, seq_len, vocab_size]
        if isinstance(drafter, Eagle3):
            probs = probs[..., drafter.draft_ids]
            probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-6)
    if isinstance(drafter, Target):
        return soft_cross_entropy(drafter.logits(drafter(input_ids).hidden), probs)
    total, weights = torch.zeros((), device=input_ids.device), 0.0
    for s, (features, state) in enumerate(unroll(drafter, target, rows, input_ids, num_steps)):
        num_anchors = features.shape[1]
        logits = drafter.draft_logits(features) if isinstance(drafter, Eagle3) else drafter.logits(features, target)
        loss = soft_cross_entropy(logits, probs[:, s + 1 : s + 1 + num_anchors])
        if isinstance(drafter, Eagle) and state is not None:
            loss = loss + REGRESSION_WEIGHT * F.smooth_l1_loss(state, rows.handoff[:, s + 1 : s + 1 + num_anchors])
        total = total + STEP_DECAY**s * loss
        weights += STEP_DECAY**s
    return total / weights


def text_loss(model: Target, input_ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of each token after the first. It trains the hyper-connection target itself."""
    logits = model.logits(model(input_ids[:, :-1]).hidden)
    return F.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())


def fit(
    name: str,
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    stream: Tensor,
    schedule: Schedule,
) -> list[float]:
    """Train in place on windows of `stream` [num_tokens] integers; the mean loss (nats) of every `log_every` steps."""
    device = next(model.parameters()).device
    optimizer = MuonAdamW(_AdamNames(model), schedule.matrix_lr, schedule.other_lr, schedule.weight_decay)
    generator = torch.Generator().manual_seed(schedule.seed)
    losses: list[float] = []
    recent = torch.zeros((), device=device)
    started, progress, step, num_recent = time.monotonic(), 0.0, 0, 0
    while progress < 1:
        input_ids = _windows(stream, schedule, progress, generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(input_ids)
        loss.backward()
        warmup = min(1.0, (step + 1) / max(1, schedule.warmup_steps))
        optimizer.step(warmup * 0.5 * (1 + math.cos(math.pi * progress)))
        recent += loss.detach()
        step, num_recent = step + 1, num_recent + 1
        if step % schedule.log_every == 0:
            losses.append(recent.item() / num_recent)
            recent.zero_()
            num_recent = 0
            print(f"{name} step {step} loss {losses[-1]:.4f} {time.monotonic() - started:.0f} s", flush=True)
        if device.type == "cuda" and step % 4 == 0:
            torch.cuda.synchronize()  # so that time is the device's, not the queue's
        progress = max(step / schedule.steps, (time.monotonic() - started) / schedule.max_seconds)
    print(f"{name} ended after {step} steps of {schedule.batch_tokens} tokens", flush=True)
    return losses


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits against probabilities; the gradient is kept in bfloat16 instead of the softmax."""

    @staticmethod
    def forward(ctx, logits: Tensor, probs: Tensor) -> Tensor:  # pyright: ignore
        scores = logits.float()
        log_total = scores.logsumexp(-1, keepdim=True)
        loss = (log_total.squeeze(-1) - (scores * probs).sum(-1)).mean()
        ctx.save_for_backward((scores.sub_(log_total).exp_() - probs).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (difference,) = ctx.saved_tensors
        return difference * (grad / difference.shape[:-1].numel()), None


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Mean over rows of -sum(probs x log_softmax(logits)); both [..., vocab_size], probs constant and summing to 1."""
    return _SoftCrossEntropy.apply(logits, probs)  # pyright: ignore[reportReturnType]


class _AdamNames(nn.Module):
    """A view of a module in which the matrices for AdamW bear a name that MuonAdamW gives to AdamW."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def named_parameters(self, *arguments: object, **keywords: object) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters(*arguments, **keywords):  # pyright: ignore
            yield ("embed." + name if any(part in name for part in ADAM_NAMES) else name), parameter


def _windows(stream: Tensor, schedule: Schedule, progress: float, generator: torch.Generator) -> Tensor:
    """A batch [batch, context_len] int64 of windows at random places."""
    is_late = progress >= 1 - schedule.late_share
    context_len = schedule.late_context_len if is_late else schedule.context_len
    batch = max(1, schedule.batch_tokens // context_len)
    if len(stream) <= context_len:
        raise ValueError(f"the text has {len(stream)} tokens; a window needs {context_len}")
    starts = torch.randint(len(stream) - context_len, (batch, 1), generator=generator)
    return stream[starts + torch.arange(context_len)].long()
