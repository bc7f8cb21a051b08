"""The table of operations: what it says, which backend it chooses, and that it imports nothing else."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton_device import IS_INTERPRETED

from baton.kernels import operations
from baton.kernels.operations import TABLE, Operation, backends, captures, preferring, reader
from baton.kernels.products.norm import add_rms_norm_, rms_norm, rms_norm_ref

pytest.importorskip("triton")
pytest.importorskip("numba")

KERNELS = Path(operations.__file__).parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Operations with a reference file, by file: importing it declares them.
DECLARED = {
    "products.norm": ["rms_norm", "add_rms_norm_"],
    "products.silu": ["silu_mul", "clamped_silu_mul"],
    "products.rotary": ["turns"],
    "attention.paged_rows": ["attend", "attend_stored"],
    "attention.latents": ["latent_values"],
    "attention.picks": ["index_scores"],
    "attention.history": ["gather_keys", "join_parts"],
    "products.linear": ["linear", "gated_linear", "linear_parts", "sum_parts", "fuses"],
    "products.fp8": [
        *("round_rows", "round_to_scale", "add_rms_norm_round_", "silu_mul_round"),
        *("fp8_linear", "fp8_linear_parts", "fp8_gated_linear", "gates_fp8"),
    ],
    "experts.routes": ["routes", "shares_of"],
    "experts.experts": [
        *("place_experts", "experts_linear", "gated_experts_linear", "mix_parts"),
        *("gated_experts_of_row", "experts_of_row"),
    ],
    "streams.streams": ["cross_streams", "end_streams", "write_streams"],
    "sampling.processors": ["process_logits"],
    "sampling.sample": ["perturbed_argmax", "perturbed_topk"],
    "sampling.best_tokens": ["best_of_share", "best_of_all"],
    "sampling.logprobs": ["top_logprobs"],
    "sampling.noise": ["add_gumbel_noise_"],
    "state.rows": [
        *("gather_rows", "assign_rows_", "packed", "advance_"),
        *("copy_numbers_", "copy_columns_", "load_column_"),
    ],
    "state.trees": ["grow_", "choose", "ancestry", "walk_chain", "walk_tree", "move_slots_"],
    "state.pages": ["page_checksums"],
}
# Operations that only kernels serve, by file.
KERNELS_ALONE = {
    "attention.paged_plan": ["decode_attention", "extend_attention", "norm_rotate_store", "token_rows", "pack"],
    "attention.latents": ["absorb_latents", "turn_latents", "latent_attention", "expanded_attention"],
    "attention.picks": ["paged_index_scores", "paged_picks"],
    "entries.paged_entries": ["turn_heads_", "compress_paged", "attend_entries"],
    "state.pages": ["gather_pages", "least_of_many"],
    "state.paged_delta": ["delta_round", "delta_tree", "pass_edges", "delta_prompt", "gate_heads"],
    "ranks.all_reduce": [
        *("all_reduce", "all_max", "all_gather", "all_gather_columns", "all_reduce_norm_"),
        *("reduce_scatter", "reduce_scatter_norm_"),
    ],
}
NUMBA = ["add_rms_norm_", "silu_mul", "attend", "attend_stored", "index_scores", "add_gumbel_noise_"]
TORCH = ["rms_norm"]
NOT_TRITON = ["attend", "attend_stored", "index_scores"]
NAMES = [(file, name) for file, names in DECLARED.items() for name in names]


@pytest.fixture(autouse=True)
def chosen_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("BATON_TRITON", raising=False)
    operations.forget()
    yield
    monkeypatch.undo()
    operations.forget()


def declared(file: str, name: str) -> Operation[..., object]:
    return getattr(importlib.import_module(f"baton.kernels.{file}"), name)


def test_every_operation_is_in_the_table() -> None:
    alone = [name for names in KERNELS_ALONE.values() for name in names]
    assert sorted(TABLE) == sorted([name for _, name in NAMES] + alone)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in KERNELS_ALONE.items() for name in names])
def test_a_kernel_has_the_arguments_that_are_declared(file: str, name: str) -> None:
    """And more, with defaults, for those who tune it."""
    [backend] = TABLE[name]
    wanted = list(inspect.signature(getattr(importlib.import_module(f"baton.kernels.{file}"), name)).parameters)
    own = inspect.signature(getattr(importlib.import_module(f"baton.kernels.{backend.module}"), name)).parameters
    assert [each for each in own if each in wanted] == wanted
    assert all(parameter.default is not parameter.empty for each, parameter in own.items() if each not in wanted)


def test_only_the_table_names_modules_of_backends() -> None:
    named = re.compile(r"^\s*(from|import) .*\b(triton|numba)_\w+", re.MULTILINE)
    engine = KERNELS.parent / "engine"
    assert [path.name for path in engine.rglob("*.py") if named.search(path.read_text())] == []


@pytest.mark.parametrize("name", TABLE)
def test_the_backends_of_an_operation(name: str) -> None:
    kinds = {backend.kind for backend in TABLE[name]}
    wanted = {"numba"} if name in NUMBA else set()
    wanted |= {"torch"} if name in TORCH else set()
    wanted |= set() if name in NOT_TRITON else {"triton"}
    assert kinds == wanted


@pytest.mark.parametrize("name", TABLE)
def test_a_backend_has_a_function_of_the_operation_and_serves_a_device(name: str) -> None:
    for backend in TABLE[name]:
        assert backend.module.rpartition(".")[2].startswith(f"{backend.kind}_")
        assert backend.device == {"triton": "cuda", "numba": "cpu", "torch": None}[backend.kind]
        module = importlib.import_module(f"baton.kernels.{backend.module}")
        assert callable(getattr(module, name))
        assert backend.serves is None or callable(getattr(module, backend.serves))


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_a_backend_can_be_called_like_the_reference(file: str, name: str) -> None:
    """The same parameters in the same order; a backend may have more, with defaults."""
    operation = declared(file, name)
    assert isinstance(operation, Operation) and operation.name == name
    wanted = list(inspect.signature(operation.reference).parameters)
    for backend in TABLE[name]:
        module = importlib.import_module(f"baton.kernels.{backend.module}")
        own = inspect.signature(getattr(module, name)).parameters
        assert [each for each in own if each in wanted] == wanted, backend
        assert all(parameter.default is not parameter.empty for each, parameter in own.items() if each not in wanted)


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_a_backend_is_asked_with_the_arguments_of_any_call(file: str, name: str) -> None:
    """They may be given by position or by the reference's names."""
    wanted = list(inspect.signature(declared(file, name).reference).parameters)
    for backend in TABLE[name]:
        if backend.serves is not None:
            module = importlib.import_module(f"baton.kernels.{backend.module}")
            predicate = inspect.signature(getattr(module, backend.serves))
            for num_positional in range(len(wanted) + 1):
                predicate.bind(*wanted[:num_positional], **dict.fromkeys(wanted[num_positional:]))


