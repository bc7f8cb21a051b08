"""Gumbel noise as a pure function of (seed, absolute position, token id).

    r     = hash32(seed, position, token id)                    a counter hash, no state
    u     = (r + 0.5) * 2^-32                                   in (0, 1), never 0 or 1
    noise = -log(-log1p(-u))

So ``argmax(logits + noise)`` draws from ``softmax(logits)``, and draws the same token wherever it is computed.

Three rules keep that true bit for bit on every device:

- The hash uses 32-bit wrapping multiplications, additions, xors and logical shifts only.
- Let s = r if r < 2^31, otherwise s = 2^32 - 1 - r. Then v = (s + 0.5) * 2^-32 is in (0, 0.5], and

      -log1p(-u) = Q(v)                     if r < 2^31
      -log1p(-u) = -log(v)                  otherwise
      -log(x)    = Q(1 - m) - k * ln 2      for x = m * 2^k, m in [0.5, 1), read from x's bits

  with one function Q(f) = -log1p(-f) on [0, 0.5]. No r gives an infinity, and small tails stay precise.
- Q(f) = f * P(f), with P by Horner, in separate multiplications and additions of float32. A backend must switch off
  fusion into FMA. It may use IEEE additions, IEEE multiplications and integer operations only.

P is the degree 8 least-squares polynomial of -log1p(-f) / f at 400 Chebyshev nodes of [0, 0.5], fitted in float64 and
rounded to float32 (its relative error is 5e-8; ``tests/kernels/sampling/test_noise.py`` repeats the fit). The whole
noise is within 5e-7 * max(1, |noise|) of the float64 value for every r tried there.
"""

import math

import torch
from torch import Tensor

from ..operations import Operation

_LOG1P_COEFFICIENTS = (
    1.0,
    0.49999281764030457,
    0.33370256423950195,
    0.24277445673942566,
    0.26985013484954834,
    -0.20453974604606628,
    1.2600104808807373,
    -1.6986658573150635,
    1.4425228834152222,
)  # of P, lowest degree first, each exactly a float32
_LN_2 = 0.6931471824645996  # rounded to float32
_LN_2_PER_EXPONENT = _LN_2 * 2.0**-23  # for k * 2^23, as an exponent lies in a float32's bits; exact

# Multipliers of C. Wellons' "lowbias32" (public domain); the salts are digits of pi.
_MULTIPLIER_1, _MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
_SALT_1, _SALT_2 = 0x243F6A88, 0x13198A2E
_WEIGHT_1, _WEIGHT_2 = 0x3C6EF372, 0x1B873593  # one even, one odd: (low + w1 high, high + w2 low) is one to one

_MANTISSA_MASK = 0x007FFFFF  # of a float32
_HALF_BITS = 0x3F000000  # 0.5 as float32 bits
_BLOCK_SIZE = 1 << 16  # elements per block on a CPU, so that the scratch stays in cache


