"""Promise P1's comparison: tokens equal the reference's, except where the reference itself is at a tie.

Matrix products are not bit-equal across batch sizes, so a difference passes only where the reference's two best scores
are closer than the bound of the dtype; the comparison of that output stops there, and ties are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIE_BOUND = {"float32": 1e-4}


@dataclass
class Reference:
    """transformers on the same checkpoint, float32."""

    model_dir: Path
    model: Any = field(init=False)
    num_ties: int = 0
    num_compared: int = 0

    def __post_init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """Greedy tokens after the prompt."""
        import torch

        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([list(prompt_ids)]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(eos_token_ids) or None,
                pad_token_id=0,
            )
        return out[0, len(prompt_ids) :].tolist()

    def logits(self, ids: Sequence[int]) -> Any:
        """[vocab_size] after these ids."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)])).logits[0, -1].float()

    def assert_greedy(self, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
        """`ours` equals `theirs` up to the first tie of the reference."""
        self.num_compared += 1
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                best = self.logits([*prompt_ids, *theirs[:i]]).topk(2).values
                gap = float(best[0] - best[1])
                assert gap < TIE_BOUND["float32"], (
                    f"token {i} of a prompt of {len(prompt_ids)}: {a} instead of {b}, gap {gap:.2e};"
                    f" ours {list(ours)[: i + 3]}, reference {list(theirs)[: i + 3]}"
                )
                self.num_ties += 1
                return
        assert len(ours) == len(theirs), (len(prompt_ids), list(ours), list(theirs))