@pytest.mark.parametrize("name", TABLE)
def test_the_first_backend_of_a_device(name: str) -> None:
    """On a CPU numba or torch, on CUDA Triton; the tensor that decides is of the first dtype that a backend lists."""
    for device in ("cpu", "cuda"):
        dtypes = {dtype for each in TABLE[name] for dtype in each.dtypes or ()} or {torch.float32}
        for dtype in dtypes:
            tensor = torch.empty(0, dtype=dtype) if device == "cpu" else _OnCuda(dtype)
            kinds = [each.kind for each in backends(name, tensor)]  # type: ignore[arg-type]
            assert ("triton" in kinds) == (device == "cuda" and name not in NOT_TRITON)
            assert "numba" not in kinds or device == "cpu"


class _OnCuda:
    """Device and dtype of a tensor that cannot be made here."""

    device = CUDA

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_that_no_backend_serves_are_the_references(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(8).to(dtype)
    assert backends("rms_norm", x) == []
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5))


def test_a_switch_turns_triton_off_but_not_what_reads_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert captures(CUDA) and backends("silu_mul", _OnCuda(torch.float16))  # type: ignore[arg-type]
    monkeypatch.setenv("BATON_TRITON", "0")
    operations.forget()
    assert not captures(CUDA) and not backends("silu_mul", _OnCuda(torch.float16))  # type: ignore[arg-type]
    assert [each.kind for each in backends("page_checksums", _OnCuda(torch.int32))] == ["triton"]  # type: ignore[arg-type]
    assert reader(CPU, torch.float32) == "numba"


def test_questions_about_a_device() -> None:
    assert captures(CUDA) and not captures(CPU)
    assert [reader(CPU, dtype) for dtype in (torch.float32, torch.bfloat16)] == ["numba", "torch"]
    assert reader(CUDA, torch.float32) == "triton"


