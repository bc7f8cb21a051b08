"""The loop of training, and the loss of a demo drafter: several steps on its own states, each against the target's
distribution.

For a window of text, the target computes its states and its distribution of the next token at every row. The drafter
starts at every anchor row r at once and takes `num_steps` steps. At step s it receives the true token r + 1 + s and its
own state of step s - 1, and must propose token r + 2 + s. So it is trained on the states that it meets when drafting
(training-time test, as in EAGLE-3). A proposal counts only if those before it were right, so the same pass measures
acceptance.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .muon import MuonAdamW
from .weights import differentiable
from .windows import Drafter

STEP_DECAY = 0.8  # weight of a step's loss relative to the one before it (EAGLE-3)
REGRESSION_WEIGHT = 0.1  # of EAGLE's smooth L1 between its state and the target's


def descend(
    optimizer: MuonAdamW, loss_of: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, float]]
) -> Iterator[Tensor]:
    """Take one step per batch of (windows [batch, seq_len] int64, factor of the learning rates). Yield the losses."""
    for windows, factor in batches:
        with differentiable(), on_device(windows.device):
            loss = loss_of(windows)
            loss.backward()
        optimizer.step(factor)
        yield loss.detach()


def on_device(device: torch.device) -> torch.autocast:
    """Return the context in which a GPU multiplies in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def drafter_loss(drafter: Drafter, input_ids: Tensor, num_steps: int) -> Tensor:
    """Return the mean cross-entropy against the target's distribution over all steps, decayed. EAGLE adds the
    regression."""
    with torch.no_grad():
        rows = drafter.target.rows(input_ids)
        probs = drafter.target.logits(rows.states.final).softmax(-1).bfloat16().unflatten(0, input_ids.shape)
        if drafter.logit_ids is not None:
            probs = probs[..., drafter.logit_ids]
            probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-6)
    if drafter.model is not None:
        return soft_cross_entropy(drafter.model(input_ids), probs)
    handoff = rows.states.handoff.unflatten(0, input_ids.shape)
    total, weights = torch.zeros((), device=input_ids.device), 0.0
    for s, (logits, state) in enumerate(drafter.unroll(rows, input_ids, num_steps)):
        places = slice(s + 1, s + 1 + logits.shape[1])
        loss = soft_cross_entropy(logits, probs[:, places])
        if drafter.is_eagle and state is not None:
            loss = loss + REGRESSION_WEIGHT * F.smooth_l1_loss(state, handoff[:, places])
        total = total + STEP_DECAY**s * loss
        weights += STEP_DECAY**s
    return total / weights


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits against probabilities; the gradient is kept in bfloat16 instead of the softmax."""

    @staticmethod
    def forward(ctx, logits: Tensor, probs: Tensor) -> Tensor:  # pyright: ignore
        scores = logits.float()
        log_total = scores.logsumexp(-1, keepdim=True)
        loss = (log_total.squeeze(-1) - (scores * probs).sum(-1)).mean()
        ctx.save_for_backward(((scores - log_total).exp_() - probs).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (difference,) = ctx.saved_tensors
        return difference * (grad / difference.shape[:-1].numel()), None


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return the mean over rows of -sum(probs x log_softmax(logits)); both [..., vocab_size], probs constant and
    summing to 1."""
    return _SoftCrossEntropy.apply(logits, probs)  # pyright: ignore[reportReturnType]
