"""The comparison of promise P1: tokens equal the reference's, unless the reference itself is at a tie.

Matrix products are not bit-equal across batch sizes. So a difference passes only if the reference's two best scores are
closer than the bound of the dtype, or if a router of the reference has chosen experts by less than its own bound: in
any layer, for this token or an earlier one. The comparison of that output stops there. Both kinds of ties are counted,
each by itself.

A tie of an indexer ends no comparison. The reference attends to what our indexers pick, once each pick that differs
from its own has been found to score as much as the cut (`IndexCuts`). Such rows are counted, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from index_picks import forward
from torch.overrides import TorchFunctionMode

TIE_BOUND = {"float32": 1e-4, "bfloat16": 0.15}  # bfloat16: two roundings of a logit near 16
INDEX_TIE_BOUND = 1e-6  # of the scores that an indexer compares, in parts of the spread of a row
MOST_DISAGREEMENT = 1e-3  # of the logits of a model that computes by two rules
ROUTER_TIE_BOUND = 1e-5  # of the scores that a router compares; every dtype, as routers compute in float32


@dataclass
class Reference:
    """The model in transformers, on the same checkpoint."""

    model_dir: Path
    dtype: str = "float32"
    device: str = "cpu"
    model: Any = field(init=False)
    max_router_ties: int = 0  # a test that meets one says so; beyond it, one output of a hundred
    bound: float = field(init=False)  # of the two best scores at a tie
    two_rules: Sequence[int] = ()  # a text by which a model that computes by two rules is compared with itself
    num_ties: int = 0
    num_router_ties: int = 0
    num_index_ties: int = 0  # rows of an indexer
    num_compared: int = 0
    _texts: dict[Any, list[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.model = model_of(self.model_dir, self.dtype, self.device)
        self.model.generation_config.eos_token_id = None  # what ends an output is the test's business
        self.bound = TIE_BOUND[self.dtype]

    @property
    def has_indexers(self) -> bool:
        """Whether texts are compared with our picks."""
        fields = self.model.config.to_dict() if hasattr(self.model, "config") else {}
        return bool(fields.get("index_topk")) and (self.dtype, self.device) == ("float32", "cpu")

    @property
    def counts(self) -> str:
        """The outputs that were compared, and the ties among them, in words."""
        ties = f"{self.num_ties} ties, {self.num_router_ties} at a router's cut"
        rows = f", {self.num_index_ties} rows at an indexer's" if self.has_indexers else ""
        return f"{self.num_compared} outputs compared, {ties}{rows}"

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """Return the greedy tokens after the prompt, which are generated once."""
        key = (tuple(prompt_ids), max_new_tokens, tuple(eos_token_ids))
        if key not in self._texts:
            self._texts[key] = self.generate_batch([prompt_ids], max_new_tokens, eos_token_ids)[0]
        return self._texts[key]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_token_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return the greedy tokens after prompts of one length. `eos_token_ids` end an output; by default none do."""
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        with torch.inference_mode(), IndexCuts():
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
        return self.all_logits(ids)[-1]

    def all_logits(self, ids: Sequence[int], picks: Sequence[torch.Tensor] = ()) -> Any:
        """Return the logits after each of these ids, [len(ids), vocab_size]. `picks`: of indexers, as `IndexCuts` takes
        them."""
        with torch.inference_mode(), IndexCuts(picks) as cuts:
            logits = self.model(torch.tensor([list(ids)], device=self.device)).logits[0].float()
        self.num_index_ties += cuts.num_ties
        return logits

    def is_close(self, gap: float) -> bool:
        """Return whether a difference of scores is within the bound, or within twice what the model's two rules differ.
        The latter is measured when it first matters."""
        return gap < self.bound or (len(self.two_rules) > 0 and gap < 2 * self._disagreement)

    @functools.cached_property
    def _disagreement(self) -> float:
        """The largest difference between the logits of `two_rules` in one forward and those token by token."""
        whole, past, largest = self.all_logits(self.two_rules), None, 0.0
        with torch.inference_mode():
            for token_id, expected in zip(self.two_rules, whole, strict=True):
                out = self.model(torch.tensor([[token_id]]), use_cache=True, past_key_values=past)
                past, largest = out.past_key_values, max(largest, float((out.logits[0, 0] - expected).abs().max()))
        assert largest <= MOST_DISAGREEMENT, largest
        return largest

    def assert_greedy(self, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Check that `ours` equals `theirs` up to the first tie of the reference."""
        if self.has_indexers:
            assert len(ours) == len(theirs), (len(prompt_ids), list(ours), list(theirs))
            self.assert_text(prompt_ids, ours)
            return
        self.num_compared += 1
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                with RouterCuts() as cuts:
                    logits = self.logits([*prompt_ids, *theirs[:i]])
                self._check_tie(prompt_ids, ours, theirs, logits, cuts.smallest)
                return
        assert len(ours) == len(theirs), (len(prompt_ids), list(ours), list(theirs))

    def assert_text(self, prompt_ids: Sequence[int], ours: Sequence[int]) -> None:
        """Check a greedy text up to the first tie of the reference, by one forward over all of it. If the model has
        indexers, the reference attends to our picks."""
        self.num_compared += 1
        ids, first = [*prompt_ids, *ours[:-1]], len(prompt_ids) - 1
        picks = forward(self.model_dir, ids)[1] if self.has_indexers else []
        with RouterCuts() as cuts:
            logits = self.all_logits(ids, picks)
        theirs = logits[first:].argmax(1).tolist()
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                self._check_tie(prompt_ids, ours, theirs, logits[first + i], cuts.smallest_before(first + i + 1))
                return

    def _check_tie(
        self, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int], logits: Any, router_gap: float
    ) -> None:
        """Count the tie that explains the first difference. `logits` of the reference are those of its token,
        `router_gap` is the smallest at a router's cut there or before."""
        i = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        best = logits.topk(2).values
        gap = float(best[0] - best[1])
        if self.is_close(gap):
            self.num_ties += 1
            return
        most = max(self.max_router_ties, self.num_compared // 100)
        assert router_gap < ROUTER_TIE_BOUND and self.num_router_ties < most, (
            f"token {i} of a prompt of {len(prompt_ids)}: {ours[i]} instead of {theirs[i]}, gap {gap:.2e}, smallest gap"
            f" at a router's cut {router_gap:.2e}, {self.num_router_ties} router ties before;"
            f" ours {list(ours)[: i + 3]}, reference {list(theirs)[: i + 3]}; {self.counts}"
        )
        self.num_router_ties += 1


@functools.lru_cache(maxsize=3)
def model_of(model_dir: Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """Return the model of a checkpoint in transformers. Tests share it: copy it before you change it."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # its list lacks the class
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).to(device).eval()


class IndexCuts(TorchFunctionMode):
    """Lets the indexers of transformers take the lowest of equal positions. Their own choice depends on the tensor's
    shape.

    If `picks` are given, one [num_tokens, num_picks] per indexer with -1 behind the last, they are taken instead, after
    a check: whatever they have that the reference has not, or the reverse, scores within INDEX_TIE_BOUND of the cut, in
    parts of the spread of the row's scores. An indexer is the only caller of topk with scores [1, num_tokens,
    num_slots]."""

    def __init__(self, picks: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._picks = list(picks)
        self.num_ties = 0  # rows whose picks differ

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 3:
            return func(*args, **kwargs)
        scores, num_taken = args[0], kwargs["k"] if "k" in kwargs else args[1]
        best = torch.sort(scores, dim=-1, descending=True, stable=True)
        taken = torch.return_types.topk((best.values[..., :num_taken], best.indices[..., :num_taken]))
        if self._picks and len(scores) == 1 and scores.shape[1] == len(self._picks[0]):
            self._check(scores[0], taken.indices[0], picks := self._picks.pop(0))
            own = torch.where(picks < 0, taken.indices[0], picks).long()  # of few slots, all are taken
            return torch.return_types.topk((scores[0].gather(1, own)[None], own[None]))
        return taken

    def _check(self, scores: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        is_hidden = scores < -1e30
        for row, (score, hidden) in enumerate(zip(scores, is_hidden, strict=True)):
            own = {slot for slot in ours[row].tolist() if slot >= 0}
            other = {slot for slot in theirs[row].tolist() if not hidden[slot]}
            assert len(own) == len(other), (row, own, other)
            if own == other:
                continue
            seen = score[~hidden]
            cut, spread = score[theirs[row, -1]], seen.max() - seen.min()
            off = max(float((score[slot] - cut).abs()) for slot in own ^ other)
            assert off <= INDEX_TIE_BOUND * float(spread), (
                f"token {row} takes {own - other} in place of {other - own}, {off:.1e} from the cut of scores that"
                f" spread by {float(spread):.1e}"
            )
            self.num_ties += 1


class RouterCuts(TorchFunctionMode):
    """Records, for each choice of a router in transformers, by how much the last expert (or group of experts) that it
    takes is better than the best one that it leaves. A router is the only caller of topk with a row of scores per
    token; the best two of each group, which are summed, are no choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[torch.Tensor] = []  # [num_tokens] float32 each, in the order of the model

    @property
    def smallest(self) -> float:
        """Infinity if there is no router."""
        return min((float(each.min()) for each in self.gaps), default=float("inf"))

    def smallest_before(self, stop: int) -> float:
        """Return the smallest gap of the tokens before `stop`, of one sequence."""
        return min((float(each[:stop].min()) for each in self.gaps), default=float("inf"))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            scores, num_taken = args[0], kwargs["k"] if "k" in kwargs else args[1]
            if scores.ndim == 2 and num_taken < scores.shape[1]:
                best = scores.float().topk(num_taken + 1).values
                gap = best[:, num_taken - 1] - best[:, num_taken]
                self.gaps.append(gap.nan_to_num(nan=float("inf")))  # both are masked
        return func(*args, **kwargs)
