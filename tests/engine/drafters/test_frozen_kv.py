"""FROZEN_KV_MTP equals a recompute in plain torch: every forward of a round sees the target's KV of rows 0 .. L - 1.

The target's KV and states are random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from direct import Direct, Text, branches, stored
from handoff_nodes import check_refused, make_client, make_server
from heads import write_head
from plain_heads import Plain, PlainFrozenHead, grow

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.base import DraftState
from baton.engine.drafters.frozen_kv import FrozenKvDrafter
from baton.engine.drafters.speculation import read_speculation
from baton.metadata.errors import ConfigError
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

SIZES = {"hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10}
SAMPLED = [{}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.5, "top_k": 40}]
Checkpoint = Callable[..., Path]
Make = Callable[..., tuple[Direct, PlainFrozenHead]]


@pytest.fixture
def make(checkpoint: Checkpoint, tmp_path: Path) -> Make:
    def direct_and_plain(**settings: Any) -> tuple[Direct, PlainFrozenHead]:
        """A head of width 24, whose layers read the target's last layer and its first."""
        model = checkpoint("llama", **SIZES)
        head = write_head(tmp_path / "head", "frozen-kv-mtp", model, hidden_size=24, target_layers=[2, 0])
        direct = Direct(model, speculative="frozen-kv-mtp", draft_model=str(head), **{"draft_steps": 4, **settings})
        assert isinstance(direct.drafter, FrozenKvDrafter)
        return direct, PlainFrozenHead(head, Plain(model))

    return direct_and_plain


def logits_after(direct: Direct, plain: PlainFrozenHead, text: Text, drafted: Sequence[int]) -> torch.Tensor:
    assert text.states is not None
    kv = stored(direct.target_kv, text.pages, text.num_computed)
    return plain.logits_after(text.states[-1], text.token_ids[-1], kv, drafted)


def check_state(texts: Sequence[Text], state: DraftState) -> None:
    """The state is the target's own row at L - 1, bit for bit, and there is nothing else."""
    assert [name for name, _ in state.present()] == ["hidden"] and state.hidden is not None
    assert torch.equal(state.hidden, torch.stack([text.states[-1] for text in texts if text.states is not None]))


@pytest.mark.parametrize("sampling", [[{}] * 3, SAMPLED], ids=["greedy", "sampled"])
def test_rounds_equal_a_recompute(sampling: list[dict[str, Any]], make: Make) -> None:
    """Texts of unlike lengths in one batch; rounds that accept none, some and all drafts, and rounds without drafts."""
    direct, plain = make()
    before = direct.target_kv.clone()
    texts = [direct.text(length, **fields) for length, fields in zip((1, 7, 12), sampling, strict=True)]

    def check_drafts(num_steps: int) -> list[list[int]]:
        drafted = direct.propose(texts, state, num_steps)
        for text, found in zip(texts, drafted, strict=True):
            for step, token in enumerate(found):
                assert token == text.choose(logits_after(direct, plain, text, found[:step]), found[:step])
        return drafted

    state = direct.prompt(texts, 5)
    check_state(texts, state)
    for num_steps, num_accepted in ((4, [0, 2, 4]), (1, [1, 0, 1]), (3, [3, 1, 0])):
        state = direct.observe(texts, state, check_drafts(num_steps), num_accepted)
        check_state(texts, state)
    state = direct.catch_up(texts, state, [1, 3, 2])
    check_state(texts, state)
    check_drafts(4)
    assert torch.equal(direct.target_kv, before), "the drafter only reads the target's pool"


