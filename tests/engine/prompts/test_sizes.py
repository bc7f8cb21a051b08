"""Which chunks of prompts a graph computes."""

from __future__ import annotations

from baton.engine.prompts.sizes import BUCKETS, MAX_SEQS, NO_PROMPT_SIZES, PromptSizes, bucket, bucket_sizes
from baton.engine.work import BatchRow


def test_buckets() -> None:
    def of(*lengths: int, num_logits: int = 1, position: int = 0) -> int | None:
        return bucket([BatchRow([1] * length, position, [], num_logits) for length in lengths], BUCKETS, 4000)

    assert [of(size) for size in BUCKETS] == list(BUCKETS)
    assert [of(size + 1) for size in BUCKETS] == [*BUCKETS[1:], None]
    assert of(*[2] * MAX_SEQS) == 16 and of(*[1] * (MAX_SEQS + 1)) is None
    assert of(5, num_logits=0) == 16 and of(5, num_logits=2) is None
    assert bucket([BatchRow([1] * 5, 0, [], num_scored=4)], BUCKETS, 4000) is None, "a graph keeps no final states"
    assert of(5, position=3995) == 16 and of(5, position=3996) is None  # beyond the columns of the table


def test_larger_layers_have_fewer_buckets() -> None:
    """The models have the shapes of Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B."""
    largest = [bucket_sizes(products)[-1] for products in (60_817_408, 218_103_808, 855_638_016)]
    assert largest == [1536, 512, 128]
    assert bucket_sizes(1) == list(BUCKETS)
    assert bucket_sizes(218_103_808, 2)[-1] == 1024, "each of two ranks computes half"
    assert bucket_sizes(218_103_808, is_fp8=True)[-1] == 1024, "in half the time"


def test_an_engine_without_graphs_holds_no_chunk() -> None:
    rows = [BatchRow([1] * 5, 0, [])]
    assert NO_PROMPT_SIZES.holding(rows) is NO_PROMPT_SIZES.holding([]) is None
    assert PromptSizes([4, 8], 100).holding(rows) == 8 and PromptSizes([4, 8], 4).holding(rows) is None
