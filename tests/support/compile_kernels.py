"""Compile kernels for a GPU that is not there: `python compile_kernels.py latents`, `fp8`, `experts` or
`fp8_pages`.

Triton's interpreter takes programs that its compiler refuses. A process of its own is needed, because a process has
either the interpreter or the compiler. Prints a line per kernel: its name, and the bytes of shared memory it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SHARED_BYTES = 227 * 1024  # of a processor of an H100
_TYPES = {"table": "*i64", "seq_lens": "*i64", "starts": "*i32", "tree_starts": "*i64", "visible": "*i64"}
_TYPES |= {"items": "*i64", "arrivals": "*i32", "parts": "*fp32", "stats": "*fp32", "rows": "*i64"}
_E4M3 = "*fp8e4nv"


def shared_bytes(name: str, cache: Path) -> dict[str, int]:
    """Compile a group of kernels in another process, for compute capability 9.0. Return the shared memory of each. Also
    called where there is no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}


def compiled_bytes(kernel: Any, constants: dict[str, Any], types: Mapping[str, str] = _TYPES, **options: int) -> int:
    """Return the shared memory of a kernel. `types` are those of its tensors; the others are bfloat16."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    kinds = {
        name: types.get(name.removesuffix("_ptr"), "*bf16")
        if name.endswith("_ptr")
        else "fp32"
        if name in ("scale", "eps", "limit", "alpha")
        else "i32"
        for name in kernel.arg_names
    } | dict.fromkeys(constants, "constexpr")
    kinds = {name: kinds[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind.startswith("*")}
    source = compiler.ASTSource(fn=kernel, signature=kinds, constexprs=places, attrs=aligned)
    return compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


def _latents() -> None:
    from baton.kernels import triton_expanded, triton_latent_heads, triton_latents

    heads = {"PLAIN_DIM": 128, "RANK": 512, "DEPENDENT": True}
    absorbs = {**heads, "ROPE_DIM": 64, "BLOCK_P": 128, "BLOCK_RANK": 512, "HALF": 32, "UP_HEAD": 256 * 512}
    few = {**absorbs, "BLOCK_D": 64, "BLOCK_M": 64, "ROWS": 8, "TURNED_HEAD": 576}
    absorb, values = triton_latent_heads._absorb_kernel, triton_latent_heads._values_kernel
    few |= {"ABSORBS": True, "IS_INTERLEAVED": True, "latents_ptr": None}
    print("absorb", compiled_bytes(absorb, few, num_warps=4))
    many = {**absorbs, "BLOCK_D": 512, "BLOCK_M": 16, "ROWS": 16, "TURNED_HEAD": 192}
    many |= {"ABSORBS": False, "IS_INTERLEAVED": True, "heads_ptr": None}
    print("turn", compiled_bytes(absorb, many, num_warps=4))
    made = {**heads, "NUM_HEADS": 16, "VALUE_DIM": 128, "BLOCK_M": 64, "BLOCK_D": 512, "BLOCK_V": 32}
    print("values", compiled_bytes(values, made, num_warps=4))
    sizes = {"RANK": 512, "ROTARY_DIM": 64, "BLOCK_D": 512}
    attends = {**sizes, "GROUP": 16, "PAGE_SIZE": 16, "BLOCK_R": 64}
    for name in ("step", "tree"):
        step = {**attends, "BLOCK_M": 16, "BLOCK_N": 64, "IS_TREE": name == "tree", "DEPENDENT": True}
        step |= {"HAS_HIDDEN": name == "tree", "KEYS_FIRST": True}
        step |= {} if name == "tree" else dict.fromkeys(("tree_starts_ptr", "visible_ptr"))
        print(name, compiled_bytes(triton_latents._decode_kernel, step, num_warps=4, num_stages=2))
    without_items = dict.fromkeys(("items_ptr", "arrivals_ptr", "parts_ptr", "stats_ptr"))
    chunk = {**attends, "BLOCK_M": 64, "BLOCK_N": 32, "KEYS_FIRST": False, "SEQS": 32, **without_items}
    print("chunk", compiled_bytes(triton_latents._attend_kernel, chunk, num_warps=8, num_stages=2))
    prompt = {"NUM_HEADS": 16, "PLAIN_DIM": 128, "ROPE_DIM": 64, "VALUE_DIM": 128, "BLOCK_P": 128, "BLOCK_R": 64}
    prompt |= {"BLOCK_V": 128, "BLOCK_M": 128, "BLOCK_N": 64, "SEQS": 32}
    types = _TYPES | {"key_starts": "*i32", "offsets": "*i32", "lse": "*fp32", "out": "*fp32"}
    print("prompt", compiled_bytes(triton_expanded._expanded_kernel, prompt, types, num_warps=8, num_stages=3))


def _fp8() -> None:
    from baton.kernels import triton_fp8

    types = {"values": _E4M3, "weight": _E4M3, "scales": "*fp32", "x_scales": "*fp32", "stored": "*fp32"}
    for way in ("groups", "stored"):
        constants = {"GROUPS": 8, "WIDTH": 128, "IS_STORED": way == "stored", "IS_STORED_BY_ROW": False}
        constants |= {"IS_POWER": False, "DEPENDENT": True}
        print(f"round {way}", compiled_bytes(triton_fp8._round_kernel, constants, types, num_warps=4))
    for x in (_E4M3, "*bf16"):
        for num_rows in (1, 64, 8192):
            for is_grouped in (False, True):
                is_few = num_rows <= triton_fp8.MAX_FEW
                tiles, launch = triton_fp8.tiles_of(num_rows)
                constants = {**tiles, "ROWS": 128 if is_grouped else 1, "IS_GROUPED": is_grouped, "DEPENDENT": True}
                constants |= {"HAS_X_SCALES": x == _E4M3, "HAS_BIAS": False, "IS_EVEN": True}
                constants["IS_FP8"] = x == _E4M3 and not is_few
                name = f"{x[1:]} {num_rows} {'groups' if is_grouped else 'rows'}"
                print(name, compiled_bytes(triton_fp8._linear_kernel, constants, types | {"x": x}, **launch))


def _experts() -> None:
    from baton.kernels import triton_experts

    types = {"chosen": "*i64", "pairs": "*i32", "experts": "*i32", "scales": "*fp32", "x_scales": "*fp32"}
    places = {"EXPERTS": 256, "BLOCK": 16, "CHUNK": 32, "DEPENDENT": True}
    print("place", compiled_bytes(triton_experts._place_kernel, places, types, num_warps=8))
    mix = {"ACTIVE": 8, "BLOCK": 1024, "DEPENDENT": True}
    print("mix", compiled_bytes(triton_experts._mix_kernel, mix, types | {"shares": "*fp32"}, num_warps=4))
    formats = {"plain": ("*bf16", "*bf16"), "e4m3": (_E4M3, _E4M3), "groups": (_E4M3, _E4M3)}
    formats |= {"16 bits": ("*bf16", _E4M3), "packed": ("*bf16", "*u8")}
    for name, (x, weight) in formats.items():
        for block in (16, 128):
            is_packed, is_grouped = name == "packed", name == "groups"
            is_scaled = name != "plain" and not is_packed
            tiles, launch = triton_experts.tiles_of(block, is_scaled=is_scaled, is_packed=is_packed)
            constants = {**tiles, "ROWS": 128 if is_grouped else 1, "IS_SCALED": is_scaled, "IS_GROUPED": is_grouped}
            constants |= {"HAS_X_SCALES": x == _E4M3, "IS_GATED": True, "DEPENDENT": True}
            constants |= {"IS_CLAMPED": is_packed, "PACKED_GROUP": 32 if is_packed else 0}
            constants["IS_FP8"] = x == _E4M3 and block > triton_experts.MAX_SMALL
            own = types | {"x": x, "weight": weight} | ({"scales": "*u8"} if is_packed else {})
            constants |= {} if is_packed else {"bias_ptr": None}
            print(f"{name} {block}", compiled_bytes(triton_experts._product_kernel, constants, own, **launch))


def _fp8_pages() -> None:
    from baton.kernels import triton_attention, triton_extend, triton_store, triton_trees
    from baton.kernels.triton_attention import stages_that_fit, tile_keys

    sizes = {"NUM_KV_HEADS": 8, "PAGE_SIZE": 16, "HEAD_DIM": 128}
    for pages, block in (("*bf16", 16 * 128), (_E4M3, 16 * (128 + 4))):
        types, name = _TYPES | {"kv": pages, "scales": "*fp32", "positions": "*i64"}, pages[1:]
        layout = {**sizes, "BLOCK": block} | ({} if pages == _E4M3 else {"scales_ptr": None})
        q = torch.empty(1, 32, 128, dtype=torch.bfloat16, device="meta")
        tiles = {**layout, "GROUP": 4, "BLOCK_N": tile_keys(q), "BLOCK_D": 128}
        flags = {"IS_TREE": True, "HAS_WINDOW": True, "HAS_PARTS": True, "HAS_HIDDEN": True, "DEPENDENT": True}
        round_ = {**tiles, **flags, "BLOCK_M": 16, "MIN_SPLIT": 256}
        launch = {"num_warps": 4, "num_stages": stages_that_fit(q, tile_keys(q), 3)}
        print(f"{name} round", compiled_bytes(triton_attention._decode_kernel, round_, types, **launch))
        chunk = {**tiles, "BLOCK_M": 128, "SEQS": 32, "HAS_WINDOW": False}
        launch = {"num_warps": 8, "num_stages": 3}
        print(f"{name} chunk", compiled_bytes(triton_extend._extend_kernel, chunk, types, **launch))
        stores = {**layout, "NUM_HEADS": 32, "HEADS": 16, "HALF": 64, "DEPENDENT": True}
        print(f"{name} store", compiled_bytes(triton_store._store_kernel, stores, types, num_warps=4))
    types = _TYPES | {"sources": "*i64", "targets": "*i64"}
    for kv, width, block in (("*u8", 128, 16 * 132), ("*fp32", 1, 4 * 132)):
        moves = {"PAGE_SIZE": 16, "HEAD_DIM": width, "BLOCK": block, "MOVES": 8, "BLOCK_D": width}
        print(f"{kv[1:]} move", compiled_bytes(triton_trees._move_kernel, moves, types | {"kv": kv}, num_warps=1))


if __name__ == "__main__":
    {"latents": _latents, "fp8": _fp8, "experts": _experts, "fp8_pages": _fp8_pages}[sys.argv[1]]()
