"""A planted text: the engine continues any prompt by the rule, and faults of KV, position, mask or compaction show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic
import tensor_files
import torch
from node_pair import NodePair, node_pairs, params
from planted import PLANTED, PlantedModel, in_blocks, maker, write_planted
from planted_models import random_prompt, small
from planted_text import PlantedText
from solo import Solo
from thinned import is_whole, thinned

from baton.engine.checkpoint.made_checkpoint import EveryName
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.layers.delta_net import DeltaNet
from baton.engine.models.registry import tensor_specs
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.kernels.attention.attention import Tree
from baton.kernels.products.fp8 import BLOCK, dequantized
from baton.metadata.errors import ModelError

Planted = Callable[..., Path]
PAGE = 16


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """`planted("qwen3-8b", dtype=...)` -> directory of a small planted model, written once."""
    written: dict[tuple[Any, ...], Path] = {}

    def get(architecture: str = "llama-3.1-8b", **fields: Any) -> Path:
        key = (architecture, *sorted(fields.items()))
        if key not in written:
            written[key] = tmp_path_factory.mktemp("planted")
            write_planted(written[key], small(architecture, **fields))
        return written[key]

    return get


def engine_of(model: Path, dtype: str = "float32", num_pages: int = 128) -> Engine:
    return Engine(EngineConfig(model=str(model), device="cpu", threads=1, num_pages=num_pages, dtype=dtype))  # type: ignore[arg-type]


# --- the rule ---


@pytest.mark.parametrize("vocab_size", [1024, 128_256, 151_936])
def test_the_rule_read_out_token_by_token(vocab_size: int) -> None:
    """Follows the sentences of planted_text.py without numpy."""
    text = PlantedText(vocab_size)
    assert sorted(text.ids.tolist()) == list(range(vocab_size))
    for num_tokens in (1, 2, 3, 7, 300):
        ids = random_prompt(num_tokens, num_tokens, vocab_size)
        keys, last = [int(text.keys[token]) for token in ids], ids[-1]
        high = 0
        for bit, (read, sources) in enumerate(zip(text.reads, text.sources(ids), strict=True)):
            if read.offset is None:
                target = int(f"{keys[-1]:0{text.key_bits}b}" * 2, 2) >> (text.key_bits - read.rotation)
                target = target % 2**text.key_bits ^ read.mask
                nearest = min(key ^ target for key in keys)
                assert sources == [at for at, key in enumerate(keys) if key ^ target == nearest]
            else:
                assert sources == [max(0, num_tokens - 1 - read.offset)]
            (value,) = {int(text.values[ids[at], bit]) for at in sources}  # whichever it is, it reads the same
            high |= value << bit
        low = (int(text.raw_codes[last]) % text.num_codes % text.base + 1) % text.base
        assert text.successor(ids) == text.ids[high * text.base + low]


def test_a_continuation_is_successor_after_successor_and_varied() -> None:
    text, ids = PlantedText(128_256), random_prompt(200, 1, 128_256)
    continuation = text.continuation(ids, 400)
    for token in continuation:
        assert token == text.successor(ids)
        ids.append(token)
    assert len(set(continuation)) > 380
    assert set(text.raw_codes[continuation] < text.num_codes) == {True}


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="256 is too small"):
        PlantedText(256)


# --- the weights ---


def test_a_model_whose_layers_all_have_a_window_is_refused(tmp_path: Path) -> None:
    fields = synthetic.ARCHITECTURES["deepseek-v4-flash"] | {
        "rope_theta": 1e9,
        "rope_scaling": {"rope_type": "default"},
    }
    with pytest.raises(ModelError, match="no layer of DeepseekV4ForCausalLM attends to all tokens"):
        PlantedModel(tensor_files.write_config(tmp_path, fields | {"tie_word_embeddings": False}))


DELTA = "qwen3.5-9b"  # eight of its layers have attention, and nine bits are read there


@pytest.mark.parametrize(
    "architecture", [each for each in synthetic.ARCHITECTURES if "deepseek-v4" not in each and each != DELTA]
)
def test_real_sizes_have_room_for_the_text(tmp_path: Path, architecture: str) -> None:
    """Every read has its own layer, and the norm scales the embeddings by a power of two."""
    fields = synthetic.ARCHITECTURES[architecture] | {"tie_word_embeddings": False, "rope_theta": 1e9}
    model = PlantedModel(tensor_files.write_config(tmp_path, fields | {"rope_scaling": {"rope_type": "default"}}))
    layers = [place.layer for place in model.places]
    assert layers == sorted(set(layers))
    without_window = [layer for layer, window in enumerate(model.config.sliding_window) if window is None]
    assert (layers[0], layers[-1]) == (without_window[0], without_window[-1])
    assert (model.text.num_bits, model.text.key_bits, model.stream.scale) == (10, 13, 8.0)


@pytest.mark.parametrize("architecture", ["llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_the_margin_is_far_above_the_error_of_16_bits(planted: Planted, architecture: str) -> None:
    """Checks every position of a prompt computed in chunks."""
    model, ids = planted(architecture), random_prompt(500, 5)
    text = PlantedText(1024)
    expected = torch.tensor([text.successor(ids[: end + 1]) for end in range(len(ids))])
    logits: dict[str, torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        engine, pages = engine_of(model, dtype), list(range(1, 40))
        chunks = [(start, ids[start : start + 256]) for start in range(0, len(ids), 256)]
        rows = [BatchRow(chunk, start, pages, num_logits=len(chunk)) for start, chunk in chunks]
        logits[dtype] = torch.cat([engine.forward([row]) for row in rows])
        right = logits[dtype].gather(1, expected.unsqueeze(1))
        others = logits[dtype].scatter(1, expected.unsqueeze(1), float("-inf")).amax(1, keepdim=True)
        assert (right - others).min() > 2.0
        assert logits[dtype].max() < 16.0
    error = (logits["bfloat16"] - logits["float32"]).abs().max()
    assert 1e-4 < error < 0.1  # the rest of the model does compute something


def test_random_weights_are_not_zero_and_write_beside_the_text(tmp_path: Path) -> None:
    model = write_planted(tmp_path, small(dtype="float32"))
    engine = engine_of(tmp_path)
    batch = ForwardBatch.build([BatchRow(random_prompt(64), 0, [1, 2, 3, 4])], PAGE, "cpu")
    first, *_, last = engine.model.forward_with_aux(batch, engine.target_pools, range(5)).aux
    moved = last - first
    beside = moved[:, model.dims.size :]
    assert (beside.std(0) > 0.3 * model.stream.random).all()
    assert first[:, model.dims.size :].std() == pytest.approx(model.stream.random, rel=0.05)
    assert (moved[:, : model.dims.result.start] == 0).all()
    torch.testing.assert_close(moved[:, model.dims.result].abs(), torch.full((64, 5), 1 / 16), rtol=1e-3, atol=0)


def test_a_model_that_cannot_hold_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="more kv heads"):
        write_planted(tmp_path, small(num_hidden_layers=2, num_key_value_heads=2))
    with pytest.raises(ModelError, match=r"head_dim 32 at rope_theta 1e\+09 cannot"):
        write_planted(tmp_path, small(head_dim=32))
    with pytest.raises(ModelError, match="hidden_size 64"):
        write_planted(tmp_path, small(hidden_size=64))
    for changes, words in (
        ({"q_lora_rank": 48}, "q_lora_rank 48: a text is planted in models without"),
        ({"qk_nope_head_dim": 8}, "kv_lora_rank 64 and qk_nope_head_dim 8 are too small"),
        ({"qk_rope_head_dim": 16}, r"qk_rope_head_dim 16 at rope_theta 1e\+09 cannot"),
    ):
        with pytest.raises(ModelError, match=words):
            write_planted(tmp_path, small("deepseek-v2-lite", **changes))
    for share, words in ((0.25, "head_dim 64 or more"), (0.954, "has 6 numbers that are not rotated")):
        with pytest.raises(ModelError, match=words):
            write_planted(tmp_path, small("glm-4.5-air", partial_rotary_factor=share))
    config = tensor_files.write_config(tmp_path, small(rope_theta=10000.0, rope_scaling=None))
    with pytest.raises(ModelError, match="rope_theta 10000 cannot"):
        PlantedModel(config)


# --- the whole engine ---


@pytest.mark.parametrize(
    "architecture", thinned(["qwen3-30b-a3b", "deepseek-v2-lite", "glm-4.5-air"], lambda i, _: i == 2)
)
def test_weights_may_be_made_where_they_are_loaded(architecture: str, tmp_path: Path) -> None:
    """A mixture of experts without files: its routers send tokens anywhere, and its experts write beside the text."""
    config = tensor_files.write_config(tmp_path, small(architecture) | PLANTED)
    tensor_files.write_tokenizer(tmp_path, config.vocab_size)
    solo = Solo(tmp_path, speculative="ngram", load_format="planted:maker")
    prompt = random_prompt(150, 3)
    sequence = solo.start(prompt, params(60), chunk=37)
    assert solo.run(sequence, 40, 3) == PlantedText(1024).continuation(prompt, 40)
    quantized = Solo(tmp_path, speculative="ngram", load_format="planted:maker", quantization="fp8")
    assert quantized.run(quantized.start(prompt, params(30), chunk=150), 20, 0) == sequence.token_ids[150:170]


@pytest.mark.parametrize(
    ("architecture", "fields", "dtype"),
    thinned(
        [
            ("llama-3.1-8b", synthetic.FP8_BLOCKS, "float32"),
            ("llama-3.1-8b", synthetic.FP8_BLOCKS, "bfloat16"),
            ("qwen3-30b-a3b", synthetic.FP8_BLOCKS, "float32"),
            ("deepseek-v2-lite", synthetic.FP8_BLOCKS, "float32"),
            ("gpt-oss-20b", {}, "float32"),
            ("gpt-oss-20b", {}, "bfloat16"),
        ],
        lambda i, *_: i in (1, 3, 4),
    ),
)
def test_weights_may_be_made_in_the_format_of_a_quantized_checkpoint(
    architecture: str, fields: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    config = tensor_files.write_config(tmp_path, small(architecture, **fields) | PLANTED)
    tensor_files.write_tokenizer(tmp_path, config.vocab_size)
    solo = Solo(tmp_path, speculative="ngram", load_format="planted:maker", dtype=dtype)
    prompt = random_prompt(150, 3)
    assert solo.run(solo.start(prompt, params(40), chunk=37), 20, 3) == PlantedText(1024).continuation(prompt, 20)


@pytest.mark.parametrize("architecture", ["qwen3-30b-a3b", "glm-4.5-air", "deepseek-v2-lite", "gpt-oss-20b"])
def test_routers_do_not_see_what_all_tokens_have_in_common(architecture: str, tmp_path: Path) -> None:
    """Else tokens choose fewer experts than uniform choices would, and a step reads less than its floor counts."""
    model = PlantedModel(tensor_files.write_config(tmp_path, small(architecture) | PLANTED))
    shared = [model.dims.one, *range(model.dims.ballast.start, model.dims.ballast.stop)]
    specs = tensor_specs(model.config, EveryName())
    routers = [model.tensor(spec) for spec in specs if spec.name.endswith((".gate.weight", ".router.weight"))]
    assert model.config.experts is not None and len(routers) == len(model.config.experts.layers)
    assert all(not weight[:, shared].any() and weight.any() for weight in routers)


def test_blocks_of_fp8_keep_powers_of_two_and_odd_sizes() -> None:
    weight = torch.randn(300, 200)
    weight[:, 7] = 2.0
    values, scales = in_blocks(weight)
    assert (values.shape, scales.shape) == (weight.shape, (3, 2))
    meant = dequantized(values, scales, BLOCK)
    assert torch.equal(meant[:, 7], weight[:, 7])
    torch.testing.assert_close(meant, weight, rtol=2**-4, atol=2**-8)


def test_formats_without_a_planted_text_are_refused(tmp_path: Path) -> None:
    fields = small(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    config = tensor_files.write_config(tmp_path, fields | PLANTED)
    with pytest.raises(ModelError, match="scales of each tensor: a text is planted in blocks"):
        maker(config)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.whole)])
@pytest.mark.parametrize("architecture", thinned(["llama-3.1-8b", "qwen3-8b", "deepseek-v2-lite"], lambda i, _: i != 1))
def test_rounds_with_drafts_continue_as_the_rule_says(planted: Planted, architecture: str, dtype: str) -> None:
    solo = Solo(planted(architecture), speculative="ngram", dtype=dtype)
    text = PlantedText(1024)
    for num_prompt, num_tokens in ((1, 40), (150, 200 if is_whole() else 60)):
        prompt = random_prompt(num_prompt, 3)
        sequence = solo.start(prompt, params(num_tokens + 8), chunk=37)
        assert solo.run(sequence, num_tokens, 3) == text.continuation(prompt, num_tokens)


@pytest.fixture
def pair(planted: Planted) -> Iterator[NodePair]:
    pair = NodePair(planted("llama-3.1-8b"), prefill={"chunk_tokens": 64}, decode={"chunk_tokens": 64})
    yield pair
    pair.check_books()
    pair.close()


def test_prefill_and_decode_continue_as_the_rule_says(pair: NodePair) -> None:
    text, prompts = PlantedText(1024), [random_prompt(num, num) for num in (1, 5, 90, 200)]
    for at, prompt in enumerate(prompts):
        pair.submit(f"r{at}", prompt, params(60))
    results = pair.run()
    for at, prompt in enumerate(prompts):
        assert results[f"r{at}", 0].ids == text.continuation(prompt, 60)


# --- faults change the text ----


class Context:
    """The KV of a prompt in pages 1, 2, ..., and the next token by the rule."""

    def __init__(self, model: Path, num_prompt: int = 160, num_next: int = 64) -> None:
        text = PlantedText(1024)
        self.engine = engine_of(model)
        self.prompt = random_prompt(num_prompt, 9)
        self.next = text.continuation(self.prompt, num_next)
        self.pages = list(range(1, -(-(num_prompt + num_next) // PAGE) + 1))
        self.engine.forward([BatchRow(self.prompt[:-1], 0, self.pages)])
        self.kv = self.engine.kv.clone()

    def wrong(self, *, kv: torch.Tensor | None = None, pages: list[int] | None = None, shift: int = 0) -> int:
        """Count the next tokens that come out differently over this KV, with these pages, at shifted positions."""
        self.engine.kv.copy_(self.kv if kv is None else kv)
        ids = [self.prompt[-1], *self.next[:-1]]
        batch = ForwardBatch.build([BatchRow(ids, len(self.prompt) - 1, pages or self.pages)], PAGE, "cpu")
        batch = dataclasses.replace(batch, positions=batch.positions + shift)
        tokens = (
            self.engine.model.logits(self.engine.model.forward(batch, self.engine.target_pools)).argmax(-1).tolist()
        )
        return sum(token != right for token, right in zip(tokens, self.next, strict=True))


@pytest.mark.parametrize("architecture", thinned(["llama-3.1-8b", "qwen3-8b"], lambda i, _: i == 0))
def test_faults_of_pages_and_positions_change_the_text(planted: Planted, architecture: str) -> None:
    context = Context(planted(architecture))
    assert context.wrong() == 0
    generator = torch.Generator().manual_seed(2)
    for page in range(1, 10):  # the prompt's full pages
        for half in (0, 1):  # K, V
            kv = context.kv.clone()
            kv[:, page, half] = (
                kv[:, page, half]
                .flatten()[torch.randperm(kv[:, page, half].numel(), generator=generator)]
                .view_as(kv[:, page, half])
            )
            assert context.wrong(kv=kv) > 0, (page, half)
        dropped = [*context.pages]
        dropped[page - 1] = 0
        assert context.wrong(pages=dropped) > 0, page
    for shift in (-1, 1):
        assert context.wrong(shift=shift) > 0


def test_faults_of_a_tree_change_the_text(planted: Planted) -> None:
    """The tree is 0 - (1, 2, 3) - 4 under 3, and each node sees only its own path.

    Once the path 3, 4 is accepted, its KV is moved to the places of nodes 1 and 2.
    """
    context, text = Context(planted("llama-3.1-8b")), PlantedText(1024)
    wrong = {"right": 0, "siblings": 0, "not moved": 0}
    for at in range(0, 60, 3):
        known = [*context.prompt, *context.next[:at]]
        d1, d2, d3 = context.next[at : at + 3]
        nodes = [known[-1], (d1 + 1) % 1024, (d1 + 7) % 1024, d1, d2]
        paths = [[0], [0, 1], [0, 2], [0, 3], [0, 3, 4]]
        expected = [text.successor([*known[:-1], *(nodes[node] for node in path)]) for path in paths]
        assert (expected[3], expected[4]) == (d2, d3)
        visible = torch.tensor([[node in path for node in range(5)] for path in paths])
        for name, seen in (("right", visible), ("siblings", torch.ones(5, 5, dtype=torch.bool))):
            wrong[name] += verify(context, known, nodes, seen) != expected
        length, table = torch.tensor([[len(known) - 1]]), torch.tensor([context.pages])
        for name in ("not moved", "right"):
            verify(context, known, nodes, visible)
            if name == "right":
                context.engine.move_kv(table, length + torch.tensor([[3, 4]]), length + torch.tensor([[1, 2]]))
            logits = context.engine.forward([BatchRow([d3], len(known) + 2, context.pages)])
            wrong[name] += logits.argmax(-1).tolist() != [text.successor([*known, d1, d2, d3])]
    assert wrong["right"] == 0
    assert min(wrong["siblings"], wrong["not moved"]) >= 4, wrong


def verify(context: Context, known: list[int], nodes: list[int], visible: torch.Tensor) -> list[int]:
    """Return the target's token after each node of the tree in the test above."""
    start = len(known) - 1
    context.engine.kv.copy_(context.kv)
    num_kept = len(context.prompt) - 1
    if known[num_kept:-1]:
        context.engine.forward([BatchRow(known[num_kept:-1], num_kept, context.pages)])
    batch = ForwardBatch.uniform(
        torch.tensor([nodes]),
        torch.tensor([[start, start + 1, start + 1, start + 1, start + 2]]),
        torch.tensor([start + len(nodes)]),
        torch.tensor([context.pages]),
        PAGE,
        Tree(torch.tensor([start]), visible),
    )
    return (
        context.engine.model.logits(context.engine.model.forward(batch, context.engine.target_pools))
        .argmax(-1)
        .tolist()
    )


