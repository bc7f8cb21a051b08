"""The comparison of promise P1: tokens equal the reference's, unless the reference itself is at a tie.

Matrix products are not bit-equal across batch sizes. So a difference passes only if the reference's two best scores are
closer than the bound of the dtype. The comparison of that output stops there, and ties are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIE_BOUND = {"float32": 1e-4, "bfloat16": 0.15, "fp8": 0.25}  # bfloat16: two roundings of a logit near 16


@dataclass
class Reference:
    """The model in transformers, on the same checkpoint."""

    model_dir: Path
    dtype: str = "float32"
    device: str = "cpu"
    model: Any = field(init=False)
    num_ties: int = 0
    num_compared: int = 0

    def __post_init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=getattr(torch, self.dtype))
        self.model = self.model.to(self.device).eval()
        self.model.generation_config.eos_token_id = None  # what ends an output is the test's business

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """Return the greedy tokens after the prompt."""
        return self.generate_batch([prompt_ids], max_new_tokens, eos_token_ids)[0]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_token_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return the greedy tokens after prompts of one length. `eos_token_ids` end an output; by default none do."""
        import torch

        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(eos_token_ids) or None,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    def logits(self, ids: Sequence[int]) -> Any:
        """Return the logits [vocab_size] after these ids."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)], device=self.device)).logits[0, -1].float()

    def assert_greedy(self, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Check that `ours` equals `theirs` up to the first tie of the reference."""
        self.num_compared += 1
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                best = self.logits([*prompt_ids, *theirs[:i]]).topk(2).values
                gap = float(best[0] - best[1])
                assert gap < TIE_BOUND[self.dtype], (
                    f"token {i} of a prompt of {len(prompt_ids)}: {a} instead of {b}, gap {gap:.2e};"
                    f" ours {list(ours)[: i + 3]}, reference {list(theirs)[: i + 3]}"
                )
                self.num_ties += 1
                return
        assert len(ours) == len(theirs), (len(prompt_ids), list(ours), list(theirs))
