"""Compile kernels for a GPU that is not there: `python compile_kernels.py latents`, `picks`, `fp8`, `routes`,
`experts`, `fp8_pages`, `delta`, `entries`, `small_heads` or `small_states`, or several. `python compile_kernels.py
--write` compiles all, and writes KNOWN.

Triton's interpreter takes programs that its compiler refuses. A process of its own is needed, because a process has
either the interpreter or the compiler. Prints a line per kernel: its name, and the bytes of shared memory it needs.
Each kernel is compiled once, with the tiles and types that come first, and 0 is printed for the others. Compilation
ends when the bytes are known, before code of the device is written. KNOWN keeps the bytes of kernels that have been
compiled, by a digest of all that they depend on: their source and what it calls, types, constants, options and the
version of Triton. A kernel is compiled if its digest is not there, so a change of a kernel is seen without that file.
With BATON_WHOLE_MATRIX=1 all are compiled to the end, the file is checked, and the descriptors of tensor cores are
followed to their addresses (descriptors.py)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from descriptors import lost

IS_WHOLE = "BATON_WHOLE_MATRIX" in os.environ
SHARED_BYTES = 227 * 1024  # of a processor of an H100
KNOWN = Path(__file__).with_name("kernel_bytes.json")  # {kernel and digest: bytes of shared memory}
_TYPES = {"table": "*i64", "seq_lens": "*i64", "starts": "*i32", "tree_starts": "*i64", "visible": "*i64"}
_TYPES |= {"items": "*i64", "arrivals": "*i32", "parts": "*fp32", "stats": "*fp32", "rows": "*i64"}
_E4M3 = "*fp8e4nv"
_compiled: set[Any] = set()  # kernels
_found: dict[str, int] = {}  # like KNOWN, of this process
_ALIGNED = ("in_size", "part", "x_stride")  # multiples of 16, so that tiles pass through shared memory


class _Enough(Exception):
    """Ends a compilation. Carries the bytes of shared memory."""


def shared_bytes(name: str, cache: Path) -> dict[str, int]:
    """Compile a group of kernels in another process, for compute capability 9.0, or several, named with spaces between.
    Return the shared memory of each. Also called where there is no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, __file__, *name.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}


