"""Parts of the kernels of rounds of the gated delta rule: some columns of a state, of the values of a row, and of what
the row adds to the state.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def state_columns(
    state_ptr, has_state, shared, columns, is_column, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return some columns of a state in two pieces [ROWS, BLOCK_V] float32, so that their rows are spread over threads
    as those of updates are. The second one is the first one if a key has no more than ROWS numbers."""
    dims = tl.arange(0, ROWS)
    state_ptr += (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    is_in = is_column[None, :] & has_state
    low = tl.load(state_ptr, mask=(dims < KEY_DIM)[:, None] & is_in, other=0.0).to(tl.float32)
    high = low
    if KEY_DIM > ROWS:
        is_high = (dims + ROWS < KEY_DIM)[:, None] & is_in
        high = tl.load(state_ptr + ROWS * VALUE_DIM, mask=is_high, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def window(
    rows_ptr, taps_ptr, before, place, here, has_before, channels, is_channel, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return what the convolution of some channels [N] of row `here` of a block reads: the TAPS - 1 rows before it, and
    TAPS weights, each [N] float32. `taps_ptr` is the head's."""
    rows, taps = (), ()
    for tap in tl.static_range(TAPS - 1):
        at = here - (TAPS - 1) + tap
        old_ptr = rows_ptr + (tl.where(at >= 0, place, before + BLOCK) + at) * WIDTH
        rows += (tl.load(old_ptr + channels, mask=is_channel & ((at >= 0) | has_before), other=0.0).to(tl.float32),)
    for tap in tl.static_range(TAPS):
        taps += (tl.load(taps_ptr + tap * CHANNELS + channels, mask=is_channel, other=0.0),)
    return rows, taps


@triton.jit
def mixed(rows, new, taps, TAPS: tl.constexpr):
    """Return a row [N] behind the convolution and silu, given the rows before it, and those before the next row."""
    rows = rows + (new.to(tl.float32),)  # noqa: RUF005
    after, x = (), tl.zeros(new.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        x += rows[tap] * taps[tap]
        if tap > 0:
            after += (rows[tap],)
    return x * tl.sigmoid(x), after


@triton.jit
def one_row(
    out_ptr, row_ptr, update_ptr, low, high, updates, decay, values, taps, own, here, is_column, KEY_DIM: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the values, the update and the output of a row, whose pointers are its own, and return `updates` [ROWS,
    BLOCK_V], `decay` [ROWS] and `values` with this row. `low` and `high`: the state before the block. `values` and
    `taps`: as `window` returns them. `own`: the row's values [BLOCK_V] before the convolution, beta, the decay since
    the edge, the product of query and key, key and query, [ROWS] each, their numbers from ROWS on likewise, and their
    products with the rows before in the block, [ROWS] each."""
    row = tl.arange(0, ROWS)
    new, beta, passed, of_own, k, q, further_k, further_q, of_k, of_q = own
    faded = tl.exp(passed)
    from_k, from_q = low * (k * faded)[:, None], low * (q * faded)[:, None]
    if KEY_DIM > ROWS:
        from_k += high * (further_k * faded)[:, None]
        from_q += high * (further_q * faded)[:, None]
    between = tl.exp(tl.where(row < here, passed - decay, float("-inf")))
    from_k += updates * (of_k * between)[:, None]
    from_q += updates * (of_q * between)[:, None]
    tl.store(row_ptr, new, mask=is_column)
    value, values = mixed(values, new, taps, TAPS)
    known, output = tl.split(tl.sum(tl.join(from_k, from_q), 0))
    update = beta * (value - known)
    tl.store(out_ptr, (output + of_own * update).to(out_ptr.dtype.element_ty), mask=is_column)
    tl.store(update_ptr, update, mask=is_column)
    updates = tl.where((row == here)[:, None], update[None, :], updates)
    return updates, tl.where(row == here, passed, decay), values


@triton.jit
def advance(
    states_ptr, updates_ptr, before, place, has_state, shared, columns, is_column, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, STATE_PART: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store some columns of the state behind the block at `place`: the decayed state `before`, and the decayed products
    of keys and updates, whose first row `updates_ptr` points to. All is read again, few rows at a time."""
    TILE: tl.constexpr = 16
    row, dims = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    is_dim = dims < KEY_DIM
    is_state = is_dim[:, None] & is_column[None, :]
    numbers = (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    old_ptr = states_ptr + before * STATE_PART + numbers
    state = tl.load(old_ptr, mask=is_state & has_state, other=0.0).to(tl.float32)
    keys_ptr = updates_ptr + SHARED * VALUE_DIM + dims
    decays_ptr = updates_ptr + SHARED * VALUE_DIM + KEY_DIM
    if DECAY_DIM == 1:
        whole = tl.load(decays_ptr + (BLOCK - 1) * UPDATE_WIDTH + shared)
        state *= tl.exp(whole)
    else:
        whole = tl.load(decays_ptr + (BLOCK - 1) * UPDATE_WIDTH + dims, mask=is_dim, other=0.0)
        state *= tl.exp(whole)[:, None]
    for first in range(0, BLOCK, TILE):
        own, is_row = (first + row) * UPDATE_WIDTH, first + row < BLOCK
        is_key = is_dim[:, None] & is_row[None, :]
        keys = tl.load(keys_ptr[:, None] + own[None, :], mask=is_key, other=0.0)
        if DECAY_DIM == 1:
            decay = tl.load(decays_ptr + own + shared, mask=is_row, other=0.0)
            keys *= tl.exp(tl.where(is_row, whole - decay, 0.0))[None, :]
        else:
            decay = tl.load(decays_ptr + dims[:, None] + own[None, :], mask=is_key, other=0.0)
            keys *= tl.exp(tl.where(is_key, whole[:, None] - decay, 0.0))
        at = updates_ptr + own[:, None] + (shared * VALUE_DIM + columns)[None, :]
        update = tl.load(at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        state = tl.dot(keys, update, state, input_precision="tf32x3")
    tl.store(states_ptr + place * STATE_PART + numbers, state.to(states_ptr.dtype.element_ty), mask=is_state)
