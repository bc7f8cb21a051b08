"""Descriptors of tensor cores that ptxas loses are found: in the code of a kernel, and in what ptxas writes here.

With BATON_WHOLE_MATRIX=1, `test_compiled_kernels.py` looks for them in all kernels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compile_kernels import disassembled
from descriptors import lost

triton = pytest.importorskip("triton")

# Two products of `_solve_kernel` as ptxas 12.8 wrote it for heads of 12 numbers. UR10 is no address of shared memory.
WRONG = """
/*0000*/ ULDC.64 UR10, c[0x0][0x208] ;
/*0010*/ S2UR UR4, SR_CgaCtaId ;
/*0020*/ UMOV UR5, 0x400 ;
/*0030*/ ULEA UR5, UR4, UR5, 0x18 ;
/*0040*/ USHF.R.U32.HI UR6, URZ, 0x4, UR5 ;
/*0050*/ USGXT.U32 UR6, UR6, 0xe ;
/*0060*/ UMOV UR14, UR6 ;
/*0070*/ UMOV UR15, 0xc0000010 ;
/*0080*/ HGMMA.64x16x16.F32 R24, R32, gdesc[UR12].tnspB, RZ, !UPT ;
/*0090*/ UIADD3 UR4, UP0, UR10, 0x20, URZ ;
/*00a0*/ UIADD3.X UR7, UR10, -0x3ffffff0, URZ, UP0, !UPT ;
/*00b0*/ UMOV UR18, UR4 ;
/*00c0*/ UMOV UR19, UR7 ;
/*00d0*/ HGMMA.64x16x16.F32 R24, R36, gdesc[UR16].tnspB, R24, gsb0 ;
/*00e0*/ EXIT ;
"""
RIGHT = WRONG.replace("UP0, UR10", "UP0, UR6").replace("UR7, UR10", "UR7, URZ")
# The address of the left factor is kept in the stack, its words are swapped, and a loop moves it.
LOOP = """
/*0000*/ S2R R2, SR_CgaCtaId ;
/*0010*/ LEA R2, R2, 0x400, 0x18 ;
/*0020*/ STL [R1+0x10], R2 ;
/*0030*/ MOV R2, 0x40000040 ;
/*0040*/ LDL R3, [R1+0x10] ;
.L_x_1:
/*0050*/ R2UR UR6, R2 ;
/*0060*/ R2UR UR7, R3 ;
/*0070*/ ULOP3.LUT UR7, UR7, UR6, URZ, 0x3c, !UPT ;
/*0080*/ ULOP3.LUT UR6, UR7, UR6, URZ, 0x3c, !UPT ;
/*0090*/ ULOP3.LUT UR7, UR7, UR6, URZ, 0x3c, !UPT ;
/*00a0*/ UIADD3.64 UR4, UR6, 0x2, URZ ;
/*00b0*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0 ;
/*00c0*/ IADD3 R3, R3, 0x80, RZ ;
/*00d0*/ @P0 BRA `(.L_x_1) ;
/*00e0*/ EXIT ;
"""


def _has_tools() -> bool:
    try:
        return bool(triton.knobs.nvidia.ptxas.path and triton.knobs.nvidia.nvdisasm.path)
    except RuntimeError:
        return False


def test_a_descriptor_of_another_register_is_found() -> None:
    assert lost(RIGHT) == (2, [])
    total, lines = lost(WRONG)
    assert total == 2 and len(lines) == 1 and "UR18 of ['ULDC'], UR19 of ['ULDC']" in lines[0], lines


def test_addresses_are_followed_through_the_stack_swaps_and_loops() -> None:
    assert lost(LOOP) == (2, [])
    for right, wrong in (
        ("STL [R1+0x10], R2", "STL [R1+0x14], R2"),
        ("IADD3 R3, R3, 0x80, RZ", "IADD3 R3, R4, 0x80, RZ"),
        ("@P0 BRA", "LDG.E R3, desc[UR8][R8.64] ;\n/*00d8*/ @P0 BRA"),
        ("R2UR UR7, R3", "@P1 R2UR UR7, R3"),
    ):
        assert len(lost(LOOP.replace(right, wrong))[1]) == 2, wrong


@pytest.mark.skipif(not _has_tools(), reason="Triton has no ptxas or nvdisasm here")
@pytest.mark.parametrize("columns", [(64, 16), (64, 32), (16, 64), (64, 64)])
def test_what_ptxas_loses_is_found(columns: tuple[int, int], tmp_path: Path) -> None:
    """ptxas of CUDA 12.8 loses right factors of few columns if one of 64 columns had the same address before."""
    source, target = tmp_path / "products.ptx", tmp_path / "products.cubin"
    source.write_text(_products(columns))
    ptxas = triton.knobs.nvidia.ptxas
    subprocess.run([ptxas.path, "--gpu-name=sm_90a", source, "-o", target], check=True)
    total, lines = lost(disassembled(target.read_bytes()))
    is_lost = ptxas.version == "12.8" and columns[1] < columns[0]
    assert (total, len(lines)) == (8, 3 if is_lost else 0), lines


def _products(all_columns: tuple[int, ...]) -> str:
    """Return PTX of products, each of 4 steps. All right factors are at the beginning of shared memory."""
    lines = [".version 8.4\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 shared[];"]
    lines += [
        ".visible .entry products(.param .u64 out) {",
        ".reg .b32 %r<200>, %x<4>, %s<2>;",
        ".reg .b64 %d<99>, %o;",
    ]
    lines += ["ld.param.b64 %o, [out];", *(f"ld.global.b32 %x{i}, [%o+{4 * i}];" for i in range(4))]
    lines += ["mov.b32 %s0, shared;", "bfe.u32 %s1, %s0, 4, 14;", "cvt.u64.u32 %d0, %s1;"]
    num_sums = num_descriptors = 0
    for columns in all_columns:
        sums = [f"%r{num_sums + i}" for i in range(columns // 2)]
        num_sums += len(sums)
        lines += [*(f"mov.b32 {each}, 0;" for each in sums), "wgmma.fence.sync.aligned;"]
        # the first two bits are the kind of swizzle: a row of 128, 64 or 32 bytes
        first = {64: 0x40000040, 32: 0x80000020, 16: 0xC0000010}[columns] << 32
        for step in range(4):
            num_descriptors += 1
            constant = first + step * 2 * columns
            constant -= (constant >> 63) << 64
            lines.append(f"{'add.s64' if step else 'or.b64'} %d{num_descriptors}, %d0, {constant};")
            product = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{','.join(sums)}}}"
            lines.append(f"{product}, {{%x0,%x1,%x2,%x3}}, %d{num_descriptors}, 1, 1, 1, 1;")
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    lines += [f"st.global.b32 [%o+{4 * i}], %r{i};" for i in range(num_sums)]
    return "\n".join([*lines, "ret;", "}", ""])