def test_a_preferred_backend_comes_first_and_only_inside() -> None:
    """Triton's interpreter serves a CPU. Its compiled kernels do not, so on a machine with a GPU numba serves."""
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert [each.kind for each in backends("add_rms_norm_", x)] == ["numba"]
    with preferring("triton"):
        kinds = [each.kind for each in backends("add_rms_norm_", x)]
        assert kinds == (["triton", "numba"] if IS_INTERPRETED else ["numba"])
        assert captures(CPU) == IS_INTERPRETED and captures(CUDA)
        with preferring("reference"):
            assert backends("add_rms_norm_", x) == []
            assert not captures(CPU) and reader(CPU, torch.float32) == "torch"
        preferred = add_rms_norm_(x.clone(), None, weight, 1e-5)
    assert not captures(CPU)
    torch.testing.assert_close(preferred, add_rms_norm_(x.clone(), None, weight, 1e-5))


def test_a_call_that_a_backend_cannot_serve_goes_to_the_next_one() -> None:
    """Triton takes a row only if its numbers lie together in memory."""
    strided, weight = torch.randn(2, 64)[:, ::2], torch.randn(32)
    with preferring("triton"):
        actual = rms_norm(strided, weight, 1e-5)
    torch.testing.assert_close(actual, rms_norm_ref(strided, weight, 1e-5))


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


EVERY_FILE = "\n".join(f"import baton.kernels.{file}" for file in (*DECLARED, "gpu", "attention"))


_CALLS = """
print('numba' in sys.modules, 'triton' in sys.modules)
baton.kernels.products.norm.add_rms_norm_(torch.ones(1, 4), None, torch.ones(4), 0.0)
baton.kernels.products.silu.silu_mul(torch.ones(1, 4, dtype=torch.bfloat16))
print('baton.kernels.numba_kernels' in sys.modules)
print([name for name in sys.modules if name.startswith('baton.kernels.') and '.triton_' in name])
"""
_WITHOUT = """
sys.modules['{kind}'] = None
from baton.kernels import operations
from baton.kernels.products.norm import add_rms_norm_
from baton.kernels.products.silu import silu_mul
operations.preferring('{kind}').__enter__()
one = torch.ones(1, 4); normed = add_rms_norm_(one, one.clone(), torch.ones(4), 0.0)
print(normed[0, 0].item(), silu_mul(torch.ones(1, 2)).item(), operations.captures(torch.device('cuda')))
"""
_PROGRAMS = {"calls": _CALLS, **{kind: _WITHOUT.format(kind=kind) for kind in ("numba", "triton")}}


@functools.cache
def outputs() -> dict[str, list[str]]:
    """Return the lines that each program prints and logs. They run in forks of one interpreter, which has imported
    torch and every file with operations: that takes longer than the programs."""
    code = f"import logging, os, sys, torch\n{EVERY_FILE}\nlogging.basicConfig(stream=sys.stdout)\n"
    for program in _PROGRAMS.values():
        code += f"print('---', flush=True)\nif not os.fork():\n{textwrap.indent(program, '    ')}\n"
        code += "    sys.stdout.flush()\n    os._exit(0)\nassert os.wait()[1] == 0\n"
    parts = run(code).stdout.split("---\n")[1:]
    return {name: part.splitlines() for name, part in zip(_PROGRAMS, parts, strict=True)}


def test_a_cpu_imports_no_triton_and_nothing_imports_numba_before_a_call() -> None:
    lines = [line for line in outputs()["calls"] if not line.startswith("INFO")]
    assert lines == ["False False", "True", "[]"]


@pytest.mark.parametrize("kind", ["numba", "triton"])
def test_one_warning_says_that_a_backend_is_missing(kind: str) -> None:
    lines = outputs()[kind]
    normed, gated, captures_cuda = lines[-1].split()
    assert (normed, captures_cuda) == ("1.0", str(kind != "triton"))
    assert float(gated) == pytest.approx(0.7310586)
    assert "\n".join(lines).count(f"{kind} cannot be used") == 1


def test_installed_backends_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    operations.is_installed.cache_clear()
    with caplog.at_level(logging.INFO):
        assert operations.is_installed("numba") and operations.is_installed("numba")
    assert len([record for record in caplog.records if record.message.startswith("kernels by numba")]) == 1


def test_nothing_but_the_table_asks_for_a_backend() -> None:
    """Neither kernels/ nor engine/ ask whether something is compiled."""
    files = [*KERNELS.glob("*.py"), *(KERNELS.parent / "engine").rglob("*.py")]
    asking = [path.name for path in files if ".compiled(" in path.read_text()]
    assert asking == []
