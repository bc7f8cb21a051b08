"""Gumbel noise as a pure function of (seed, absolute position, token id).

    r     = hash32(seed, position, token id)                    a counter hash, no state
    u     = (r + 0.5) * 2^-32                                   in (0, 1), never 0 or 1
    noise = -log(-log1p(-u))

so ``argmax(logits + noise)`` draws from ``softmax(logits)``, and draws the same token wherever it is computed.

Three steps keep that true bit for bit on every device:

- The hash uses 32-bit wrapping multiplications, additions, xors and logical shifts only.
- With s = r for r < 2^31 and s = 2^32 - 1 - r above, v = (s + 0.5) * 2^-32 lies in (0, 0.5] and

      -log1p(-u) = Q(v)                     for r < 2^31
      -log1p(-u) = -log(v)                  otherwise
      -log(x)    = Q(1 - m) - k * ln 2      where x = m * 2^k, m in [0.5, 1), read from x's bits

  with one function Q(f) = -log1p(-f) on [0, 0.5]. No r gives an infinity; small tails stay precise.
- Q(f) = f * P(f), P by Horner with separate multiplications and additions in float32. A kernel beside this reference
  must switch off fusion into FMA, and may use nothing but IEEE additions and multiplications and integer operations.

P is the degree 8 least-squares polynomial of -log1p(-f) / f at 400 Chebyshev nodes of [0, 0.5], fitted in float64 and
rounded to float32 (its relative error is 5e-8; ``tests/kernels/test_noise.py`` repeats the fit). The whole noise is
within 5e-7 * max(1, |noise|) of the float64 value for every r tried there.
"""

import torch
from torch import Tensor

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
_LN_2 = 0.6931471824645996  # ln 2 rounded to float32

# Multipliers of C. Wellons' "lowbias32" (public domain); the salts are digits of pi.
_MULTIPLIER_1, _MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
_SALT_1, _SALT_2 = 0x243F6A88, 0x13198A2E
_WEIGHT_1, _WEIGHT_2 = 0x3C6EF372, 0x1B873593  # one even, one odd: (low + w1 high, high + w2 low) is one to one

_MANTISSA_MASK = 0x007FFFFF  # of a float32
_HALF_BITS = 0x3F000000  # 0.5 as float32 bits
_BLOCK_SIZE = 1 << 16  # elements worked on at once on CPU, so that the scratch stays in cache


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise of every token id below ``vocab_size``.

    Args:
        seeds: [num_rows] int64, each in 0 .. 2^63 - 1.
        positions: [num_rows] int64, absolute position of the token being drawn, below 2^31.
        vocab_size: number of token ids, below 2^31.

    Returns: [num_rows, vocab_size] float32, finite, on the device of ``seeds``.
    """
    return gumbel_noise_ref(seeds, positions, vocab_size)


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of the given ids: equal to ``gumbel_noise(...).gather(1, token_ids)``, without computing the rest.

    A drafter whose vocabulary is a permutation or a part of the target's passes the *target's* ids.

    Args:
        seeds, positions: as for ``gumbel_noise``.
        token_ids: [num_rows, num_ids] or [1, num_ids] int64 or int32.

    Returns: [num_rows, num_ids] float32.
    """
    return gumbel_noise_at_ref(seeds, positions, token_ids)


