"""The shares of all ranks make the whole weight, and what cannot be divided is refused in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from thread_ranks import ThreadGroup

from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.weights import CheckpointWeights
from baton.engine.models.decoder import DecoderModel, Embedding, LmHead
from baton.engine.models.registry import load_model
from baton.engine.models.tensors import HeadTensors
from baton.engine.products.base import HEADS_IN, HEADS_OUT, INNER_IN, INNER_OUT, heads_out
from baton.engine.products.linear import Linear
from baton.engine.products.ranked import GatheredProduct, RankRows, ScatteredProduct, SummedProduct
from baton.engine.ranks.group import Group, OneRank
from baton.engine.ranks.ranks import ONE_RANK, Ranks, VocabShares
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema.kv_layout import Shard

VOCAB_SIZE = 512


class OneOf(OneRank):
    """A rank that is asked only for its place: it has no others to talk to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _weights(model: Path, group: Group, rows: RankRows | None = None) -> CheckpointWeights:
    return CheckpointWeights(Checkpoint(model), torch.float32, torch.device("cpu"), ranks=Ranks(group, rows))


def test_the_shares_of_all_ranks_sum_to_the_whole(checkpoint: Callable[..., Path]) -> None:
    """Rows of q, k and v lie side by side; columns of the output projection sum, and its bias counts once."""
    model = checkpoint("llama", attention_bias=True)
    config, x = read_model_config(model), torch.randn(3, 64)
    names = {f"model.layers.0.self_attn.{part}_proj": size for part, size in zip("qkv", (64, 32, 32), strict=True)}
    whole = _weights(model, OneRank())
    qkv = whole.fused(names, 64, split=HEADS_OUT)
    out = whole.linear("model.layers.0.self_attn.o_proj", 64, 64, split=HEADS_IN)
    assert not isinstance(out.product, SummedProduct)
    own = [_weights(model, OneOf(rank, 2)) for rank in range(2)]
    parts = [weights.fused(names, 64, split=HEADS_OUT)(x).split([32, 16, 16], 1) for weights in own]
    expected = qkv(x).split([64, 32, 32], 1)
    for index, one in enumerate(expected):
        assert torch.allclose(torch.cat([part[index] for part in parts], 1), one, atol=1e-5)
    shares = [weights.linear("model.layers.0.self_attn.o_proj", 64, 64, split=HEADS_IN) for weights in own]
    assert all(isinstance(share.product, SummedProduct) for share in shares)
    halves = [share(part) for share, part in zip(shares, x.split(32, 1), strict=True)]
    assert torch.allclose(halves[0] + halves[1], out(x), atol=1e-5)
    assert own[1].own(config).num_kv_heads * 2 == config.num_kv_heads


