"""Launch configurations of the products of few rows: which ones exist for a shape, and which one was chosen.

`choose` answers for a launch. A node measures the `candidates` of its model's shapes when it starts
(engine/tuning/tuning.py) and writes the fastest into `CHOSEN`; a shape that was not measured takes `default`. The
answer depends on the shape alone, so that a row's result does not depend on what else a process computes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

MAX_ROWS = 64  # of x; more rows go to torch
# Numbers of rows up to each bound share a configuration.
ROW_CLASSES = (1, 4, 8, 16, 32, 64)
# A process finds a GPU in one of two states, which other processes change. In one of them 64 programs, launched while
# the kernel before ran, took twice as long. A measurement sees one state only, so no candidate
# has fewer programs than this.
FEWEST_PROGRAMS = 96
_MOST_SPLIT_PROGRAMS = 1100  # a row of W that so many programs share already keeps the GPU busy


class Config(NamedTuple):
    """Launch configuration of a product."""

    kind: Literal["vector", "dot"]
    block_n: int  # rows of W per program: a power of 2 for "vector", any number for "dot"
    block_k: int  # columns of W that a program works on at once
    num_warps: int = 4
    num_stages: int = 4  # dot: tiles under way from memory
    split_k: int = 1  # dot: programs that share the columns of a row of W


class ProductShape(NamedTuple):
    """A product of at most `max_rows` rows with W [out_size, in_size]. `max_rows` is one of ROW_CLASSES."""

    out_size: int
    in_size: int
    max_rows: int
    is_gated: bool = False  # one kernel computes silu(gate) * up of the two halves of the product

    @classmethod
    def of(cls, num_rows: int, out_size: int, in_size: int, *, is_gated: bool = False) -> ProductShape:
        """Return the shape that a product of `num_rows` rows, 1 to MAX_ROWS, belongs to."""
        return cls(out_size, in_size, next(bound for bound in ROW_CLASSES if num_rows <= bound), is_gated)


CHOSEN: dict[ProductShape, Config | None] = {}  # measured in this process or before; None: torch's product


class DoesNotFitError(Exception):
    """The GPU has too little shared memory or too few registers for a configuration."""


class _Trial(threading.local):
    """Configurations that one thread tries."""

    configs: dict[ProductShape, Config | None] | None = None


_trial = _Trial()


def choose(shape: ProductShape) -> Config | None:
    """Return the configuration of a product; None: torch's product serves."""
    if _trial.configs is not None and shape in _trial.configs:
        return _trial.configs[shape]
    return CHOSEN[shape] if shape in CHOSEN else default(shape)


@contextmanager
def trying(configs: dict[ProductShape, Config | None]) -> Iterator[None]:
    """Have `choose` return these configurations to this thread."""
    before, _trial.configs = _trial.configs, configs
    try:
        yield
    finally:
        _trial.configs = before


def default(shape: ProductShape) -> Config:
    """Return the configuration of a shape that was not measured. It has FEWEST_PROGRAMS at least, if the shape has rows
    enough."""
    out_size, in_size, max_rows, is_gated = shape
    if max_rows == 1 and is_gated:  # rows enough to share the norm
        return Config("vector", 2 if in_size > 2048 else 4, _power_of_2(in_size), 8)
    if max_rows == 1:
        is_large = out_size * in_size >= 1 << 25
        return Config("vector", 2 if is_large else 1, min(2048, _power_of_2(in_size)))
    if max_rows > 32:
        if out_size >= 1 << 16:
            return Config("dot", 128, 64, 8, 5)
        if is_gated:
            return Config("dot", 64, 64)
        return Config("dot", 64, 128, split_k=_default_split(out_size, in_size, 64, FEWEST_PROGRAMS))
    if is_gated:
        return Config("dot", 64, 128, num_stages=3) if out_size >= 128 * FEWEST_PROGRAMS else Config("dot", 32, 128)
    split_k = _default_split(out_size, in_size, 64, FEWEST_PROGRAMS)
    if split_k * out_size >= 64 * FEWEST_PROGRAMS:
        return Config("dot", 64, 128, num_stages=3 if out_size >= 1 << 16 else 5, split_k=split_k)
    return Config("dot", 32, 256, split_k=_default_split(out_size, in_size, 32, 264))


