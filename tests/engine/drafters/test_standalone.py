"""A standalone draft model equals a plain forward of it over the text and the drafts; it has no hidden state."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from direct import POISON, Direct, Text, close_kv
from plain_heads import Plain

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.speculation import read_speculation
from baton.engine.drafters.standalone import StandaloneDrafter
from baton.metadata.errors import ConfigError

DRAFT = {"hidden_size": 30, "intermediate_size": 44, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10}
SAMPLED = [{}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.5, "top_k": 40}]
Checkpoint = Callable[..., Path]


@pytest.fixture
def draft(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama", **DRAFT)


@pytest.fixture
def direct(checkpoint: Checkpoint, draft: Path) -> Direct:
    made = Direct(checkpoint("llama"), speculative="standalone", draft_model=str(draft), draft_steps=4)
    assert isinstance(made.drafter, StandaloneDrafter)
    return made


def check_kv(direct: Direct, plain: Plain, texts: Sequence[Text]) -> None:
    """Unshifted: KV at position i is of token i, for all tokens before the bonus."""
    for text in texts:
        close_kv(direct.stored(text), plain.model(text.token_ids[:-1]).kv)


def check_drafts(plain: Plain, texts: Sequence[Text], drafted: list[list[int]]) -> None:
    for text, found in zip(texts, drafted, strict=True):
        wanted: list[int] = []
        for _ in found:
            wanted.append(text.choose(plain.model(text.token_ids + wanted).logits[-1], wanted))
        assert found == wanted


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [[{}] * 3, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [64, 5, 1])
def test_prompts_and_rounds_equal_a_recompute(
    chunk: int, sampling: list[dict[str, Any]], direct: Direct, draft: Path
) -> None:
    """Prompts of unlike lengths in one batch, then rounds that accept none, some and all drafts, then rounds without
    drafts, whose tokens' KV the drafter stores later."""
    plain = Plain(draft)
    texts = [direct.text(length, **fields) for length, fields in zip((1, 7, 12), sampling, strict=True)]
    state = direct.prompt(texts, chunk)
    check_kv(direct, plain, texts)
    for num_steps, num_accepted in ((4, [0, 2, 4]), (1, [1, 0, 1]), (3, [3, 1, 0])):
        drafted = direct.propose(texts, state, num_steps)
        check_drafts(plain, texts, drafted)
        state = direct.observe(texts, state, drafted, num_accepted)
        check_kv(direct, plain, texts)
    state = direct.catch_up(texts, state, [1, 3, 2])
    check_kv(direct, plain, texts)
    check_drafts(plain, texts, direct.propose(texts, state, 4))


def test_a_round_fills_the_slot_of_its_last_draft_and_no_later_one(direct: Direct, draft: Path) -> None:
    """K + 1 forwards: the last one proposes nothing."""
    text = direct.text(5)
    state = direct.prompt([text])
    drafted = direct.propose([text], state, 3)
    assert direct.draft_kv is not None
    slots = direct.draft_kv[:, text.pages].permute(1, 4, 0, 2, 3, 5).flatten(0, 1).flatten(1)  # [num_slots, ...]
    is_empty = (slots == POISON).all(1).tolist()
    assert not any(is_empty[: 5 + 4]) and all(is_empty[5 + 4 :])
    text.token_ids += [*drafted[0], 9]  # all are accepted
    check_kv(direct, Plain(draft), [text])


def test_a_sequence_does_not_change_another_ones_drafts(direct: Direct) -> None:
    """Bit for bit: other tokens beside it, in as many rows."""
    one, *others = (direct.text(length, **SAMPLED[1]) for length in (7, 10, 10))
    results = []
    for other in others:
        state = direct.prompt([one, other], 4)
        drafted = direct.propose([one, other], state, 4)
        results.append((drafted[0], *direct.stored(one)))
    assert results[0][0] == results[1][0]
    for kept, again in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.equal(kept.keys, again.keys) and torch.equal(kept.values, again.values)  # type: ignore[union-attr]


def test_no_phase_has_a_hidden_state(direct: Direct) -> None:
    drafter, text = direct.drafter, direct.text(4)
    assert drafter.hidden.spec("extend") is None and drafter.hidden.spec("recurrent") is None
    state = direct.prompt([text])
    later = direct.observe([text], state, direct.propose([text], state, 2), [1])
    assert state.present() == later.present() == drafter.allocate(3).present() == []
    text.states = torch.zeros(text.num_computed, 64)
    with pytest.raises(AssertionError):
        direct.prompt([text])


def test_a_draft_in_another_dtype_keeps_its_kv_in_it(checkpoint: Checkpoint, draft: Path) -> None:
    settings = {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 4}
    direct, plain = Direct(checkpoint("llama"), **settings, draft_dtype="bfloat16"), Plain(draft)
    text = direct.text(9)
    state = direct.prompt([text], 4)
    assert direct.draft_kv is not None and direct.draft_kv.dtype == torch.bfloat16
    close_kv(direct.stored(text), plain.model(text.token_ids[:-1]).kv, 0.1)
    direct.propose([text], state, 4)
    text.token_ids += [3, 3, 3, 3, 3]  # the slots of the bonus and of all drafts are filled
    assert not any(bool((part == torch.tensor(POISON).bfloat16()).any()) for kv in direct.stored(text) for part in kv)


def test_a_draft_model_of_another_vocabulary_or_tokenizer_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")

    def read(draft: Path) -> None:
        config = DecodeConfig(model=str(model), speculative="standalone", draft_model=str(draft))
        read_speculation(config, model, read_model_config(model), "float32")

    for vocab_size in (500, 520):
        unlike = checkpoint("llama", vocab_size=vocab_size)
        with pytest.raises(ConfigError, match=rf"has 512 entries, .* has {vocab_size}") as raised:
            read(unlike)
        assert str(model) in str(raised.value) and str(unlike) in str(raised.value)
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ConfigError, match=r"must have the target's tokenizer: .* differ"):
        read(other)
    (other / "tokenizer.json").unlink()  # nothing to compare
    read(other)
