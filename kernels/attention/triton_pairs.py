"""Products of attention with keys and values in e4m3 (fp8_pages.py), read in pairs: 16 bits for two dimensions.

A tile of pairs is loaded, laid out and transposed as a tile of 16-bit numbers is. There are no fast ways for 8 bits.
Operations on bits make numbers of them: the sign, 4 bits of exponent and 3 of mantissa move to their places in a
bfloat16 or float32. The exponent keeps its bias, so the result is the number times 2^-120, exactly, also if it is
subnormal. What comes next depends on where a product takes its operands from:

- From shared memory, for tiles of many rows. `numbers_of` returns one tile in the order of the dimensions. It is
  multiplied by its scales, which are powers of two, so it holds the numbers that were stored.
- From registers, for tiles of few rows. There the order cannot change without a way through memory. So there are two
  tiles, of the even dimensions and of the odd ones:

      scores = q_even K_even^T + q_odd K_odd^T        sums_even += weights V_even        sums_odd += weights V_odd

  Queries and weights are multiplied by 2^64, so that no product becomes 0 or infinite. Scales of keys multiply scores,
  and scales of values multiply weights. All this is exact, so the results are those of the numbers themselves.

The codes of NaN become numbers. A row that is not a number has the scale NaN, which makes its numbers, or the scores
and sums of rows that see it, NaN all the same.
"""

# ruff: noqa: N803, RET505
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..products.fp8 import E4M3

