"""Drafting and verification without KV caches, pages or buffers: the result that the engine's rounds must equal.

`propose` computes a drafter's proposals for one sequence by the tables of docs/drafter_checkpoints.md. It caches
nothing: each step computes every row again. `speculate` runs whole rounds with it. `acceptance` returns the same counts
for many sequences at once, from one unrolled pass over text that the target itself wrote. Tokens are chosen greedily,
or by the largest logit plus `noise` of the token's position. Target and drafter share the noise, [num_positions,
vocab_size].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .drafters_models import Drafter, FrozenKvMtp, Mtp, Recurrent, Target
from .drafters_training import unroll


@dataclass(frozen=True, slots=True)
class Speculation:
    """The tokens after the prompt, and how many proposals each round accepted."""

    tokens: list[int]
    num_accepted: list[int]

    @property
    def accept_length(self) -> float:
        """Tokens per round: accepted proposals and the one that the target adds."""
        return sum(self.num_accepted) / len(self.num_accepted) + 1


def choose(logits: Tensor, position: int, noise: Tensor | None) -> int:
    """The token for `position`: the largest of logits [vocab_size], noise added."""
    return int((logits if noise is None else logits + noise[position]).argmax())


@torch.no_grad()
def propose(
    drafter: Drafter, target: Target, tokens: list[int], num_steps: int, noise: Tensor | None = None
) -> list[int]:
    """Draft `num_steps` tokens after `tokens`. The last of `tokens` is the bonus token: it has no target row yet."""
    if isinstance(drafter, Target):
        return _propose_standalone(drafter, tokens, num_steps, noise)
    if isinstance(drafter, Mtp):
        return _propose_mtp(drafter, target, tokens, num_steps, noise)
    if isinstance(drafter, FrozenKvMtp):
        return _propose_frozen_kv(drafter, target, tokens, num_steps, noise)
    return _propose_recurrent(drafter, target, tokens, num_steps, noise)


@torch.no_grad()
def speculate(
    drafter: Drafter, target: Target, prompt: list[int], num_tokens: int, num_steps: int, noise: Tensor | None = None
) -> Speculation:
    """At least `num_tokens` tokens after `prompt`, in rounds of `num_steps` proposals."""
    tokens = [*prompt, choose(_target_logits(target, prompt)[-1], len(prompt), noise)]
    num_accepted: list[int] = []
    while len(tokens) < len(prompt) + num_tokens:
        proposals = propose(drafter, target, tokens, num_steps, noise)
        num_known = len(tokens)
        logits = _target_logits(target, tokens + proposals)
        for index in range(num_steps + 1):
            tokens.append(choose(logits[num_known - 1 + index], num_known + index, noise))
            if index == num_steps or tokens[-1] != proposals[index]:
                num_accepted.append(index)
                break
    return Speculation(tokens[len(prompt) :], num_accepted)


@torch.no_grad()
def generate(target: Target, prompts: Tensor, num_tokens: int, noise: Tensor | None = None) -> Tensor:
    """prompts [batch, prompt_len] and `num_tokens` more; noise [batch, prompt_len + num_tokens, vocab_size]."""
    input_ids = prompts
    for position in range(prompts.shape[1], prompts.shape[1] + num_tokens):
        logits = target.logits(target(input_ids).hidden[:, -1]).float()
        token = (logits if noise is None else logits + noise[:, position]).argmax(-1, keepdim=True)
        input_ids = torch.cat((input_ids, token), dim=1)
    return input_ids


@torch.no_grad()
def acceptance(
    drafter: Drafter, target: Target, input_ids: Tensor, prompt_len: int, num_steps: int, noise: Tensor | None = None
) -> tuple[float, list[float]]:
    """Return the accept length and, per proposal, the share of rounds that accepted it.

    The rounds run over input_ids [batch, seq_len]. The target generated them after `prompt_len` tokens with the same
    `noise` (see `generate`). A round that would pass the end is left out."""
    is_right = []
    for s, (features, _) in enumerate(unroll(drafter, target, target(input_ids), input_ids, num_steps)):
        logits = drafter.logits(features, target).float()
        places = slice(s + 2, s + 2 + features.shape[1])
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


def _target_logits(target: Target, tokens: list[int]) -> Tensor:
    """[len(tokens), vocab_size] float32."""
    input_ids = torch.tensor([tokens], device=target.embedding.device)
    return target.logits(target(input_ids).hidden)[0].float()


def _propose_recurrent(
    drafter: Recurrent, target: Target, tokens: list[int], num_steps: int, noise: Tensor | None
) -> list[int]:
    """Draft from rows 0..L-1 with target states, and add one row per step with the drafter's own state."""
    known = torch.tensor([tokens], device=target.embedding.device)
    hidden, drafted = drafter.begin(target(known[:, :-1])), list(tokens)
    for _ in range(num_steps):
        row_tokens = torch.tensor([drafted[1:]], device=known.device)
        positions = torch.arange(hidden.shape[1], device=known.device)
        state, features = drafter(hidden, row_tokens, positions, target)
        drafted.append(choose(drafter.logits(features[0, -1], target).float(), len(drafted), noise))
        hidden = torch.cat((hidden, state[:, -1:]), dim=1)
    return drafted[len(tokens) :]


def _propose_mtp(drafter: Mtp, target: Target, tokens: list[int], num_steps: int, noise: Tensor | None) -> list[int]:
    """Run layer m over rows 0..L-1. Row r reads token r + m + 1, and keeps its own position."""
    known = torch.tensor([tokens], device=target.embedding.device)
    hidden, drafted = drafter.begin(target(known[:, :-1])), list(tokens)
    positions = torch.arange(hidden.shape[1], device=known.device)
    for m in range(num_steps):
        row_tokens = torch.tensor([drafted[1 + m :]], device=known.device)
        state, features = drafter.depths[m].step(hidden, row_tokens, positions, target)
        drafted.append(choose(drafter.logits(features[0, -1], target).float(), len(drafted), noise))
        hidden = state if drafter.chained else hidden
    return drafted[len(tokens) :]


def _propose_frozen_kv(
    drafter: FrozenKvMtp, target: Target, tokens: list[int], num_steps: int, noise: Tensor | None
) -> list[int]:
    """Every step at position L - 1 over the same target rows; only token and state change."""
    known = torch.tensor([tokens], device=target.embedding.device)
    rows, drafted = target(known[:, :-1]), list(tokens)
    hidden = drafter.begin(rows)[:, -1:]
    position = torch.tensor([known.shape[1] - 2], device=known.device)
    for _ in range(num_steps):
        token = torch.tensor([drafted[-1:]], device=known.device)
        hidden, features = drafter(hidden, token, position, target, rows.kv)
        drafted.append(choose(drafter.logits(features[0, -1], target).float(), len(drafted), noise))
    return drafted[len(tokens) :]


def _propose_standalone(drafter: Target, tokens: list[int], num_steps: int, noise: Tensor | None) -> list[int]:
    """Draft with an ordinary model, one token per step."""
    drafted = list(tokens)
    for _ in range(num_steps):
        drafted.append(choose(_target_logits(drafter, drafted)[-1], len(drafted), noise))
    return drafted[len(tokens) :]
