"""The rows of a drafter's head in plain torch (plain_heads.py), from the text alone."""

from __future__ import annotations

from pathlib import Path

import torch
from plain_heads import Plain, PlainFrozenHead, PlainHead
from torch import Tensor


class Oracle:
    """One head and its target, both read from directories, float32."""

    def __init__(self, kind: str, head_dir: Path, target_dir: Path) -> None:
        self.kind, self.target = kind, Plain(target_dir)
        frozen = PlainFrozenHead(head_dir, self.target) if kind.endswith("frozen-kv-mtp") else None
        self.head = frozen or PlainHead(kind, head_dir, self.target)

    @torch.no_grad()
    def rows(self, tokens: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
        """Return recurrent states [num_rows, width] and logits [num_rows, vocab_size] of all draft rows. `tokens` end
        with the bonus token; `drafted` are d_1 .. d_j after it. Shifted heads have a row for every token with target KV
        and for each drafted one; FROZEN_KV_MTP has rows for the bonus and each drafted one."""
        rows = self.target.target_rows(tokens[:-1])
        if isinstance(self.head, PlainHead):
            found = self.head.after(self.head.extend(rows), tokens[1:], drafted)
            return found.recurrent, found.logits
        steps = [(rows.final[-1], torch.empty(0))]
        for token in (tokens[-1], *drafted):
            steps.append(self.head.step(steps[-1][0], token, rows.kv))
        states, logits = zip(*steps[1:], strict=True)
        return torch.stack(states), torch.stack(logits)
