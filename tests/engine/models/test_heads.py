"""Heads read from files of the published names compute what plain torch computes on them; what does not fit is refused.

Row by row: a prompt in chunks, then rounds whose own forwards and extends are compared, float32.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters import target_of
from heads import ALGORITHM, KINDS, as_speculators, set_draft_ids, write_head
from node_pair import params
from oracle import Oracle
from own_mtp import OwnMtpOracle, StreamMtpOracle, with_mtp
from quantized import SCHEMES, quantized
from safetensors.torch import load_file, save_file
from solo import Solo, SpyLog, spied
from thinned import halved, thinned

from baton.decode_node.config import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.models.heads import _check_target_ids, _embedding, _output
from baton.metadata.errors import BatonError, ConfigError, ModelError

BOUND = 1e-4
PROMPT = random.Random(3).choices(range(512), k=11)
WIDTHS = {"eagle3": 24, "frozen-kv-mtp": 24}  # heads of another width than their target's

Checkpoints = Callable[..., Path]


@pytest.fixture
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", num_hidden_layers=3)


def head_of(kind: str, model: Path, directory: Path, **changes: Any) -> Path:
    own = {"hidden_size": WIDTHS[kind]} if kind in WIDTHS else {}
    return write_head(directory, kind, model, **(own | changes))


@pytest.mark.parametrize(("kind", "temperature"), halved(KINDS, [0.0, 1.0]))
def test_states_and_logits_equal_plain_torch(
    kind: str, temperature: float, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    model = target_of(kind, checkpoint, num_hidden_layers=3)
    head = head_of(kind, model, tmp_path / kind)
    check_rows(Oracle(kind, head, model), model, head, temperature)


OWN_LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5}),
    ("deepseek_v3", {"first_k_dense_replace": 1, "q_lora_rank": 48}),
    ("glm4_moe_lite", {}),
    ("mimo_v2_flash", {}),
]


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("family", "more"), OWN_LAYERS, ids=[family for family, _ in OWN_LAYERS])
def test_a_targets_own_layer_with_experts_equals_transformers(
    family: str, more: dict[str, Any], temperature: float, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    model = with_mtp(checkpoint(family, num_hidden_layers=3, **more), tmp_path / "model")
    check_rows(OwnMtpOracle(model), model, model, temperature)


@pytest.mark.parametrize("temperature", thinned([0.0, 1.0], lambda i, _: i == 1))
def test_a_layer_over_the_streams_of_its_target_equals_transformers(
    temperature: float, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """All residual streams go in and come out."""
    model = with_mtp(checkpoint("deepseek_v4"), tmp_path / "model")
    check_rows(StreamMtpOracle(model), model, model, temperature)


@pytest.mark.parametrize("name", thinned(["blocks", "w8a16"], lambda i, _: i == 0))
def test_a_targets_own_layer_in_fp8_rounds_as_the_format_says(
    name: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    family, more = OWN_LAYERS[1]
    plain = with_mtp(checkpoint(family, num_hidden_layers=3, **more), tmp_path / "plain")
    model = quantized(plain, tmp_path / "fp8", SCHEMES[name])
    check_rows(OwnMtpOracle(plain, SCHEMES[name]), model, model, 0.0)


def check_rows(oracle: Oracle | OwnMtpOracle | StreamMtpOracle, model: Path, head: Path, temperature: float) -> None:
    kind = oracle.kind
    solo = Solo(model, speculative=ALGORITHM[kind], draft_model=str(head))
    with spied(solo.drafter) as log:
        sequence = solo.start(PROMPT, params(30, temperature=temperature, seed=5), chunk=4)
        if ALGORITHM[kind] != "frozen-kv-mtp":
            states, theirs = oracle.rows(sequence.token_ids, [])
            assert [each.positions for each in log] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10]]
            close(torch.cat([each.recurrent for each in log]), states)
            close(log.logits[-1], theirs[-1:])
        for num_steps in (1, 4, 3, 0, 0, 4):
            check_round(solo, oracle, sequence, num_steps, log)


def check_round(
    solo: Solo, oracle: Oracle | OwnMtpOracle | StreamMtpOracle, sequence: Any, num_steps: int, log: SpyLog
) -> None:
    """Every forward of one round, and the logits that followed it, against rows computed anew."""
    log.clear()
    before, num_missed = list(sequence.token_ids), sequence.num_missed
    missed = list(range(sequence.num_computed - num_missed, sequence.num_computed))
    [accepted] = solo.round([sequence], num_steps)
    own = [each for each in log if not each.is_extend]
    if ALGORITHM[oracle.kind] == "frozen-kv-mtp":
        tokens = [each.tokens[0] for each in own]  # the bonus token, then d_1 ..
        states, theirs = oracle.rows(before, tokens[1:])
        assert len(own) == num_steps and tokens[:1] == before[-1:] * (num_steps > 0)
        if num_steps:
            close(torch.cat([each.recurrent for each in own]), states)
            close(torch.cat(log.logits), theirs)
        return
    assert len(own) == max(0, num_steps - 1)
    if num_steps == 0:
        assert not log  # the drafter catches up before the next round that drafts
        return
    states, theirs = oracle.rows(before, [])
    caught_up = log[: len(log) - len(own) - 1]
    if num_missed:
        [extend] = caught_up  # as many rows as a round has: those beyond are overwritten
        assert extend.positions[:num_missed] == missed and len(extend.positions) == solo.drafter.shape.num_steps + 1
        close(extend.recurrent[:num_missed], states[-num_missed:])
        close(log.logits.pop(0), theirs[-1:])
    assert bool(caught_up) == bool(num_missed)
    states, theirs = oracle.rows(before, [each.tokens[0] for each in own])
    if own:
        close(torch.cat([each.recurrent for each in own]), states[-len(own) :])
        close(torch.cat(log.logits[:-1]), theirs[-len(own) :])
    states, theirs = oracle.rows(sequence.token_ids, [])
    num_right = accepted.num_accepted + 1  # the later rows of the extend follow rejected drafts
    close(log[-1].recurrent[:num_right], states[-num_right:])
    close(log.logits[-1], theirs[-1:])
    close(state_of(solo, sequence), states[-1])


def state_of(solo: Solo, sequence: Any) -> torch.Tensor:
    """[recurrent width] of what the drafter keeps."""
    hidden = solo.draft(sequence).hidden
    assert hidden is not None and len(hidden) == 1
    return hidden[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal within the bound; excluded ids are the same ones."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert torch.equal(ours.isinf(), theirs.isinf())
    difference = float((ours - theirs).nan_to_num().abs().max())
    assert difference < BOUND * max(1.0, float(theirs.nan_to_num(neginf=0.0).abs().max())), difference


def test_a_wrong_projection_is_noticed(model: Path, tmp_path: Path) -> None:
    """The comparison itself: halves of `fc` in the wrong order do not pass."""
    head = head_of("eagle", model, tmp_path / "eagle")
    swapped = Path(shutil.copytree(head, tmp_path / "swapped"))
    change(swapped, {"fc.weight": lambda weight: weight.roll(weight.shape[1] // 2, 1)})
    oracle = Oracle("eagle", swapped, model)
    solo = Solo(model, speculative="eagle", draft_model=str(head))
    sequence = solo.start(PROMPT, params(5))
    with pytest.raises(AssertionError):
        close(state_of(solo, sequence), oracle.rows(sequence.token_ids, [])[0][-1])


# --- layouts as files have them ---


def change(directory: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Damages a directory: tensors by name (None: gone, a function: changed, else replaced), fields of config.json."""
    path = directory / "model.safetensors"
    values = load_file(path)
    for name, value in (tensors or {}).items():
        if value is None:
            del values[name]
        else:
            values[name] = value(values[name]).contiguous() if callable(value) else value
    save_file(values, path, {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return directory


def engine(model: Path, head: Path, speculative: str, **settings: Any) -> Engine:
    return Engine(
        DecodeConfig(
            model=str(model),
            device="cpu",
            threads=1,
            num_pages=8,
            speculative=speculative,
            draft_model=str(head),
            **settings,
        )
    )


def test_names_may_carry_a_leading_model(model: Path, tmp_path: Path) -> None:
    head = head_of("eagle", model, tmp_path / "eagle")
    values = load_file(head / "model.safetensors")
    states = []
    for prefix in ("", "model."):
        save_file(
            {prefix + name: value for name, value in values.items()}, head / "model.safetensors", {"format": "pt"}
        )
        solo = Solo(model, speculative="eagle", draft_model=str(head))
        states.append(state_of(solo, solo.start(PROMPT, params(5))))
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_input_norm_of_eagles_first_layer_is_ignored(prefix: str, model: Path, tmp_path: Path) -> None:
    """Some published files carry it unused; whatever it holds, the states are those of the file without it."""
    head = head_of("eagle", model, tmp_path / "eagle")
    values = {prefix + name: value for name, value in load_file(head / "model.safetensors").items()}
    states = []
    for extra in ({}, {f"{prefix}layers.0.input_layernorm.weight": torch.full((64,), 3.0)}):
        save_file(values | extra, head / "model.safetensors", {"format": "pt"})
        solo = Solo(model, speculative="eagle", draft_model=str(head))
        states.append(state_of(solo, solo.start(PROMPT, params(5))))
    assert torch.equal(states[0], states[1])


def test_eagle3_layer_under_either_name_and_ids_in_either_form(model: Path, tmp_path: Path) -> None:
    """`midlayer.*` or `layers.0.*`; ids of inputs at the top level, of outputs (one less) in eagle_config."""
    head = head_of("eagle3", model, tmp_path / "eagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    twin = Path(shutil.copytree(head, tmp_path / "twin"))
    values = {n.replace("midlayer.", "layers.0."): v for n, v in load_file(head / "model.safetensors").items()}
    save_file(values, twin / "model.safetensors", {"format": "pt"})
    outputs = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    change(twin, eagle_aux_hidden_state_layer_ids=None, eagle_config=outputs)
    solos = [Solo(model, speculative="eagle3", draft_model=str(each)) for each in (head, twin)]
    states = [state_of(solo, solo.start(PROMPT, params(5))) for solo in solos]
    assert torch.equal(states[0], states[1])
    assert engine(model, twin, "eagle3").speculation.aux_layers == (1, 2, 3)


def test_eagle3_in_the_layout_of_speculators(model: Path, tmp_path: Path) -> None:
    """Also with the residual after hidden_norm, as that library trains heads by default."""
    head = head_of("eagle3", model, tmp_path / "eagle3", norm_before_residual=True)
    twin = as_speculators(Path(shutil.copytree(head, tmp_path / "twin")))
    check_rows(Oracle("eagle3", head, model), model, twin, 0.0)


Damage = Callable[[Path], Path]
REFUSED: list[tuple[str, str, Damage, type[BatonError], list[str]]] = [
    ("eagle", "eagle", lambda d: change(d, hidden_size=32), ConfigError, ["hidden size 32", "64"]),
    ("eagle", "eagle", lambda d: change(d, vocab_size=500), ConfigError, ["vocabulary of 500", "512"]),
    ("eagle", "eagle", lambda d: change(d, {"fc.weight": None}), ModelError, ["no head for eagle, eagle3, mtp"]),
    ("eagle", "eagle", lambda d: change(d, {"layers.0.mlp.up_proj.weight": None}), ModelError, ["mlp.up_proj.weight"]),
    ("eagle", "eagle", lambda d: change(d, {"fc.weight": torch.zeros(64, 64)}), ModelError, ["fc.weight", "64, 128"]),
    ("eagle", "eagle3", lambda d: d, ConfigError, ["eagle3", "head for eagle"]),
    ("eagle", "mtp", lambda d: d, ConfigError, ["mtp", "head for eagle"]),
    ("mtp-deepseek", "eagle", lambda d: d, ConfigError, ["head for mtp", "eagle"]),
    ("mtp-mimo", "eagle3", lambda d: d, ConfigError, ["head for mtp", "eagle3"]),
    ("mtp-mimo", "mtp", lambda d: change(d, hidden_size=32), ConfigError, ["hidden size 32", "64"]),
    ("eagle3", "eagle3", lambda d: change(d, target_hidden_size=128), ConfigError, ["hidden size 128", "64"]),
    (
        "eagle3",
        "eagle3",
        lambda d: change(d, eagle_aux_hidden_state_layer_ids=[0, 1, 4]),
        ConfigError,
        ["[4]", "0 to 3"],
    ),
    (
        "eagle3",
        "eagle3",
        lambda d: change(d, eagle_aux_hidden_state_layer_ids=[0, 1]),
        ConfigError,
        ["three", "(0, 1)"],
    ),
    (
        "eagle3",
        "eagle3",
        lambda d: change(d, eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3]),
        ConfigError,
        ["three", "(0, 1, 2, 3)"],
    ),
    ("eagle", "eagle", lambda d: change(d, {"fc.weight": torch.zeros(64, 192)}), ModelError, ["fc.weight", "64, 128"]),
    ("eagle3", "eagle3", lambda d: change(d, {"d2t": None}), ModelError, ["draft_vocab_size is 256", "d2t"]),
    (
        "eagle3",
        "eagle3",
        lambda d: change(d, {"d2t": None}, draft_vocab_size=600),
        ModelError,
        ["draft_vocab_size is 600", "d2t"],
    ),
    ("eagle3", "eagle3", lambda d: change(d, {"d2t": torch.arange(255)}), ModelError, ["d2t", "255"]),
    ("eagle3", "eagle3", lambda d: change(d, {"d2t": torch.full((256,), 400)}), ModelError, ["d2t", "511"]),
    ("eagle3", "eagle3", lambda d: change(d, {"d2t": torch.arange(256).neg()}), ModelError, ["d2t", "twice"]),
    (
        "eagle3",
        "eagle3",
        lambda d: change(d, {"midlayer.hidden_norm.weight": None}),
        ModelError,
        ["hidden_norm.weight"],
    ),
    ("eagle3", "eagle3", lambda d: change(d, {"lm_head.weight": None}), ModelError, ["lm_head.weight"]),
    (
        "eagle",
        "eagle",
        lambda d: change(d, {"embed_layernorm.weight": torch.ones(64)}),
        ModelError,
        ["embed_layernorm"],
    ),
    (
        "eagle",
        "eagle",
        lambda d: change(d, {"layers.1.input_layernorm.weight": torch.ones(64)}),
        ModelError,
        ["layers.1.input_layernorm"],
    ),
    (
        "eagle3",
        "eagle3",
        lambda d: change(d, {"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        ModelError,
        ["q_norm"],
    ),
    *(
        ("eagle3", "eagle3", lambda d, fields=fields: change(d, **fields), ModelError, [words])
        for fields, words in (
            (
                {"norm_before_fc": True},
                "config.json: norm_before_fc = True is not served for an EAGLE-3 head; False is",
            ),
            ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc = True is not served"),
            ({"fc_norm": True}, "fc_norm = True"),
            ({"norm_output": True}, "norm_output = True"),
            ({"parallel_drafting": True}, "parallel_drafting = True"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
            ({"num_hidden_layers": 2}, "num_hidden_layers = 2 is not served for an EAGLE-3 head; 1 is"),
        )
    ),
    ("eagle", "frozen-kv-mtp", lambda d: d, ModelError, ["no FROZEN_KV_MTP head"]),
    ("frozen-kv-mtp", "eagle", lambda d: d, ModelError, ["no head for eagle, eagle3, mtp"]),
]


@pytest.mark.parametrize(("kind", "asked", "damage", "error", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_words(
    kind: str, asked: str, damage: Damage, error: type[BatonError], words: list[str], model: Path, tmp_path: Path
) -> None:
    head = damage(head_of(kind, model, tmp_path / "head"))
    with pytest.raises(error) as raised:
        engine(model, head, asked)
    assert all(word in str(raised.value) for word in [*words, "head"]), raised.value


@pytest.mark.parametrize("asked", ["eagle", "eagle3", "mtp", "frozen-kv-mtp", "standalone"])
def test_a_directory_that_is_none_is_refused(asked: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        engine(model, tmp_path / "nowhere", asked)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty"):
        engine(model, tmp_path / "empty", asked)
    with pytest.raises(ConfigError, match=f"{asked} needs --draft-model"):
        Engine(DecodeConfig(model=str(model), device="cpu", speculative=asked))  # type: ignore[arg-type]


# --- a reduced vocabulary ---


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 4, 9], None),
        ([9, 0, 4], None),
        ([0, 4], "d2t maps 2 ids, but draft_vocab_size is 3"),
        ([0, 4, 7, 9], "d2t maps 4 ids, but draft_vocab_size is 3"),
        ([], "d2t maps 0 ids"),
        ([-1, 4, 9], "some outside 0 to 9"),
        ([0, 4, 10], "some outside 0 to 9"),
        ([0, 9, 9], "twice"),
        ([0, 0, 9], "twice"),
    ],
)
def test_draft_ids_are_as_many_as_the_head_has_and_each_one_of_the_targets(ids: list[int], words: str | None) -> None:
    target_ids = torch.tensor(ids, dtype=torch.int64)
    if words is None:
        _check_target_ids(Path("head"), target_ids, 3, 10)
    else:
        with pytest.raises(ModelError, match=words):
            _check_target_ids(Path("head"), target_ids, 3, 10)


@pytest.mark.parametrize("num_ids", [1, 37, 512])
def test_draft_ids_in_any_order_are_the_same_head(num_ids: int, model: Path, tmp_path: Path) -> None:
    """Rows are brought into the order of the target's ids, biases too. A whole vocabulary needs no ids then."""
    head = head_of("eagle3", model, tmp_path / "head")
    shuffled = torch.randperm(512, generator=torch.Generator().manual_seed(3))[:num_ids]
    states, found = torch.randn(4, 24, generator=torch.Generator().manual_seed(4)), []
    for ids in (shuffled.sort().values, shuffled):
        set_draft_ids(head, ids)
        change(head, {"lm_head.bias": ids / 512})
        own = engine(model, head, "eagle3").drafter._head  # type: ignore[union-attr]
        found.append((own.logit_ids, own.logits(states)))
    (ids, logits), (other_ids, other_logits) = found
    assert logits.shape == (4, num_ids)
    torch.testing.assert_close(logits, other_logits, rtol=0, atol=1e-6)
    if num_ids == 512:
        assert ids is other_ids is None
    else:
        assert ids.dtype is torch.int32 and ids.tolist() == other_ids.tolist() == sorted(shuffled.tolist())


def test_ids_that_reorder_the_targets_own_output_matrix_are_refused(model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", "eagle3", model)
    set_draft_ids(head, torch.arange(512))
    change(head, {"lm_head.weight": None})
    assert engine(model, head, "eagle3").drafter._head.logit_ids is None  # type: ignore[union-attr]
    change(head, {"d2t": torch.arange(512).flip(0) - torch.arange(512)})
    with pytest.raises(ModelError, match=r"no lm_head\.weight, but its d2t orders"):
        engine(model, head, "eagle3")


def test_a_head_without_ends_of_its_own_takes_the_targets_only_if_all_sizes_are_equal() -> None:
    source: Any = SimpleNamespace(has=lambda _: False)
    target: Any = SimpleNamespace(embed="embed", logits="logits", config=SimpleNamespace(hidden_size=64))
    for size in (32, 64, 96):
        config: Any = SimpleNamespace(hidden_size=size, vocab_size=512)
        file: Any = SimpleNamespace(directory=Path("head"), config=config)
        with nullcontext() if size == 64 else pytest.raises(ModelError, match=f"hidden size {size} needs embed_tokens"):
            assert _embedding(source, config, target) == "embed"
        for draft_vocab in (256, 512, 600):
            fits = (size, draft_vocab) == (64, 512)
            with nullcontext() if fits else pytest.raises(ModelError, match=f"the draft has {draft_vocab} of {size}"):
                assert _output(source, file, draft_vocab, None, target) == ("logits", None)
