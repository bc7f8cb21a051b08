"""Compile kernels of attention to latents for a GPU that is not there: `python compile_kernels.py`.

Triton's interpreter takes programs that its compiler refuses. A process of its own is needed, because a process has
either the interpreter or the compiler. Prints a line per kernel: its name, and the bytes of shared memory it needs."""

from __future__ import annotations

from typing import Any

from triton import compiler
from triton.backends.compiler import GPUTarget

from baton.kernels import triton_latents

H100 = GPUTarget("cuda", 90, 32)
_TYPES = {"table": "*i64", "seq_lens": "*i64", "starts": "*i32", "tree_starts": "*i64", "visible": "*i64"}
_TYPES |= {"items": "*i64", "arrivals": "*i32", "parts": "*fp32", "stats": "*fp32", "rows": "*i64"}


def compiled_bytes(kernel: Any, constants: dict[str, Any], **options: int) -> int:
    """Return the shared memory of a kernel whose other tensors are bfloat16."""
    types = {
        name: _TYPES.get(name.removesuffix("_ptr"), "*bf16")
        if name.endswith("_ptr")
        else "fp32"
        if name in ("scale", "eps")
        else "i32"
        for name in kernel.arg_names
    } | dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = compiler.ASTSource(fn=kernel, signature=types, constexprs=places, attrs=aligned)
    return compiler.compile(source, target=H100, options=options).metadata.shared


def main() -> None:
    sizes = {"RANK": 512, "ROTARY_DIM": 64, "BLOCK_D": 512}
    joins = {**sizes, "IS_INTERLEAVED": True, "HALF": 32}
    print("join", compiled_bytes(triton_latents._join_kernel, joins, num_warps=2))
    turns = {**sizes, "NUM_HEADS": 16, "HEADS": 8, "HALF": 32, "BLOCK_D": 1024}
    print("rotate", compiled_bytes(triton_latents._rotate_kernel, turns, num_warps=2))
    attends = {**sizes, "GROUP": 16, "PAGE_SIZE": 16, "BLOCK_N": 32, "BLOCK_R": 64, "SEQS": 32}
    without_items = dict.fromkeys(("items_ptr", "arrivals_ptr", "parts_ptr", "stats_ptr"))
    without_tree = dict.fromkeys(("tree_starts_ptr", "visible_ptr"))
    tree = {**attends, "BLOCK_M": 16, "IS_TREE": True}
    print("tree", compiled_bytes(triton_latents._attend_kernel, tree, num_warps=4, num_stages=2))
    chunk = {**attends, "BLOCK_M": 64, "IS_TREE": False, **without_tree, **without_items}
    print("chunk", compiled_bytes(triton_latents._attend_kernel, chunk, num_warps=8, num_stages=2))


if __name__ == "__main__":
    main()
