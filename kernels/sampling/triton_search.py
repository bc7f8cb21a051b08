"""Search for a threshold in a row: the largest key such that the tokens with this key or a larger one suffice.

They suffice if they have the required amount. An amount is the number of tokens, or their weight (triton_scores.py), an
integer either way. Keys are those of scores (triton_packed.py), so they are at most 0. There are two searches.

`largest_key` bisects keys that lie in registers.

`largest_key_of_row` searches a whole row, by one program, in few passes over it.

    1. A sample of the row gives keys: the likely threshold, and one above and one below that surely enclose it
    2. A pass sums the amounts above eight levels, which are these keys and keys between them. So the threshold lies
       between two levels
    3. A pass collects the tokens between the two. If they fit in registers, they are bisected. If not, they are the
       sample for the next levels

The sample decides how many passes there are, never what is found. The keys of a sample are quantiles, so few tokens are
left after one pass whatever the distribution of scores is, unless they are equal: then the likely threshold is their
key, and the next key is a level, too. Two passes suffice nearly always. Whatever the sample says, each repetition
halves the range of keys.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .triton_packed import key_of, score_of_key
from .triton_scores import scores_of, weights_of

KEY_OF_LEAST = tl.constexpr(-2139095041)  # of the score -inf
_KEY_OF_NONE = tl.constexpr(-2139095042)  # below all keys
_NUM_LEVELS = tl.constexpr(8)
_RUN = tl.constexpr(32)  # neighbours in a sample, since memory is read in runs
_DEVIATIONS = tl.constexpr(3.0)  # standard deviations by which the amount in a sample may be wrong


@triton.jit
def largest_key(keys, amounts, needed, low):
    """Return the largest key at and above which the amounts are `needed` (int64) or more in sum; `low` (int32) if there
    is none above it. `keys` [n] int32, `amounts` [n] int32 or int64."""
    high = low * 0
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        is_enough = tl.sum(tl.where(keys >= middle, amounts, 0), axis=0) >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit
def largest_key_of_row(
    row_ptr,
    num_logits,
    maximum,
    temperature,
    needed,
    total,
    floor,
    keys_ptr,
    IS_WEIGHT: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the largest key at and above which the tokens of a row have the amount `needed`, int32.

    Args:
        row_ptr: [num_logits], the row; its largest logit `maximum` is finite.
        needed: int64, at least 1 and at most `total`.
        total: int64, the amount at and above the key `floor`, int32.
        keys_ptr: [MOST or num_logits, the smaller] int32, overwritten.
        IS_WEIGHT: whether the amount is the weight of tokens, or their number.
        MOST, TILE: tokens that are held in registers, and read at a time.
    """
    at = tl.arange(0, MOST)
    stride = tl.maximum(num_logits // (MOST // _RUN), _RUN)
    scores, is_there = _scores_at(row_ptr, at // _RUN * stride + at % _RUN, num_logits, maximum, temperature)
    keys = tl.where(is_there, key_of(scores), _KEY_OF_NONE)
    # The tokens from `low` on have the amount `enough`, those from `top` on have `above`, which is not enough.
    low, top, enough, above = floor, floor * 0 + 1, total, total * 0
    while low + 1 < top:
        share = (needed - above).to(tl.float32) / (enough - above).to(tl.float32)
        levels = _levels(keys, share, low, top, IS_WEIGHT)
        sums = _amounts_above(row_ptr, num_logits, maximum, temperature, levels, IS_WEIGHT, TILE)
        low = tl.maximum(low, tl.max(tl.where(sums >= needed, levels, KEY_OF_LEAST), axis=0))
        top = tl.minimum(top, tl.min(tl.where(sums >= needed, 1, levels), axis=0))
        enough = tl.minimum(enough, tl.min(tl.where(sums >= needed, sums, total), axis=0))
        above = tl.maximum(above, tl.max(tl.where(sums >= needed, 0, sums), axis=0))
        if low + 1 < top:
            count, least, most = _collect(row_ptr, num_logits, maximum, temperature, low, top, keys_ptr, MOST, TILE)
            tl.debug_barrier()  # now all threads can read the keys
            keys = tl.load(keys_ptr + at, mask=at < count, other=_KEY_OF_NONE)
            low, top = least, most + 1
            if count <= MOST:
                low = largest_key(keys, _amounts_from(keys, least, IS_WEIGHT), needed - above, least)
                top = low + 1
            tl.debug_barrier()  # now they can be overwritten
    return low


@triton.jit
def amount_above(row_ptr, num_logits, maximum, temperature, key, TILE: tl.constexpr):
    """Return the weight of the tokens of a row whose scores have this key or a larger one, int64."""
    weight = tl.zeros([TILE], tl.int64)
    for start in range(0, num_logits, TILE):
        scores, is_there = _scores_at(row_ptr, start + tl.arange(0, TILE), num_logits, maximum, temperature)
        weight += tl.where(is_there & (key_of(scores) >= key), weights_of(scores), 0)
    return tl.sum(weight, axis=0)


@triton.jit
def _amounts_of(scores, IS_WEIGHT: tl.constexpr):
    """Return the amount of each score, int64."""
    return weights_of(scores) if IS_WEIGHT else tl.zeros_like(scores).to(tl.int64) + 1


@triton.jit
def _amounts_from(keys, low, IS_WEIGHT: tl.constexpr):
    """Return the amount of the score of each key, int64, and 0 below `low`."""
    return tl.where(keys >= low, _amounts_of(score_of_key(tl.maximum(keys, KEY_OF_LEAST)), IS_WEIGHT), 0)


@triton.jit
def _scores_at(row_ptr, index, num_logits, maximum, temperature):
    """Return the scores of the logits `index`, and which of them there are."""
    is_there = index < num_logits
    logits = tl.load(row_ptr + index, mask=is_there, other=-float("inf")).to(tl.float32)
    return scores_of(logits, maximum, temperature), is_there


@triton.jit
def _levels(keys, share, low, top, IS_WEIGHT: tl.constexpr):
    """Return eight keys from `low` + 1 to `top`, [8] int32, two of which likely enclose the key at and above which
    there is `share` (float32) of the amount from `low` on. `keys`: a sample."""
    amounts = _amounts_from(keys, low, IS_WEIGHT)
    sampled = tl.sum(amounts, axis=0).to(tl.float32)
    wanted = share * sampled
    least = tl.minimum(tl.maximum(tl.min(tl.where(amounts > 0, keys, 0), axis=0), low), top - 1)
    middle = largest_key(keys, amounts, tl.maximum(wanted, 1.0).to(tl.int64), least)
    off = tl.where(keys >= middle, 1.0 - share, share) * amounts.to(tl.float32)
    slack = _DEVIATIONS * tl.sqrt(tl.sum(off * off, axis=0)) + 1.0
    lower = largest_key(keys, amounts, (wanted + slack).to(tl.int64), least)
    upper = largest_key(keys, amounts, tl.maximum(wanted - slack, 1.0).to(tl.int64), middle)
    step = tl.arange(0, _NUM_LEVELS)
    levels = tl.where(step == 0, low + 1, low + (top - low) // 2)
    levels = tl.where(step == 2, lower, levels)
    levels = tl.where(step == 3, lower + (middle - lower) // 2, levels)
    levels = tl.where(step == 4, middle, levels)
    levels = tl.where(step == 5, middle + 1, levels)
    levels = tl.where(step == 6, middle + 1 + (upper - middle) // 2, levels)
    levels = tl.where(step == 7, upper + 1, levels)
    return tl.minimum(tl.maximum(levels, low + 1), top)


@triton.jit
def _amounts_above(row_ptr, num_logits, maximum, temperature, levels, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Return the amount at and above each of eight levels (keys), [8] int64."""
    amounts = tl.zeros([_NUM_LEVELS, TILE], tl.int64 if IS_WEIGHT else tl.int32)
    for start in range(0, num_logits, TILE):
        scores, is_there = _scores_at(row_ptr, start + tl.arange(0, TILE), num_logits, maximum, temperature)
        amount = tl.where(is_there, _amounts_of(scores, IS_WEIGHT), 0).to(amounts.dtype)
        amounts += tl.where(key_of(scores)[None, :] >= levels[:, None], amount[None, :], 0)
    return tl.sum(amounts, axis=1).to(tl.int64)


@triton.jit
def _collect(row_ptr, num_logits, maximum, temperature, low, top, keys_ptr, MOST: tl.constexpr, TILE: tl.constexpr):
    """Store the keys from `low` on and below `top`, MOST at most. Return how many there are, the least and the
    largest, int32."""
    count = low * 0
    least, most = tl.full([TILE], 1, tl.int32), tl.full([TILE], KEY_OF_LEAST, tl.int32)
    for start in range(0, num_logits, TILE):
        scores, is_there = _scores_at(row_ptr, start + tl.arange(0, TILE), num_logits, maximum, temperature)
        keys = key_of(scores)
        is_inside = is_there & (keys >= low) & (keys < top)
        place = count + tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
        tl.store(keys_ptr + place, keys, mask=is_inside & (place < MOST))
        count += tl.sum(is_inside.to(tl.int32), axis=0)
        least, most = tl.minimum(least, tl.where(is_inside, keys, 1)), tl.maximum(most, tl.where(is_inside, keys, most))
    return count, tl.min(least, axis=0), tl.max(most, axis=0)