# --- a read by a recurrent state ---

NUM_PROMPT, CHUNK = (2430, 320) if is_whole() else (600, 160)  # tokens
FORGOTTEN = 1280  # tokens, after which the state is read by a chunk


@pytest.fixture
def run_delta(planted: Planted) -> Iterator[Callable[[], bool]]:
    """A function that returns whether a pair of nodes continues a prompt of a model with recurrent states by the
    rule."""
    text, prompt = PlantedText(4096, 32), random_prompt(NUM_PROMPT, 9, 4096)
    both: dict[str, Any] = {"page_size": 64, "num_pages": 90, "chunk_tokens": CHUNK, "speculative": "ngram"}

    with node_pairs() as start:

        def run() -> bool:
            pair = start(planted(DELTA), prefill=both, decode=both | {"draft_steps": 3})
            pair.submit("a", prompt, params(70))
            return pair.run(timeout_s=170)["a", 0].ids == text.continuation(prompt, 70)

        yield run


def test_published_sizes_have_room_for_a_read_by_state(tmp_path: Path) -> None:
    model = PlantedModel(tensor_files.write_config(tmp_path, synthetic.ARCHITECTURES[DELTA] | PLANTED))
    assert (model.text.num_bits, model.text.key_bits, model.stream.scale) == (10, 13, 8.0)
    [place] = [each for each in model.places if each.read.address_bits]
    assert model.config.delta is not None and place.layer in model.config.delta.layers
    assert (1 << place.read.address_bits, model.text.num_write_bits) == (64, 4)