def candidates(shape: ProductShape, num_sms: int) -> list[Config | None]:
    """Return the configurations worth measuring on a GPU of `num_sms` multiprocessors, `default` first. None is torch's
    product.

    Some may need more shared memory than the GPU has: their launch raises DoesNotFitError."""
    found: list[Config | None] = [default(shape), None]
    found += _vectors(shape) if shape.max_rows == 1 else _dots(shape, num_sms)
    return list(dict.fromkeys(found))


def check(shape: ProductShape, config: Config | None) -> None:
    """Raise ValueError if this cannot be a shape with a configuration that can be launched."""
    if shape.max_rows not in ROW_CLASSES or min(shape.out_size, shape.in_size) < 1:
        raise ValueError(
            f"{shape} is no product: max_rows must be one of {ROW_CLASSES}, out_size and in_size 1 or more"
        )
    if config is None:
        return
    kind, block_n, block_k, num_warps, num_stages, split_k = config
    powers = [block_k, num_warps] + ([block_n] if kind == "vector" else [])
    is_ok = min(config[1:]) > 0 and all(number & (number - 1) == 0 for number in powers)
    is_ok = is_ok and block_n <= 256 and num_warps <= 16 and num_stages <= 8 and split_k <= 16
    if kind == "vector":
        is_ok = is_ok and block_k <= 1 << 16 and split_k == 1
        is_ok = is_ok and (shape.max_rows == 1 or (shape.max_rows <= 8 and block_k >= shape.in_size))
    else:
        is_ok = is_ok and 16 <= block_k <= 512 and not (shape.is_gated and split_k > 1)
    if not is_ok:
        raise ValueError(f"{config} is no configuration for {shape}")


def _vectors(shape: ProductShape) -> Iterator[Config]:
    whole = _power_of_2(shape.in_size)
    widths = {whole} if shape.is_gated else {min(2048, whole), min(4096, whole), whole}  # the norm reads whole rows
    for block_n, block_k, num_warps in itertools.product((1, 2, 4, 8), sorted(widths), (4, 8)):
        per_thread = block_n * block_k * (1 + shape.is_gated) / (32 * num_warps)  # 16-bit numbers in registers
        if 16 <= per_thread <= 128:
            yield Config("vector", block_n, block_k, num_warps)


def _dots(shape: ProductShape, num_sms: int) -> Iterator[Config]:
    out_size, in_size, max_rows, is_gated = shape
    size = out_size // (1 + is_gated)
    tiles = [(64, 64, 6), (64, 128, 3), (128, 64, 4), (128, 128, 3)]
    if max_rows <= 32:
        tiles += [(16, 256, 5), (32, 128, 5), (32, 256, 4), (64, 128, 5), (64, 256, 3)]
    else:
        tiles += [(64, 128, 4)]
    for (width, block_k, num_stages), split_k in itertools.product(tiles, (1, 2, 4, 8)):
        if split_k > 1 and (in_size < 2 * block_k * split_k or is_gated):
            continue
        for block_n in (width, *_balanced(size, width, split_k, num_sms)):
            num_programs = -(-size // block_n) * split_k
            if num_programs >= FEWEST_PROGRAMS and (split_k == 1 or num_programs <= _MOST_SPLIT_PROGRAMS):
                yield Config("dot", block_n, block_k, 8 if width >= 128 else 4, num_stages, split_k)


def _balanced(size: int, width: int, split_k: int, num_sms: int) -> list[int]:
    """Return the numbers of rows, of `width` / 2 to `width`, with which all multiprocessors get equally many programs.
    Otherwise a few programs that are left over take as long as a whole wave. More than 4 programs at once are rare."""
    rows = (-(-size // max(1, each * num_sms // split_k)) for each in (1, 2, 3, 4))
    return sorted({block_n for block_n in rows if width // 2 < block_n < width})


def _default_split(out_size: int, in_size: int, block_n: int, num_programs: int) -> int:
    """Return the number of programs that share the columns of a row, for `num_programs` programs in all."""
    split_k = 1
    while split_k < 8 and -(-out_size // block_n) * split_k < num_programs and in_size // (2 * split_k) >= 1024:
        split_k *= 2
    return split_k


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