_RAISED = tl.constexpr(2.0**64)  # queries and weights
_LOWERED = tl.constexpr(2.0**56)  # scores and sums come out so many times too small
# Each byte to 16 bits with its sign repeated, then the sign, 4 bits of exponent and 3 of mantissa to their places.
_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 even, odd;
prmt.b32 even, $2, 0, 0xA280;
prmt.b32 odd, $2, 0, 0xB391;
shl.b32 even, even, 4;
shl.b32 odd, odd, 4;
and.b32 $0, even, 0x87F087F0;
and.b32 $1, odd, 0x87F087F0;
}""")

_TO_SCALED_BFLOAT16 = tl.constexpr("""{
.reg .b32 first, second, zero;
prmt.b32 first, $2, 0, 0x9180;
prmt.b32 second, $2, 0, 0xB3A2;
shl.b32 first, first, 4;
shl.b32 second, second, 4;
and.b32 first, first, 0x87F087F0;
and.b32 second, second, 0x87F087F0;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 $0, first, $3, zero;
fma.rn.bf16x2 $1, second, $3, zero;
}""")
_UNBIASED = tl.constexpr(2.0**120)


def in_pairs(q: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
    """Return a layer [..., head_dim] as kernels read it for queries of q's dtype: a view as pairs [..., head_dim / 2]
    uint16 if it is in e4m3, or the layer itself. Heads of odd or few dimensions stay e4m3, and so do those of queries
    in float16, which has too few exponents."""
    is_taken = kv_layer.dtype == E4M3 and q.dtype in (torch.bfloat16, torch.float32)
    is_taken = is_taken and kv_layer.shape[-1] % 2 == 0 and kv_layer.shape[-1] > 16  # a product needs 16 columns
    return kv_layer.view(torch.uint16) if is_taken else kv_layer


@triton.constexpr_function
def packed(ptr):
    """Return how many numbers a kernel reads as one at `ptr`: 2 in pairs, else 1."""
    return 2 if ptr.dtype.scalar.element_ty == tl.uint16 else 1


@triton.jit
def split_queries(q):
    """Return the even and the odd dimensions of `q` [BLOCK_M, BLOCK_D], each [BLOCK_M, BLOCK_D / 2], raised."""
    raised = (q.to(tl.float32) * _RAISED).to(q.dtype)
    return tl.split(tl.reshape(raised, (q.shape[0], q.shape[1] // 2, 2)))


@triton.jit
def load_scales(
    scales_ptr,  # scales of the kv head's keys in page 0
    plane: tl.constexpr,  # 0: keys, 1: values
    pages,  # as `load_pages` returns them
    slots,  # [BLOCK_N] int32
    is_inside,  # [BLOCK_N] bool, which slots are read
    PAGE_SIZE: tl.constexpr,
    V_OFFSET: tl.constexpr,  # of values behind keys, in numbers of a page
):
    """Return the scales of keys or values of slots, [BLOCK_N] float32; 0 where none are read."""
    ptrs = scales_ptr + pages.to(tl.int64) * (V_OFFSET // 2) + plane * (V_OFFSET // 4) + slots % PAGE_SIZE
    return tl.load(ptrs, mask=is_inside, other=0.0)


@triton.jit
def scores_of(q_even, q_odd, pairs, scales):
    """Return the scores [BLOCK_M, BLOCK_N] float32 of queries from `split_queries` and keys `pairs` [BLOCK_N,
    BLOCK_D / 2] uint16 with `scales` [BLOCK_N] float32."""
    even, odd = _numbers(pairs, q_even.dtype)
    scores = tl.dot(q_even, tl.trans(even), input_precision="ieee")
    scores = tl.dot(q_odd, tl.trans(odd), scores, input_precision="ieee")
    return scores * (scales * _LOWERED)[None, :]


@triton.jit
def weigh_pairs(
    scores,  # [BLOCK_M, BLOCK_N] float32, as in `weigh`
    scale,
    pairs,  # [BLOCK_N, BLOCK_D / 2] uint16, values
    scales,  # [BLOCK_N] float32, of the values
    sums_even,  # [BLOCK_M, BLOCK_D / 2] float32
    sums_odd,  # [BLOCK_M, BLOCK_D / 2] float32
    total,  # [BLOCK_M] float32
    highest,  # [BLOCK_M] float32
    dtype: tl.constexpr,  # of products
):
    """Do `weigh` (triton_softmax.py): return the state (sums_even, sums_odd, total, highest) with one more tile."""
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    correction = tl.exp2(highest - new_highest)
    total = total * correction + tl.sum(weights, 1)
    weights = (weights * (scales * _RAISED)[None, :]).to(dtype)
    even, odd = _numbers(pairs, dtype)
    sums_even = tl.dot(weights, even, sums_even * correction[:, None], input_precision="ieee")
    sums_odd = tl.dot(weights, odd, sums_odd * correction[:, None], input_precision="ieee")
    return sums_even, sums_odd, total, new_highest


@triton.jit
def join_sums(sums_even, sums_odd):
    """Return the sums of all dimensions, [BLOCK_M, BLOCK_D] float32, as `weigh` returns them."""
    return tl.interleave(sums_even, sums_odd) * _LOWERED


@triton.jit
def numbers_of(pairs, scales, dtype: tl.constexpr):
    """Return the numbers of `pairs` [BLOCK_N, BLOCK_D / 2] uint16 times `scales` [BLOCK_N] float32, in bfloat16 or
    float32: [BLOCK_N, BLOCK_D]."""
    raised = (scales * _UNBIASED).to(dtype)[:, None]
    if dtype == tl.bfloat16:
        # the numbers of two pairs in two registers, two each
        first, second = tl.inline_asm_elementwise(
            _TO_SCALED_BFLOAT16, "=r,=r,r,r", [pairs, raised], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        first = tl.reshape(first, (pairs.shape[0], pairs.shape[1] // 2, 2))
        second = tl.reshape(second, (pairs.shape[0], pairs.shape[1] // 2, 2))
        both = tl.permute(tl.join(first, second), (0, 1, 3, 2))
        return tl.reshape(both, (pairs.shape[0], 2 * pairs.shape[1]))
    else:
        even, odd = _numbers(pairs, dtype)
        return tl.interleave(even * raised, odd * raised)


@triton.jit
def _numbers(pairs, dtype: tl.constexpr):
    """Return the numbers in the low and in the high bytes of `pairs` uint16 times 2^-120, in bfloat16 or float32."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        bits = pairs.to(tl.int32)
        even = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        odd = ((bits & 0x8000) << 16) | ((bits & 0x7F00) << 12)
        return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