def gumbel_noise_ref(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """The specification of ``gumbel_noise``."""
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    return gumbel_noise_at_ref(seeds, positions, token_ids[None])


def gumbel_noise_at_ref(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The specification of ``gumbel_noise_at``."""
    key_1, key_2 = _row_keys(seeds, positions)  # each [num_rows, 1] int32
    num_rows, num_ids = key_1.shape[0], token_ids.shape[-1]
    assert token_ids.ndim == 2 and token_ids.shape[0] in (1, num_rows), (token_ids.shape, num_rows)
    ids = token_ids.to(torch.int32)  # [num_rows or 1, num_ids]
    step = num_ids if seeds.is_cuda else max(1, _BLOCK_SIZE // max(1, num_rows))
    if num_ids <= step:
        return gumbel_from_bits_ref(_token_bits(key_1, key_2, ids))
    noise = torch.empty((num_rows, num_ids), dtype=torch.float32, device=seeds.device)
    for start in range(0, num_ids, step):
        block = slice(start, start + step)
        noise[:, block] = gumbel_from_bits_ref(_token_bits(key_1, key_2, ids[:, block]))
    return noise


def random_bits_ref(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """r as int32 bits, [num_rows, num_ids]; arguments as for ``gumbel_noise_at``."""
    return _token_bits(*_row_keys(seeds, positions), token_ids.to(torch.int32))


def gumbel_from_bits_ref(bits: Tensor) -> Tensor:
    """-log(-log1p(-u)) for u = (r + 0.5) * 2^-32, r given as int32 bits, any shape; float32, same shape."""
    assert bits.dtype == torch.int32, bits.dtype
    upper = bits >> 31  # arithmetic: all ones where r >= 2^31, else 0
    v = _unit_interval(bits ^ upper)
    exponent, f = _split(v, upper)
    lower = f.view(torch.int32).bitwise_xor_(v.view(torch.int32)).bitwise_and_(upper)
    f = lower.bitwise_xor_(v.view(torch.int32)).view(
        torch.float32
    )  # f where upper, else v (torch.where is slow on CPU)
    exponent, f = _split(_log1p_negated(f).sub_(exponent))
    return _log1p_negated(f).sub_(exponent)


def _row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys of (seed, position), so that 64 bits tell rows apart; each [num_rows, 1] int32."""
    assert seeds.dtype == positions.dtype == torch.int64, (seeds.dtype, positions.dtype)
    assert seeds.ndim == 1 and seeds.shape == positions.shape, (seeds.shape, positions.shape)
    words = seeds.contiguous().view(torch.int32).view(-1, 2, 1)  # [num_rows, low | high, 1], little-endian
    low, high = words[:, 0], words[:, 1]
    position = positions.contiguous().view(torch.int32).view(-1, 2)[:, :1]
    keys = torch.stack((low + high * _WEIGHT_1, high + low * _WEIGHT_2))  # [2, num_rows, 1], one to one
    keys[0] ^= _SALT_1
    keys[1] ^= _SALT_2
    keys = _mix(keys)
    keys[0] ^= position
    keys[1] += position
    key_1, key_2 = _mix(keys).unbind()
    return key_1, key_2


def _token_bits(key_1: Tensor, key_2: Tensor, ids: Tensor) -> Tensor:
    """[num_rows, 1], [num_rows, 1], [num_rows or 1, num_ids], all int32 -> [num_rows, num_ids] int32."""
    return _mix(ids ^ key_1, key_2)


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """Bijective mixing of int32 in place; ``key`` is added half way, so that no two keys give shifted sequences."""
    shifted = torch.empty_like(x)
    _xor_shift(x, 16, shifted)
    x *= _MULTIPLIER_1
    _xor_shift(x, 15, shifted)
    if key is not None:
        x += key
    x *= _MULTIPLIER_2
    _xor_shift(x, 16, shifted)
    return x


def _xor_shift(x: Tensor, shift: int, shifted: Tensor) -> None:
    """x ^= x >>> shift, a logical shift made of an arithmetic one and a mask."""
    torch.bitwise_right_shift(x, shift, out=shifted)
    shifted &= (1 << (32 - shift)) - 1
    x ^= shifted


def _unit_interval(s: Tensor) -> Tensor:
    """(s + 0.5) * 2^-32 for s int32 in 0 .. 2^31 - 1: both parts are exact floats, so only their sum rounds."""
    low = s & 0xFF
    s ^= low
    return s.to(torch.float32).add_(low.to(torch.float32).add_(0.5)).mul_(2.0**-32)


def _split(x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x > 0, normal -> (k * ln 2, 1 - m) float32 with x = m * 2^k and m in [0.5, 1), so that 1 - m is exact.

    Where ``mask`` is 0 (it is all ones elsewhere) k is 0.
    """
    bits = x.view(torch.int32)
    exponent = (bits - _HALF_BITS).bitwise_and_(~_MANTISSA_MASK)  # k * 2^23
    mantissa = (bits - exponent).view(torch.float32)
    if mask is not None:
        exponent &= mask
    return exponent.to(torch.float32).mul_(_LN_2 * 2.0**-23), mantissa.neg_().add_(1.0)


def _log1p_negated(f: Tensor) -> Tensor:
    """Q(f) = -log1p(-f) for f in [0, 0.5], float32."""
    *rest, highest = _LOG1P_COEFFICIENTS
    result = torch.mul(f, highest)
    for coefficient in reversed(rest[1:]):
        result.add_(coefficient).mul_(f)
    return result.add_(rest[0]).mul_(f)
