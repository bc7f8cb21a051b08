"""The processors' kernel against the reference, to the bit: rows that share columns, drafts among them."""

from __future__ import annotations

import pytest
import torch
from heads import some_ids
from torch import Tensor
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.sampling.processors import History, TokenColumns, process_logits_ref
from baton.kernels.sampling.triton_processors import process_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
INF, NAN = float("inf"), float("nan")
NUM_KEPT = 4


def table(vocab_size: int, seed: int = 0) -> TokenColumns:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_KEPT, vocab_size)
    counts = torch.randint(-4, 4, shape, generator=generator).clamp(min=0).to(torch.int32)
    columns = [
        torch.rand(shape, generator=generator) < 0.3,
        counts,
        torch.randn(shape, generator=generator),
        torch.rand(shape, generator=generator) < 0.2,
    ]
    return TokenColumns(*(each.to(DEVICE) for each in columns))


def rows(columns: TokenColumns, vocab_size: int, num_drafted: int) -> tuple[Tensor, History, Tensor, Tensor]:
    """Logits of seven rows, their history, penalties and bans: rows that ask for nothing among others."""
    generator = torch.Generator().manual_seed(num_drafted)
    drafted = torch.randint(0, min(5, vocab_size), (7, num_drafted), generator=generator)  # some come twice
    is_counted = torch.rand(7, num_drafted, generator=generator) < 0.6
    places = torch.tensor([3, 0, 0, 1, 1, 1, 3])
    history = History(columns, *(each.to(DEVICE) for each in (places, drafted, is_counted)))
    penalties = torch.tensor([
        [1.0, 1.3, 1.0, 0.7, 1.0, 1.7, 1.0],
        [0.0, 0.0, 0.2, -0.3, 0.0, 0.1, 0.0],
        [0.0, 0.0, 0.0, 0.5, -1.0, 0.3, 0.0],
    ])  # fmt: skip
    bans_now = torch.tensor([False, True, False, True, True, False, False])
    return random(7, vocab_size, scale=4.0), history, penalties.to(DEVICE), bans_now.to(DEVICE)


def check(logits: Tensor, history: History, penalties: Tensor, bans_now: Tensor) -> Tensor:
    """Check the kernel against the reference on the CPU, bit by bit except for the bits of a NaN. Return the result."""
    before = logits.clone()
    result = process_logits(logits, history, penalties, bans_now)
    assert torch.equal(logits.view(torch.int8), before.view(torch.int8)), "the logits have changed"
    columns = TokenColumns(*(None if each is None else each.cpu() for each in history.columns))
    on_cpu = History(columns, *(each.cpu() for each in history[1:]))
    expected = process_logits_ref(logits.cpu(), on_cpu, penalties.cpu(), bans_now.cpu())
    assert result.dtype is torch.float32 and torch.equal(result.cpu().isnan(), expected.isnan())
    ours, theirs = (each.cpu().nan_to_num(nan=0.0, posinf=INF, neginf=-INF) for each in (result, expected))
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(1, 2), (1023, 0), (2500, 6)])
def test_rows_have_the_bits_of_the_reference(vocab_size: int, num_drafted: int, dtype: torch.dtype) -> None:
    logits, *others = rows(table(vocab_size), vocab_size, num_drafted)
    result = check(logits.to(dtype), *others)
    assert not torch.equal(result, logits)


@pytest.mark.parametrize("names", [("bias",), ("stops",), ("prompt_mask", "output_counts"), ("bias", "stops")])
def test_columns_that_no_row_needs_are_not_there(names: tuple[str, ...]) -> None:
    some = table(700)
    columns = TokenColumns(**{name: getattr(some, name) for name in names})
    check(*rows(columns, 700, 3 if columns.output_counts is not None else 0))


def test_a_row_that_asks_for_nothing_stays_as_it_is() -> None:
    columns = table(900)
    assert columns.bias is not None
    columns.bias[3] = 0.0
    logits, *others = rows(columns, 900, 4)
    result = check(logits, *others)
    assert torch.equal(result[[0, 6]], logits[[0, 6]]) and not torch.equal(result[5], logits[5])