def compiled_bytes(kernel: Any, constants: dict[str, Any], types: Mapping[str, str] = _TYPES, **options: int) -> int:
    """Return the shared memory of a kernel. `types` are those of its tensors; the others are bfloat16."""
    if kernel in _compiled and not IS_WHOLE:
        return 0
    _compiled.add(kernel)
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    kinds = {
        name: types.get(name.removesuffix("_ptr"), "*bf16")
        if name.endswith("_ptr")
        else "fp32"
        if name in ("scale", "eps", "limit", "alpha", "offset", "scaling")
        else "i32"
        for name in kernel.arg_names
    } | dict.fromkeys(constants, "constexpr")
    kinds = {name: kinds[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    is_aligned = (kind.startswith("*") or name in _ALIGNED for name, kind in kinds.items())
    aligned = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(is_aligned) if each}
    source = compiler.ASTSource(fn=kernel, signature=kinds, constexprs=places, attrs=aligned)
    name = f"{kernel.__name__} {_digest(source, options)}"
    if name not in _found:
        known = None if IS_WHOLE else _known().get(name)
        _found[name] = _compile(source, GPUTarget("cuda", 90, 32), options) if known is None else known
    return _found[name]


def _digest(source: Any, options: Mapping[str, int]) -> str:
    import triton

    parts = [triton.__version__, source.hash(), sorted(options.items())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def _known() -> dict[str, int]:
    return json.loads(KNOWN.read_text())


def _compile(source: Any, target: Any, options: Mapping[str, int]) -> int:
    from triton import compiler

    try:
        compiled = compiler.compile(source, target=target, options=options)
    except _Enough as enough:
        return enough.args[0]
    _, lines = lost(disassembled(compiled.asm["cubin"]))
    assert not lines, f"ptxas has lost descriptors of {source.fn.__name__} with {source.constants}: {lines}"
    return compiled.metadata.shared


def disassembled(cubin: bytes) -> str:
    """Return the disassembly of a kernel by Triton's nvdisasm. Raises RuntimeError without one."""
    import triton

    command = [triton.knobs.nvidia.nvdisasm.path, "-c"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def _end_when_bytes_are_known() -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages = CUDABackend.add_stages

    def end(_: Any, metadata: Mapping[str, Any]) -> None:
        raise _Enough(metadata["shared"])

    def add_and_end(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        stages["ptx"] = end

    CUDABackend.add_stages = add_and_end


def _latents() -> None:
    from baton.kernels.attention import triton_expanded, triton_latent_heads, triton_latents

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
    steps = {"few": (16, 64, 4, 2), "some": (16, 32, 4, 5), "many": (16, 32, 4, 3), "tree": (64, 32, 8, 3)}
    for name, (block_m, block_n, num_warps, num_stages) in steps.items():
        is_tree = name == "tree"
        step = {**attends, "BLOCK_M": block_m, "BLOCK_N": block_n, "IS_TREE": is_tree, "HAS_HIDDEN": is_tree}
        step |= {"DEPENDENT": True, "KEYS_FIRST": name == "few"}
        step |= {} if is_tree else dict.fromkeys(("tree_starts_ptr", "visible_ptr"))
        launch = {"num_warps": num_warps, "num_stages": num_stages}
        print(name, compiled_bytes(triton_latents._decode_kernel, step, **launch))
    without_items = dict.fromkeys(("items_ptr", "arrivals_ptr", "parts_ptr", "stats_ptr"))
    chunk = {**attends, "BLOCK_M": 64, "BLOCK_N": 32, "KEYS_FIRST": False, "SEQS": 32, **without_items}
    print("chunk", compiled_bytes(triton_latents._attend_kernel, chunk, num_warps=8, num_stages=3))
    prompt = {"NUM_HEADS": 16, "PLAIN_DIM": 128, "ROPE_DIM": 64, "VALUE_DIM": 128, "BLOCK_P": 128, "BLOCK_R": 64}
    prompt |= {"BLOCK_V": 128, "BLOCK_M": 128, "BLOCK_N": 64, "SEQS": 32}
    types = _TYPES | {"key_starts": "*i32", "offsets": "*i32", "lse": "*fp32", "out": "*fp32"}
    print("prompt", compiled_bytes(triton_expanded._expanded_kernel, prompt, types, num_warps=8, num_stages=3))


def _picks() -> None:
    from baton.kernels.attention import triton_latents, triton_picks

    types = _TYPES | {"weights": "*fp32", "out": "*fp32", "ends": "*i32", "seqs": "*i32"}
    types |= {"places": "*i32", "slots": "*i32", "counts": "*i64"}
    sizes = {"HEAD_DIM": 128, "BLOCK_D": 128, "PAGE_SIZE": 16, "SEQS": 32}
    for name, heads, tiles in (
        ("round", 64, triton_picks._ROUND),
        ("tree", 64, triton_picks._PROMPT),
        ("prompt", 32, triton_picks._PROMPT),
    ):
        constants = {**sizes, "HEADS": heads, "BLOCK_H": heads, "TOKENS": tiles.num_tokens, "IS_TREE": name == "tree"}
        constants |= {"BLOCK_N": tiles.num_keys}
        constants |= {} if name == "tree" else dict.fromkeys(("tree_starts_ptr", "visible_ptr"))
        constants |= {} if name == "prompt" else {"starts_ptr": None}
        launch = {"num_warps": 4, "num_stages": tiles.num_stages}
        print(f"scores {name}", compiled_bytes(triton_picks._scores_kernel, constants, types, **launch))
    attends = {"RANK": 512, "ROTARY_DIM": 64, "BLOCK_D": 512, "BLOCK_R": 64, "GROUP": 128, "PAGE_SIZE": 1}
    attends |= {"BLOCK_M": 64, "BLOCK_N": 32, "IS_TREE": False, "HAS_HIDDEN": False, "DEPENDENT": True}
    attends |= {"KEYS_FIRST": False, "tree_starts_ptr": None, "visible_ptr": None}
    _compiled.discard(triton_latents._decode_kernel)  # with each key on a page of its own
    print("sparse", compiled_bytes(triton_latents._decode_kernel, attends, num_warps=8, num_stages=3))
    types |= {"scores": "*fp32", "nums": "*i32", "keys": "*i32"}
    parts = {"SAMPLE": 8192, "PART": 2048, "CHUNK": 2048, "ROOM": 2048, "ARE_FOURS": True, "DEPENDENT": True}
    print("candidates", compiled_bytes(triton_picks._candidates_kernel, parts, types, num_warps=8))
    few = {"PAGE_SIZE": 16, "RUN": 4096, "ROOM": 2048, "LEVELS": 6, "ARE_FOURS": True, "DEPENDENT": True}
    every = few | {"RUN": 8192, "LEVELS": 0, "slots_ptr": None, "keys_ptr": None, "nums_ptr": None}
    for name, constants in (("choice", few), ("choice of all slots", every)):
        print(name, compiled_bytes(triton_picks._choice_kernel, constants, types, num_warps=16))


def _fp8() -> None:
    from baton.kernels.products import triton_fp8, triton_fp8_rows, triton_fp8_vector

    types = {"values": _E4M3, "weight": _E4M3, "scales": "*fp32", "x_scales": "*fp32", "stored": "*fp32"}
    for way in ("groups", "stored"):
        constants = {"GROUPS": 8, "WIDTH": 128, "IS_STORED": way == "stored", "IS_STORED_BY_ROW": False}
        constants |= {"IS_POWER": False, "DEPENDENT": True}
        print(f"round {way}", compiled_bytes(triton_fp8_rows._round_kernel, constants, types, num_warps=4))
    for groups, width in ((1, 16384), (32, 128)):
        constants = {"GROUPS": groups, "WIDTH": width, "IS_POWER": False, "DEPENDENT": True}
        kernel = triton_fp8_rows._silu_round_kernel
        print(f"silu {width}", compiled_bytes(kernel, constants, types, num_warps=8))
        constants |= {"ADDS": True, "PARTS": 4}
        kernel, of_norm = triton_fp8_rows._norm_round_kernel, types | {"weight": "*bf16", "delta": "*fp32"}
        print(f"norm {width}", compiled_bytes(kernel, constants, of_norm, num_warps=16))
    for x in (_E4M3, "*bf16"):
        for num_rows, out_size in ((1, 4096), (64, 4096), (64, 28672), (256, 28672), (8192, 4096)):
            for is_gated in (False, True) if num_rows == 64 else (False,):
                for is_grouped in (False, True):
                    tiles = triton_fp8.tiles_of(num_rows, out_size, 14336, is_fp8=x == _E4M3, is_gated=is_gated)
                    constants = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
                    constants |= {"ROWS": 128 if is_grouped else 1, "IS_GROUPED": is_grouped, "IS_GATED": is_gated}
                    constants |= {"IS_PART": False, "IS_EVEN": True, "DEPENDENT": True, "bias_ptr": None}
                    constants |= {} if x == _E4M3 else {"x_scales_ptr": None}
                    name = f"{x[1:]} {num_rows} x {out_size} {'groups' if is_grouped else 'rows'} {is_gated}"
                    launch = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
                    print(name, compiled_bytes(triton_fp8._linear_kernel, constants, types | {"x": x}, **launch))
    for part, is_gated, is_grouped in ((4096, True, False), (7168, False, False), (7168, False, True)):
        constants = {"K": 2 * part, "PART": part, "ROWS": 128 if is_grouped else 1, "BLOCK_N": 2 if is_gated else 4}
        constants |= {"GROUPS": 64 if is_grouped else 1, "WIDTH": 128 if is_grouped else 8192, "IS_GATED": is_gated}
        constants |= {"DEPENDENT": True, "bias_ptr": None}
        kernel, of_row = triton_fp8_vector._vector_kernel, types | {"x": _E4M3}
        print(f"vector {part} {is_gated} {is_grouped}", compiled_bytes(kernel, constants, of_row, num_warps=8))


def _routes() -> None:
    from baton.kernels.experts import triton_places, triton_routes

    types = {"chosen": "*i64", "pairs": "*i32", "experts": "*i32"}
    types |= dict.fromkeys(("weight", "parts", "product_bias", "bias", "shares"), "*fp32")
    types["counts"] = "*i32"
    for num_pairs in (8, 2048, 16384, 65536):
        segments, chunk, num_warps = triton_places.segments_of(num_pairs)
        places = {"EXPERTS": 256, "BLOCK": 16, "CHUNK": chunk, "SEGMENTS": segments, "DEPENDENT": True}
        places |= {"counts_ptr": None} if segments == 1 else {}
        print(f"place {num_pairs}", compiled_bytes(triton_places._place_kernel, places, types, num_warps=num_warps))
    counts = {"EXPERTS": 256, "CHUNK": 1024}
    print("count", compiled_bytes(triton_places._count_kernel, counts, types, num_warps=4))
    for x, rows in (("*bf16", (1, 64, 8192)), ("*fp32", (1, 64, 8192))):
        for num_rows in rows:
            tiles = triton_routes.tiles_of(num_rows, 128, 2048)
            constants = {"BLOCK_R": tiles.block_r, "BLOCK_E": 64, "BLOCK_K": tiles.block_k, "DEPENDENT": True}
            own = (triton_routes._product_kernel, constants, types | {"x": x})
            print(f"{x[1:]} {num_rows}", compiled_bytes(*own, num_warps=4, num_stages=tiles.num_stages))
    for rows in (1, 4):
        plain = {"GROUPS": 1, "PER_GROUP": 128, "WIDTH": 128, "ACTIVE_GROUPS": 0, "RANKING": 1, "SCORING": "softmax"}
        plain |= {"PARTS": 32, "ROWS": rows, "ACTIVE": 8, "SUMS_TO_ONE": True, "LEAST": 1e-20, "DEPENDENT": True}
        groups = plain | {"GROUPS": 8, "PER_GROUP": 20, "WIDTH": 32, "ACTIVE_GROUPS": 4, "RANKING": 2}
        groups["SCORING"] = "sigmoid"
        for name, constants in (("plain", plain | {"bias_ptr": None}), ("groups", groups)):
            own = (triton_routes._choose_kernel, {**constants, "product_bias_ptr": None, "given_ptr": None}, types)
            print(f"{name} {rows}", compiled_bytes(*own, num_warps=rows))


def _experts() -> None:
    from baton.kernels.experts import triton_expert_blocks, triton_expert_packed, triton_expert_row, triton_experts
    from baton.kernels.experts.triton_expert_blocks import BlockTiles
    from baton.kernels.experts.triton_expert_packed import PackedTiles
    from baton.kernels.experts.triton_expert_row import RowTiles

    types = {"pairs": "*i32", "experts": "*i32", "scales": "*fp32", "x_scales": "*fp32", "shares": "*fp32"}
    types["chosen"] = "*i64"
    mix = {"ACTIVE": 8, "OTHERS": 1, "BLOCK": 1024, "DEPENDENT": True}
    print("mix", compiled_bytes(triton_experts._mix_kernel, mix, types, num_warps=4))
    flags = {"bias_ptr": None, "IS_GATED": True, "IS_CLAMPED": False, "DEPENDENT": True}
    flags |= {"size": 768, "out_size": 1536, "x_stride": 2048}  # multiples of 16, as a launch tells them
    formats = {
        "plain": ("*bf16", "*bf16"),
        "wide": ("*fp32", "*fp32"),
        "rows": (_E4M3, _E4M3),
        "groups": (_E4M3, _E4M3),
        "16 bits": ("*bf16", _E4M3),
    }
    for name, (x, weight) in formats.items():
        is_grouped, own = name == "groups", types | {"x": x, "weight": weight}
        item_size = {_E4M3: 1, "*bf16": 2, "*fp32": 4}[weight]
        kept = flags | {"ROWS": 128 if is_grouped else 1} | ({} if x == _E4M3 else {"x_scales_ptr": None})
        kept |= {} if weight == _E4M3 else {"scales_ptr": None}
        for block in (16, 32, 64, 128):
            tiles = BlockTiles.choose(block, item_size, is_gated=True, is_grouped=is_grouped)
            constants = kept | {"in_size": 2048, "BLOCK_M": block, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
            constants |= {"IS_EVEN": True, "IS_GROUPED": is_grouped, "IS_WEIGHT_LEFT": tiles.is_weight_left}
            constants["HAS_HALVES"] = tiles.has_halves
            constants.pop("size")
            launch = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
            print(f"{name} {block}", compiled_bytes(triton_expert_blocks._block_kernel, constants, own, **launch))
        for part, kernel, in_size in (
            ("gated", triton_expert_row._gated_kernel, 2048),
            ("summed", triton_expert_row._summed_kernel, 1408),
        ):
            is_gated = part == "gated"
            tiles = (RowTiles.of_gated if is_gated else RowTiles.of_sum)(in_size, item_size)
            constants = kept | {"K": in_size, "CHUNK": tiles.chunk, "GROUP": 128 if is_grouped else 0}
            constants |= {"N": tiles.rows, "WARPS": 8, "OTHERS": 0, "others_ptr": None}
            names = kernel.arg_names
            constants = {each: value for each, value in constants.items() if each in names}
            print(f"{name} row {part}", compiled_bytes(kernel, constants, own, num_warps=1 if is_gated else 8))
    for block in (8, 16, 32, 64, 128):
        for x, item_size in (("*bf16", 2), ("*fp32", 4)):
            tiles, is_paired = PackedTiles.choose(block, item_size), x == "*bf16"
            constants = {"BLOCK_M": block, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "HALF": 16}
            constants |= {"IS_WEIGHT_LEFT": tiles.is_weight_left, "IS_PAIRED": is_paired}
            constants |= {"HAS_HALVES": tiles.has_halves} | ({"pairs_ptr": None} if block == 8 else {})
            constants |= {"IS_GATED": True, "IS_CLAMPED": True, "DEPENDENT": True, "scale_stride": 64, "out_size": 1536}
            constants |= {"row_size": 1024, "x_stride": 2048}
            own = types | {"x": x, "weight": "*u8", "scales": "*u8"} | ({"experts": "*i64"} if block == 8 else {})
            launch = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
            name = f"packed {block} {x[1:]}"
            print(name, compiled_bytes(triton_expert_packed._packed_kernel, constants, own, **launch))


def _fp8_pages() -> None:
    from baton.kernels.attention import triton_attention, triton_extend, triton_history
    from baton.kernels.attention.triton_attention import stages_that_fit, tile_keys
    from baton.kernels.state import triton_store, triton_trees

    kinds = [("*bf16", 16 * 128, 128, 128), (_E4M3, 16 * (128 + 4), 128, 128)]
    if IS_WHOLE:
        kinds.append(("*bf16", 16 * 192, 192, 128))  # values are narrower than keys
    for pages, block, head_dim, value_dim in kinds:
        _compiled.clear()  # all types are compared
        types, padded = _TYPES | {"kv": pages, "scales": "*fp32", "positions": "*i64"}, 128 if head_dim == 128 else 256
        layout = {"NUM_KV_HEADS": 8, "PAGE_SIZE": 16, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK": block}
        layout |= ({} if pages == _E4M3 else {"scales_ptr": None}) | ({"v_ptr": None} if padded == 128 else {})
        suffix = "" if padded == 128 else " narrow"
        q = torch.empty(1, 32, head_dim, dtype=torch.bfloat16, device="meta")
        tiles = {**layout, "GROUP": 4, "BLOCK_N": tile_keys(q), "BLOCK_D": padded}
        flags = {"IS_TREE": True, "HAS_WINDOW": True, "HAS_PARTS": True, "HAS_HIDDEN": True, "DEPENDENT": True}
        round_ = {**tiles, **flags, "BLOCK_M": 16, "MIN_SPLIT": 256}
        launch = {"num_warps": 4, "num_stages": stages_that_fit(q, tile_keys(q), 3)}
        for kv in (pages, "*u16") if pages == _E4M3 else (pages,):
            name, types["kv"] = kv[1:] + suffix, kv
            print(f"{name} round", compiled_bytes(triton_attention._decode_kernel, round_, types, **launch))
            chunk = {**tiles, "BLOCK_M": 128, "SEQS": 32, "HAS_WINDOW": False}
            of_chunk = {"num_warps": 8, "num_stages": 3 if padded == 128 else 2}
            print(f"{name} chunk", compiled_bytes(triton_extend._extend_kernel, chunk, types, **of_chunk))
        name, types["kv"] = pages[1:] + suffix, pages
        stores = {**layout, "NUM_HEADS": 32, "HEADS": 16, "HALF": padded // 2, "DEPENDENT": True}
        stores["WRITES_BACK"] = pages == _E4M3
        print(f"{name} store", compiled_bytes(triton_store._store_kernel, stores, types, num_warps=4))
        gathers = {**layout, "KEYS": 64, "BLOCK_D": padded}
        print(f"{name} gather", compiled_bytes(triton_history._gather_kernel, gathers, types, num_warps=4))
    types = _TYPES | {"sources": "*i64", "targets": "*i64"}
    for kv, width, block in (("*u8", 128, 16 * 132), ("*fp32", 1, 4 * 132)):
        moves = {"PAGE_SIZE": 16, "HEAD_DIM": width, "BLOCK": block, "MOVES": 8, "BLOCK_D": width}
        print(f"{kv[1:]} move", compiled_bytes(triton_trees._move_kernel, moves, types | {"kv": kv}, num_warps=1))


def _delta() -> None:
    from baton.kernels.state import (
        triton_delta_gate,
        triton_delta_pairs,
        triton_delta_prompt,
        triton_delta_round,
    )

    kinds = dict.fromkeys(("updates", "states", "taps", "a_log", "dt_bias", "vectors", "products", "steps"), "*fp32")
    types = _TYPES | kinds | {"decays": "*fp32", "rows": "*bf16"}
    types |= dict.fromkeys(("starts", "stops", "tokens", "first_blocks", "block_seqs", "block_edges"), "*i32")
    for shared, decay_dim, token_stride in ((2, 1, 16 * 772), (1, 128, 4 * 4096 + 160)):  # Qwen3-Next, Kimi-Linear
        heads, words = 32 // shared, "" if decay_dim == 1 else " by channel"
        sizes = {"HEADS": heads, "SHARED": shared, "KEY_DIM": 128, "VALUE_DIM": 128, "DECAY_DIM": decay_dim}
        sizes |= {"PAGE_SIZE": 64, "UPDATE_WIDTH": 392 if decay_dim == 1 else 384, "BLOCK": 64, "BLOCK_K": 128}
        of_inputs = {"QKV_HEAD": 772 if decay_dim == 1 else 128, "B_HEAD": 772 if decay_dim == 1 else 1, "TAPS": 4}
        of_inputs |= {"A_HEAD": 772 if decay_dim == 1 else 128, "token_stride": token_stride, "b_stride": token_stride}
        of_inputs |= {"a_stride": token_stride if decay_dim == 1 else 4096}
        both = {**sizes, "QKV_HEAD": of_inputs["QKV_HEAD"], "TAPS": 4, "ROWS": 64, "EARLY": True, "DEPENDENT": True}
        tiles = triton_delta_round.TILE_OF_KEYS, triton_delta_round.TILE_OF_DECAYS
        num_warps, registers = tiles[decay_dim > 1]
        constants = {**both, **of_inputs, "BLOCK_S": shared, "GROUP": num_warps}
        kernel, launch = triton_delta_round._rows_kernel, {"num_stages": 1, "maxnreg": registers}
        print(f"rows{words}", compiled_bytes(kernel, constants, types, num_warps=num_warps, **launch))
        block_v, num_warps = triton_delta_round.TILE_OF_STATE
        constants = {**both, "BLOCK_V": block_v, "STATE_PART": 256 * shared, "token_stride": token_stride}
        constants |= {"NEW": 16, "SINGLE": False}
        kernel, launch = triton_delta_round._round_kernel, {"num_stages": 1}
        launch |= {"maxnreg": triton_delta_round.REGISTERS_OF_STATE[1]}
        for states, kind in (("*fp32", ""), ("*bf16", " of short states")):
            own = types | {"states": states}
            print(f"round{words}{kind}", compiled_bytes(kernel, constants, own, num_warps=num_warps, **launch))
        _delta_trees(words, sizes, of_inputs, types)
        of_blocks = {**sizes, "ROWS": 64}
        for kept, scale, states in (("*fp16", 1 / 16, "*fp32"), ("*fp32", 1.0, "*bf16")):
            own = types | dict.fromkeys((*"qkw", "values", "pairs", "system"), kept) | {"states": states}
            of_states = {**of_blocks, "STATE_PART": 256 * shared, "SCALE": scale}
            prompt = {"convolve": {**sizes, **of_inputs, "BLOCK_V": 128, "SCALE": scale, "KEEP": False}}
            if decay_dim == 1:
                prompt["pairs"] = {**of_blocks, "KEEP": False}
            else:
                prompt |= dict.fromkeys(("decays", "channel_pairs"), of_blocks)
            prompt |= {"invert": {"HEADS": 32, "BLOCK": 64}, "solve": {**of_blocks, "BLOCK_V": 128}}
            prompt |= {"pass": {**of_states, "BLOCK_V": 32, "KEEP": False}, "outputs": {**of_states, "BLOCK_V": 64}}
            del prompt["outputs"]["UPDATE_WIDTH"]
            for name, constants in prompt.items():
                module = triton_delta_pairs if name in ("pairs", "decays", "channel_pairs") else triton_delta_prompt
                kernel, launch = getattr(module, f"_{name}_kernel"), {"num_warps": 1 if name == "invert" else 4}
                launch |= {"num_stages": 3 if kept == "*fp16" else 1} if name == "pass" else {}
                launch |= {"maxnreg": 80} if name == "convolve" else {}
                print(f"{name} {kept[1:]}{words}", compiled_bytes(kernel, constants, own, **launch))
    constants = {"GATE_HEAD": 768, "VALUES": 32, "SHARED": 2, "DIM": 128, "BLOCK": 128, "ROWS": 4, "SIGMOID": False}
    print("gate", compiled_bytes(triton_delta_gate._gate_kernel, constants | {"DEPENDENT": True}, types, num_warps=4))


def _delta_trees(words: str, sizes: dict[str, Any], of_inputs: dict[str, Any], types: dict[str, str]) -> None:
    from baton.kernels.state import triton_delta_tree

    shared, own = sizes["SHARED"], types | {"paths": "*i32"}
    both = {**sizes, "QKV_HEAD": of_inputs["QKV_HEAD"], "TAPS": 4, "ROWS": 64, "LONGEST": 16}
    num_warps = triton_delta_tree.WARPS_OF_NODES[sizes["DECAY_DIM"] > 1]
    constants, kernel = {**both, **of_inputs, "BLOCK_S": shared}, triton_delta_tree._nodes_kernel
    print(f"nodes of trees{words}", compiled_bytes(kernel, constants, own, num_warps=num_warps, num_stages=1))
    block_v, num_warps = triton_delta_tree.TILE_OF_STATE
    part = {"STATE_PART": 256 * shared, "BLOCK_V": block_v}
    constants = {**both, **part, "NODES": 64, "token_stride": of_inputs["token_stride"]}
    del constants["BLOCK_K"]
    kernel = triton_delta_tree._tree_kernel
    print(f"columns of trees{words}", compiled_bytes(kernel, constants, own, num_warps=num_warps, num_stages=1))
    kernel = triton_delta_tree._edges_kernel
    print(f"edges of trees{words}", compiled_bytes(kernel, {**sizes, **part}, own, num_warps=num_warps))


def _entries() -> None:
    from baton.kernels.entries import triton_compress, triton_sums

    types = _TYPES | dict.fromkeys(("pages", "made", "sums", "bias", "frequencies"), "*fp32")
    types |= {"tails": "*i64"} | dict.fromkeys(("arrivals", "slots", "seqs", "firsts", "ends"), "*i32")
    both = {"RATE": 4, "WIDTH": 512, "PAIRS": 32, "PAGE_SIZE": 128, "NUM_KEPT": 24, "STRIDE": 512, "BLOCK": 64}
    both |= {"BLOCK_P": 256, "DEPENDENT": True}
    more = {"MAKES": True, "STORES": True, "COLUMNS": 1024, "STORED": 256, "BLOCK_R": 8, "BLOCK_S": 256}
    print("compress", compiled_bytes(triton_compress._compress_kernel, both | more, types, num_warps=4))
    of_sums = both | {"RATE": 128, "NUM_KEPT": 18, "AT_ONCE": 8}
    for stores in (True, False):
        constants = of_sums | {"STORES": stores}
        print(f"sums {stores}", compiled_bytes(triton_sums._sums_kernel, constants, types, num_warps=2))
    constants = {"WIDTH": 512, "PAGE_SIZE": 256, "NUM_KEPT": 18, "BLOCK": 1024, "DEPENDENT": True}
    print("store", compiled_bytes(triton_sums._store_kernel, constants, types, num_warps=4))


def _small_heads() -> None:
    """Kernels with heads so small that rows in shared memory have 32 or 64 bytes (descriptors.py)."""
    from baton.kernels.attention import triton_attention, triton_expanded, triton_extend, triton_latents
    from baton.kernels.attention.triton_attention import stages_that_fit, tile_keys

    for dim in (16, 32):
        q = torch.empty(1, 8, dim, dtype=torch.bfloat16, device="meta")
        tiles = {"NUM_KV_HEADS": 2, "GROUP": 4, "PAGE_SIZE": 16, "HEAD_DIM": dim, "VALUE_DIM": dim, "BLOCK": 16 * dim}
        tiles |= {"BLOCK_N": tile_keys(q), "BLOCK_D": dim, "HAS_WINDOW": False, "scales_ptr": None, "v_ptr": None}
        launch = {"num_warps": 8, "num_stages": 3, "maxnreg": triton_extend._MAX_REGISTERS}
        chunk = tiles | {"BLOCK_M": 128, "SEQS": 32}
        print(f"chunk {dim}", compiled_bytes(triton_extend._extend_kernel, chunk, **launch))
        launch = {"num_warps": 4, "num_stages": stages_that_fit(q, tile_keys(q), 3)}
        tree = tiles | dict.fromkeys(("IS_TREE", "HAS_PARTS", "HAS_HIDDEN", "DEPENDENT"), True)
        tree |= {"BLOCK_M": 64, "MIN_SPLIT": 256}
        print(f"tree {dim}", compiled_bytes(triton_attention._decode_kernel, tree, **launch))
        types = _TYPES | {"key_starts": "*i32", "offsets": "*i32", "lse": "*fp32", "out": "*fp32"}
        prompt = {"NUM_HEADS": 4, "PLAIN_DIM": dim, "ROPE_DIM": dim // 2, "VALUE_DIM": dim, "BLOCK_P": dim}
        prompt |= {"BLOCK_R": 16, "BLOCK_V": dim, "BLOCK_M": 128, "BLOCK_N": 64, "SEQS": 32}
        launch = {"num_warps": 8, "num_stages": 3}
        print(f"prompt {dim}", compiled_bytes(triton_expanded._expanded_kernel, prompt, types, **launch))
        few = {"RANK": 2 * dim, "ROTARY_DIM": dim, "BLOCK_D": 2 * dim, "BLOCK_R": dim, "GROUP": 16, "PAGE_SIZE": 16}
        few |= {
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "IS_TREE": True,
            "HAS_HIDDEN": True,
            "KEYS_FIRST": True,
            "DEPENDENT": True,
        }
        launch = {"num_warps": 4, "num_stages": 2}
        print(f"latents {dim}", compiled_bytes(triton_latents._decode_kernel, few, **launch))


def _small_states() -> None:
    """Prompts of the delta rule with heads of 12 and 10 numbers."""
    from baton.kernels.state import triton_delta_pairs, triton_delta_prompt

    kinds = dict.fromkeys(("updates", "states", "a_log", "dt_bias", "decays"), "*fp32")
    types = _TYPES | kinds | dict.fromkeys((*"qkw", "values", "pairs", "system"), "*fp16")
    types |= dict.fromkeys(("stops", "block_seqs", "block_edges"), "*i32")
    for block, decay_dim in ((64, 1), (64, 12), (128, 1)):
        sizes = {"HEADS": 4, "SHARED": 2 if decay_dim == 1 else 1, "KEY_DIM": 12, "VALUE_DIM": 10, "BLOCK": block}
        sizes |= {"DECAY_DIM": decay_dim, "PAGE_SIZE": block, "ROWS": block, "UPDATE_WIDTH": 64, "BLOCK_K": 16}
        states = sizes | {"STATE_PART": 128, "SCALE": 1 / 16, "BLOCK_V": 16}
        wide = triton_delta_prompt._FEWEST
        of_kernels = {"solve": sizes | {"BLOCK_K": wide, "BLOCK_V": wide}, "pass": states | {"KEEP": False}}
        of_kernels["outputs"] = {name: value for name, value in states.items() if name != "UPDATE_WIDTH"}
        of_kernels |= {"pairs": sizes | {"KEEP": False}} if decay_dim == 1 else {"channel_pairs": sizes}
        for name, constants in of_kernels.items():
            kernel = getattr(triton_delta_pairs if "pairs" in name else triton_delta_prompt, f"_{name}_kernel")
            launch = {"num_warps": 4} | ({"num_stages": 3} if name == "pass" else {})
            print(f"{name} {block} {decay_dim}", compiled_bytes(kernel, constants, types, **launch))


def _check_known() -> None:
    """Check the bytes in KNOWN. A kernel that has changed since is not there."""
    wrong = {name: known for name, known in _known().items() if _found.get(name, known) != known}
    assert not wrong, f"{KNOWN.name} has other bytes than { ({name: _found[name] for name in wrong}) }: {wrong}"


def main(arguments: list[str]) -> None:
    if not IS_WHOLE:
        _end_when_bytes_are_known()
    groups = {"latents": _latents, "picks": _picks, "fp8": _fp8, "routes": _routes, "experts": _experts}
    groups |= {"fp8_pages": _fp8_pages, "delta": _delta, "entries": _entries}
    groups |= {"small_heads": _small_heads, "small_states": _small_states}
    for group in groups if arguments == ["--write"] else arguments:
        groups[group]()
    if IS_WHOLE:
        _check_known()
    elif arguments == ["--write"]:
        KNOWN.write_text(json.dumps(_found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