def test_a_quarter_of_the_tokens_read_by_state_are_more_than_1000_back() -> None:
    text, ids = PlantedText(248_320, 128), random_prompt(6000, 1, 248_320)
    middle = text.num_bits // 2
    sources = [text.sources(ids[:end])[middle] for end in range(4000, 6000, 5)]
    ages = [end - source[0] for end, source in zip(range(4000, 6000, 5), sources, strict=True) if source]
    assert len(ages) > 0.9 * len(sources)
    assert sum(age > 1000 for age in ages) > len(ages) / 4


@pytest.mark.parametrize(
    "defect",
    thinned(["none", "one edge early", "lost with the prompt", "forgets after 1,000 tokens"], lambda i, _: i == 1),
)
def test_faults_of_a_state_change_the_text(
    defect: str, run_delta: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last defect loses what was written more than 1,000 tokens before the prompt's end, and nothing else."""
    state = DeltaNet._state

    def wrong(self: DeltaNet, pools: Any, pages: torch.Tensor, edge: int, block: int) -> torch.Tensor:
        match defect:
            case "one edge early":
                return state(self, pools, pages, max(0, edge - block), block)
            case "lost with the prompt":
                is_lost = edge == NUM_PROMPT // block * block
            case _:
                is_lost = defect != "none" and edge == FORGOTTEN
        found = state(self, pools, pages, edge, block)
        return torch.zeros_like(found) if is_lost else found

    monkeypatch.setattr(DeltaNet, "_state", wrong)
    assert run_delta() == (defect == "none")