def test_ranks_share_a_kv_head_if_there_are_fewer_heads_than_ranks(checkpoint: Callable[..., Path]) -> None:
    """Of 4 ranks, 0 and 1 have KV head 0, and each has one query head."""
    model = checkpoint("llama")
    config = read_model_config(model)
    names = {f"model.layers.0.self_attn.{part}_proj": size for part, size in zip("qkv", (64, 32, 32), strict=True)}
    x, split = torch.randn(3, 64), heads_out(config.num_heads, config.num_kv_heads)
    q, k, v = _weights(model, OneRank()).fused(names, 64, split=split)(x).split([64, 32, 32], 1)
    for rank in range(4):
        weights = _weights(model, OneOf(rank, 4))
        own = weights.fused(names, 64, split=split)(x).split([16, 16, 16], 1)
        for part, whole, head in zip(own, (q, k, v), (rank, rank // 2, rank // 2), strict=True):
            assert torch.allclose(part, whole[:, 16 * head : 16 * (head + 1)], atol=1e-5)
        assert (weights.own(config).num_heads, weights.own(config).num_kv_heads) == (1, 1)


def test_ranks_with_sequences_of_their_own_have_all_heads_and_gather_rows(checkpoint: Callable[..., Path]) -> None:
    model, rows = checkpoint("llama"), RankRows((2,))
    weights = _weights(model, OneOf(0, 2), rows)
    prefix = "model.layers.0."
    assert weights.linear(f"{prefix}self_attn.o_proj", 64, 64, split=HEADS_IN).in_size == 64
    names = {f"{prefix}mlp.gate_proj": 128, f"{prefix}mlp.up_proj": 128}
    up = weights.fused(names, 64, split=INNER_OUT)
    down = weights.linear(f"{prefix}mlp.down_proj", 64, 128, split=INNER_IN)
    assert isinstance(up.product, GatheredProduct) and isinstance(down.product, ScatteredProduct)
    assert down(up.gated(torch.randn(2, 64))).shape == (2, 64)
    rows.lens = (3,)
    with pytest.raises(AssertionError):
        up.gated(torch.randn(2, 64))


def test_pages_have_the_heads_of_their_rank() -> None:
    """Heads are divided, and shared if they are fewer than ranks. Ranks with sequences of their own have all heads."""
    assert Ranks(OneOf(1, 2)).of_heads == Shard(1, 2) and list(Shard(1, 2).heads(4)) == [2, 3]
    assert Ranks(OneOf(5, 8)).of_heads == Shard(5, 8) and list(Shard(5, 8).heads(4)) == [2]
    assert Ranks(OneOf(1, 2), RankRows()).of_heads == ONE_RANK.of_heads == Shard(0, 1)


def test_ranks_with_sequences_of_their_own_are_nodes_and_announce_rows() -> None:
    rows = RankRows()
    ranks = Ranks(OneOf(0, 3), rows)
    assert (ranks.num_nodes, Ranks(OneOf(0, 3)).num_nodes, ONE_RANK.num_nodes) == (3, 1, 1)
    ranks.announce(7)
    assert rows.lens == (7, 7, 7)
    assert (ranks.announce_longest(9), rows.lens) == (9, (9, 1, 1))
    assert Ranks(OneOf(2, 3), RankRows()).announce_longest(9) == 1
    assert ranks.lens == (9, 1, 1) and ONE_RANK.lens == ()
    ONE_RANK.announce(7)  # nobody needs to know


def test_a_rehearsal_exchanges_rows_of_every_size_class() -> None:
    """The kernels of an exchange depend on the next power of two of what is exchanged: a request compiles none."""
    tile_size = pytest.importorskip("baton.kernels.ranks.triton_all_reduce").tile_size
    exchanged: list[tuple[int, ...]] = []

    class Recorder(OneOf):
        def gather(self, x: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
            assert x.shape == (lens[self.rank], 64)
            exchanged.append(tuple(lens))
            return x

        def reduce_scatter(self, x: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
            assert x.shape == (sum(lens), 64) and tuple(lens) == exchanged[-1]
            return x

    Ranks(Recorder(1, 3), RankRows()).rehearse_exchanges(torch.zeros(1, 64), 2500)
    assert all(len(set(lens)) == 2 for lens in exchanged), "rows of equal numbers have other kernels"
    tiles = {tile_size(max(lens) * 64, 2) for lens in exchanged}
    assert tiles == {tile_size(length * 64, 2) for length in range(1, 2501)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_each_rank_has_the_logits_of_some_tokens(checkpoint: Callable[..., Path], size: int, is_ordered: bool) -> None:
    """The shares are equal, zeros behind the last one included. An order of the rows is that of the whole."""
    model = checkpoint("llama")
    order = torch.randperm(VOCAB_SIZE) if is_ordered else None

    def head(group: Group) -> Linear:
        device = torch.device("cpu")
        return HeadTensors(model, torch.float32, device, Ranks(group)).ordered("lm_head", VOCAB_SIZE, 64, order)

    x = torch.randn(3, 64)
    whole, shares = head(OneRank())(x), [head(OneOf(rank, size))(x) for rank in range(size)]
    assert len({share.shape for share in shares}) == 1 and shares[0].shape[1] < VOCAB_SIZE / size + 16
    both = torch.cat(shares, 1)
    assert torch.allclose(both[:, :VOCAB_SIZE], whole, atol=1e-5) and not both[:, VOCAB_SIZE:].any()


def test_ranks_find_the_best_token_without_each_others_logits(checkpoint: Callable[..., Path]) -> None:
    """Both return the token of one process."""
    model_dir = checkpoint("llama")

    def model(group: Group, rows: RankRows | None = None) -> DecoderModel:
        config, ranks = read_model_config(model_dir), Ranks(group, rows)
        return load_model(model_dir, config, torch.float32, "cpu", ranks=ranks)

    x = torch.randn(5, 64)
    alone = model(OneRank())
    threads = ThreadGroup(2, timeout_s=20)

    def best(rank: int) -> tuple[list[int], list[bool]]:
        with threads.turn:
            token_ids, is_valid = model(threads.of(rank)).best(x)
        return token_ids.tolist(), is_valid.tolist()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(best, range(2)))
    assert found == [(alone.logits(x).argmax(1).tolist(), [True] * 5)] * 2
    assert [(each.name, each.width) for each in threads.traces[0]] == [("gather_columns", (5, 1))]
    assert torch.equal(model(OneOf(0, 2), RankRows()).best(x).token_ids, alone.best(x).token_ids)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_share_of_a_vocabulary_counts(size: int) -> None:
    """The best token lies in each share, at its first and last id; padding, larger than all, is never a token. Of 5
    ranks, the last has padding alone."""
    vocab_size, width = 40, {2: 24, 3: 16, 4: 11, 5: 10}[size]
    edges = [each for first in range(0, vocab_size, width) for each in (first, min(first + width, vocab_size) - 1)]
    logits = torch.randn(len(edges) + 1, vocab_size)
    for row, token in enumerate(edges):
        logits[row, token] = 50.0
    logits[-1, edges[1::2]] = 60.0  # equals: the lowest id
    padded = torch.full((len(logits), size * width), 1e4)
    padded[:, :vocab_size] = logits
    lens = [len(logits) - size, *[1] * size][:size]
    lens[-1] += len(logits) - sum(lens)
    threads = ThreadGroup(size, timeout_s=20)

    def run(rank: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        with threads.turn:
            shares = VocabShares(threads.of(rank), vocab_size)
            own = padded[:, rank * width : (rank + 1) * width].contiguous()
            return shares.best(own).token_ids.tolist(), shares.whole(own), shares.rows(own, lens)

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    assert [tokens for tokens, _, _ in found] == [[*edges, edges[1]]] * size
    assert all(torch.equal(whole, logits) for _, whole, _ in found)
    assert torch.equal(torch.cat([rows for _, _, rows in found]), logits)


def test_tied_heads_take_their_share_of_the_embedding() -> None:
    embedding, x = Embedding(torch.randn(40, 8)), torch.randn(3, 8)
    heads = [LmHead.tied(embedding, Ranks(OneOf(rank, 2))) for rank in range(2)]
    both = torch.cat([head.linear(x) for head in heads], 1)
    assert both.shape == (3, 64) and torch.allclose(both[:, :40], LmHead.tied(embedding)(x), atol=1e-5)
    assert all(head.shares is not None and head.shares.vocab_size == 40 for head in heads)
    assert LmHead.tied(embedding, Ranks(OneOf(0, 2), RankRows())).linear.out_size == 40


@pytest.mark.parametrize(
    ("family", "config", "size", "rows", "error"),
    [
        ("llama", {}, 8, None, "LlamaForCausalLM has 4 query heads, which 8 ranks cannot divide"),
        (
            "llama",
            {},
            3,
            RankRows(),
            "LlamaForCausalLM has 128 hidden units, which 3 ranks cannot divide; let --dp-attention be",
        ),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 96},
            3,
            None,
            "has 2 KV heads, which 3 ranks cannot share",
        ),
        ("qwen3_moe", {}, 3, RankRows(), "has 128 hidden units, which 3 ranks cannot divide"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 33},
            2,
            RankRows(),
            "has 33 hidden units of an expert, which 2 ranks cannot divide",
        ),
        ("deepseek_v3", {}, 3, None, "DeepseekV3ForCausalLM has 4 query heads, which 3 ranks cannot divide"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    family: str,
    config: dict[str, int],
    size: int,
    rows: RankRows | None,
    error: str,
    checkpoint: Callable[..., Path],
) -> None:
    with pytest.raises(ConfigError, match=error):
        Ranks(OneOf(0, size), rows).check(read_model_config(checkpoint(family, **config)))