def test_what_is_no_number_stays_none() -> None:
    """Infinities too: a NaN is not hidden where a stop is banned."""
    columns = table(300)
    logits, *others = rows(columns, 300, 2)
    assert columns.stops is not None
    logits[:, ::5], logits[:, 1::7], logits[:, 2::11] = NAN, INF, -INF
    result = check(logits, *others)
    assert torch.equal(result.isnan() | logits.isnan(), result.isnan())
    assert (columns.stops[1] & logits[3].isnan()).any(), "no stop is banned where a NaN is"


def test_rows_may_lie_apart() -> None:
    logits, *others = rows(table(600), 600, 2)
    wide = torch.full((7, 900), 1e9, device=DEVICE)
    wide[:, :600] = logits
    check(wide[:, :600], *others)


def test_places_may_lie_apart() -> None:
    """Those of a round are a column of its inputs."""
    logits, history, *others = rows(table(600), 600, 2)
    block = torch.full((7, 5), 2, device=DEVICE)
    block[:, 0] = history.places
    check(logits, history._replace(places=block[:, 0]), *others)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    columns, penalties = History.of(table(50), none), torch.ones(3, 0, device=DEVICE)
    assert process_logits(random(0, 50), columns, penalties, none.bool()).shape == (0, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_logits", "vocab_size"), [(1, 700), (37, 700), (1025, 2500), (600, 600)])
@pytest.mark.parametrize(
    "names", [TokenColumns._fields, ("bias",), ("stops",), ("prompt_mask", "output_counts")], ids=str
)
def test_logits_of_some_tokens_are_processed_as_among_all(
    names: tuple[str, ...], num_logits: int, vocab_size: int, dtype: torch.dtype
) -> None:
    """To the bit, by kernel and reference. Drafted tokens are of the whole vocabulary."""
    logit_ids, some = some_ids(num_logits, vocab_size).to(DEVICE), table(vocab_size)
    columns = TokenColumns(**{name: getattr(some, name) for name in names})
    whole, history, *others = rows(columns, vocab_size, 6)
    drafted = torch.randint(0, vocab_size, history.drafted.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    drafted[:, 2:] = logit_ids[drafted[:, 2:] % min(num_logits, 3)]  # some come twice
    history = history._replace(drafted=drafted)
    whole = whole.to(dtype)
    expected = process_logits_ref(whole, history, *others)[:, logit_ids]
    for function in (process_logits, process_logits_ref):
        found = function(whole[:, logit_ids], history, *others, logit_ids)
        assert found.dtype is torch.float32
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_logits", "vocab_size"), [(1, 1), (33, 33), (1056, 1056), (37, 700), (1025, 2500)])
def test_a_grammar_forbids_tokens_whose_bit_is_not_set(num_logits: int, vocab_size: int, dtype: torch.dtype) -> None:
    """After everything else, by kernel and reference, for all tokens and for some. A NaN stays one."""
    logit_ids = some_ids(num_logits, vocab_size).to(DEVICE) if num_logits < vocab_size else None
    whole, *others = rows(table(vocab_size), vocab_size, 2)
    whole[:, ::5] = NAN
    bits = torch.rand(7, -(-vocab_size // 32) * 32, generator=torch.Generator().manual_seed(5)) < 0.3
    bits[2], bits[4] = True, False
    weights = (1 << torch.arange(32)).to(torch.int64)
    words = (bits.view(7, -1, 32) * weights).sum(2)
    allowed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).to(DEVICE)
    free = process_logits_ref(whole.to(dtype), *others)
    expected = free.masked_fill(~bits[:, :vocab_size].to(DEVICE) & ~free.isnan(), -INF)
    if logit_ids is not None:
        whole, expected = whole[:, logit_ids].contiguous(), expected[:, logit_ids]
    for function in (process_logits, process_logits_ref):
        found = function(whole.to(dtype), *others, logit_ids, allowed)
        assert torch.equal(found.isnan(), expected.isnan()), function
        assert torch.equal(found.nan_to_num(0.0, INF, -INF), expected.nan_to_num(0.0, INF, -INF)), function