def gumbel_noise_ref(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the noise of every token id below ``vocab_size``.

    Args:
        seeds: [num_rows] int64, each in 0 .. 2^63 - 1.
        positions: [num_rows] int64, absolute position of the token being drawn, below 2^31.
        vocab_size: number of token ids, below 2^31.

    Returns: [num_rows, vocab_size] float32, finite, on the device of ``seeds``.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    return gumbel_noise_at(seeds, positions, token_ids[None])


def add_gumbel_noise_ref_(scores: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Add ``gumbel_noise_ref`` to ``scores`` in place.

    Args:
        scores: [num_rows, num_scores] float32, contiguous; -inf stays -inf.
        seeds, positions: as for ``gumbel_noise_ref``.
        token_ids: [num_scores] int32, contiguous, the token of each score; None: score i is of token i.

    Returns: ``scores``.
    """
    check_scores(scores, seeds, positions, token_ids)
    if token_ids is not None:
        return scores.add_(gumbel_noise_at(seeds, positions, token_ids[None]))
    return scores.add_(gumbel_noise_ref(seeds, positions, scores.shape[1]))


add_gumbel_noise_ = Operation("add_gumbel_noise_", add_gumbel_noise_ref_)


def check_scores(scores: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor | None) -> None:
    """Assert the shapes and dtypes that ``add_gumbel_noise_`` takes."""
    assert scores.ndim == 2 and scores.dtype is torch.float32 and scores.is_contiguous(), (scores.shape, scores.dtype)
    assert seeds.dtype == positions.dtype == torch.int64, (seeds.dtype, positions.dtype)
    assert seeds.shape == positions.shape == scores.shape[:1], (seeds.shape, positions.shape, scores.shape)
    if token_ids is not None:
        check_token_ids(scores, token_ids)


def check_token_ids(scores: Tensor, token_ids: Tensor) -> None:
    """Assert that ``token_ids`` has one id for each column of ``scores``."""
    assert token_ids.shape == scores.shape[1:] and token_ids.dtype is torch.int32, (token_ids, scores.shape)
    assert token_ids.is_contiguous(), token_ids.stride()


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise of the given ids: ``gumbel_noise_ref(...).gather(1, token_ids)``, without computing the rest.

    A drafter whose vocabulary is a permutation or a part of the target's passes the *target's* ids.

    Args:
        seeds, positions: as for ``gumbel_noise_ref``.
        token_ids: [num_rows, num_ids] or [1, num_ids] int64 or int32.

    Returns: [num_rows, num_ids] float32.
    """
    key_1, key_2 = _row_keys(seeds, positions)  # each [num_rows, 1] int32
    num_rows, num_ids = key_1.shape[0], token_ids.shape[-1]
    assert token_ids.ndim == 2 and token_ids.shape[0] in (1, num_rows), (token_ids.shape, num_rows)
    noise = torch.empty((num_rows, num_ids), dtype=torch.float32, device=seeds.device)
    ids = token_ids.to(torch.int32)  # [num_rows or 1, num_ids]
    step = num_ids if noise.is_cuda else max(1, _BLOCK_SIZE // max(1, num_rows))
    scratch = torch.empty(5 * num_rows * min(step, num_ids), dtype=torch.int32, device=seeds.device)
    for start in range(0, num_ids, step):
        block = ids[:, start : start + step]
        shape = (5, num_rows, block.shape[1])
        bits, *rest = scratch[: math.prod(shape)].view(shape).unbind()
        torch.bitwise_xor(block, key_1, out=bits)
        _mix(bits, rest[0], key_2)
        _gumbel_from_bits(noise[:, start : start + step], bits, *rest)
    return noise


def random_bits_ref(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return r as int32 bits, [num_rows, num_ids]; arguments as for ``gumbel_noise_at``."""
    key_1, key_2 = _row_keys(seeds, positions)
    bits = token_ids.to(torch.int32) ^ key_1
    return _mix(bits, torch.empty_like(bits), key_2)


def gumbel_from_bits_ref(bits: Tensor) -> Tensor:
    """Return -log(-log1p(-u)) for u = (r + 0.5) * 2^-32, r given as int32 bits of any shape: float32, same shape."""
    assert bits.dtype == torch.int32, bits.dtype
    noise = torch.empty_like(bits, dtype=torch.float32)
    _gumbel_from_bits(noise, bits.clone(), *torch.empty((4, *bits.shape), dtype=torch.int32, device=bits.device))
    return noise


def _gumbel_from_bits(noise: Tensor, s: Tensor, upper: Tensor, f: Tensor, x: Tensor, k: Tensor) -> None:
    """Write the noise of the bits ``s``, int32, to ``noise``, float32 of the same shape.

    ``s`` is overwritten. The other arguments are scratch, int32 of its shape."""
    f_value, x_value, k_value = (scratch.view(torch.float32) for scratch in (f, x, k))
    torch.bitwise_right_shift(s, 31, out=upper)  # arithmetic: all ones where r >= 2^31, else 0
    s ^= upper
    # x = v = (s + 0.5) * 2^-32: both parts of s are exact floats, so only their sum rounds
    torch.bitwise_and(s, 0xFF, out=f)
    s ^= f
    k_value.copy_(f)
    x_value.copy_(s).add_(k_value.add_(0.5)).mul_(2.0**-32)
    # x = -log1p(-u) = Q(v) below, Q(1 - m) - k ln 2 above. Bits select, as torch.where is slow on CPU.
    _split(x, f, k)
    k &= upper
    f ^= x
    f &= upper
    f ^= x
    _log1p_negated(f_value, out=x_value).sub_(s.view(torch.float32).copy_(k).mul_(_LN_2_PER_EXPONENT))
    # noise = -log(x)
    _split(x, f, k)
    _log1p_negated(f_value, out=x_value)
    torch.sub(x_value, s.view(torch.float32).copy_(k).mul_(_LN_2_PER_EXPONENT), out=noise)


def _row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 32-bit keys of (seed, position), so that 64 bits tell rows apart; each [num_rows, 1] int32."""
    assert seeds.dtype == positions.dtype == torch.int64, (seeds.dtype, positions.dtype)
    assert seeds.ndim == 1 and seeds.shape == positions.shape, (seeds.shape, positions.shape)
    words = seeds.contiguous().view(torch.int32).view(-1, 2, 1)  # [num_rows, low | high, 1], little-endian
    low, high = words[:, 0], words[:, 1]
    position = positions.contiguous().view(torch.int32).view(-1, 2)[:, :1]
    keys = torch.stack((low + high * _WEIGHT_1, high + low * _WEIGHT_2))  # [2, num_rows, 1], one to one
    keys[0] ^= _SALT_1
    keys[1] ^= _SALT_2
    scratch = torch.empty_like(keys)
    _mix(keys, scratch)
    keys[0] ^= position
    keys[1] += position
    key_1, key_2 = _mix(keys, scratch).unbind()
    return key_1, key_2


def _mix(x: Tensor, scratch: Tensor, key: Tensor | None = None) -> Tensor:
    """Mix int32 bijectively, in place. ``key`` is added half way, so that no two keys give shifted sequences."""
    _xor_shift(x, 16, scratch)
    x *= _MULTIPLIER_1
    _xor_shift(x, 15, scratch)
    if key is not None:
        x += key
    x *= _MULTIPLIER_2
    _xor_shift(x, 16, scratch)
    return x


def _xor_shift(x: Tensor, shift: int, shifted: Tensor) -> None:
    """Do x ^= x >>> shift, a logical shift made of an arithmetic one and a mask."""
    torch.bitwise_right_shift(x, shift, out=shifted)
    shifted &= (1 << (32 - shift)) - 1
    x ^= shifted


def _split(x: Tensor, f: Tensor, k: Tensor) -> None:
    """Split the bits of x = m * 2^k, m in [0.5, 1): the bits of 1 - m, which is exact, go to f, k * 2^23 to k."""
    torch.sub(x, _HALF_BITS, out=k)
    k &= ~_MANTISSA_MASK
    torch.sub(x, k, out=f)
    f.view(torch.float32).neg_().add_(1.0)


def _log1p_negated(f: Tensor, out: Tensor) -> Tensor:
    """Write Q(f) = -log1p(-f) to ``out`` for f in [0, 0.5], float32, and return it."""
    *rest, highest = _LOG1P_COEFFICIENTS
    torch.mul(f, highest, out=out)
    for coefficient in reversed(rest[1:]):
        out.add_(coefficient).mul_(f)
    return out.add_(rest[0]).mul_(f)