@pytest.mark.parametrize(("steps", "topk", "num_tokens"), [(3, 2, 10), (3, 3, 8), (1, 3, 3)], ids=str)
def test_trees_equal_a_recompute(steps: int, topk: int, num_tokens: int, make: Make) -> None:
    """The nodes of a tree stand at one position, too, each with the state of its own path."""
    direct, plain = make(draft_steps=steps, draft_topk=topk, draft_tokens=num_tokens)
    texts = [direct.text(length) for length in (1, 8)]
    drafts = direct.propose_tree(texts, direct.prompt(texts), steps)
    for row, text in enumerate(texts):
        paths = branches(drafts, row)
        wanted = grow(steps, topk, num_tokens, lambda path: logits_after(direct, plain, text, path))  # noqa: B023
        assert len(paths) == num_tokens and set(paths) == wanted


def test_drafts_depend_on_kv_before_l_alone(make: Make) -> None:
    """Nothing at L or later, where rejected drafts leave KV, and nothing of another sequence, changes a draft."""
    direct, _ = make()
    texts = [direct.text(7, **SAMPLED[1]), direct.text(8, **SAMPLED[2])]
    state = direct.prompt(texts)
    drafted = direct.propose(texts, state, 4)[0]
    pages = direct.target_kv[:, texts[0].pages].clone()
    direct.target_kv[:] = 1e4
    direct.target_kv[:, texts[0].pages[:2]] = pages[:, :2]
    direct.target_kv[:, texts[0].pages[2], :, :, 0] = pages[:, 2, :, :, 0]  # position 6, the last one before L
    assert state.hidden is not None
    state = DraftState(hidden=torch.stack([state.hidden[0], torch.full((40,), float("nan"))]))
    assert direct.propose(texts, state, 4)[0] == drafted
    direct.target_kv[:, texts[0].pages[2], :, :, 0] = 0.0
    assert direct.propose(texts, state, 4)[0] != drafted


def test_states_have_the_targets_width(make: Make) -> None:
    direct, _ = make()
    drafter, text = direct.drafter, direct.text(4)
    for phase in ("extend", "recurrent"):
        assert drafter.hidden.spec(phase) == (40, "float32")
    zeros = drafter.allocate(3).hidden
    assert zeros is not None and zeros.shape == (3, 40) and direct.draft_kv is None
    assert text.states is not None
    right = text.states
    for wrong in (right.repeat(1, 4), right[:, :24], right.double(), right.bfloat16()):
        text.states = wrong
        with pytest.raises(ValueError, match=r"extend state of frozen-kv-mtp is \[num_rows, 40\] float32, not"):
            direct.finish([text])
        with pytest.raises(ValueError, match=r"recurrent state of frozen-kv-mtp is \[num_rows, 40\] float32, not"):
            direct.propose([text], DraftState(hidden=wrong[-1:]), 2)


def test_another_dtype_than_the_targets_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama", **SIZES)
    head = write_head(tmp_path, "frozen-kv-mtp", model)
    config = DecodeConfig(speculative="frozen-kv-mtp", draft_model=str(head), draft_dtype="bfloat16")
    with pytest.raises(ConfigError, match="in the target's dtype float32, but draft_dtype is bfloat16"):
        read_speculation(config, model, read_model_config(model), "float32")


def schema(model: Path, directory: Path, layers: list[int]) -> HandoffSchema:
    """Return the schema of a node with a head. Only what its file names differs."""
    head = write_head(directory / f"frozen-{layers}", "frozen-kv-mtp", model, target_layers=layers)
    config = DecodeConfig(speculative="frozen-kv-mtp", draft_model=str(head))
    target = read_model_config(model)
    pool = PoolLayout(num_layers=3, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, dtype="float32")
    return read_speculation(config, model, target, "float32").schema(pool, 4, checksums=True)


def test_nodes_whose_heads_read_other_layers_refuse_each_other(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Same tensors, same settings: without the map in the schema they would pair, and draft from other layers."""
    model = checkpoint("llama", num_hidden_layers=3)
    here, there = (schema(model, tmp_path, layers) for layers in ([0, 2], [0, 1]))
    check_refused(make_server(here), make_client(there), "frozen_layers: 0, 2 here, 0, 1 there")
