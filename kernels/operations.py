"""The table of operations: which backend serves which operation.

An operation has a file of its own with the formula, the types, and `name_ref`, the specification in plain torch. The
file declares `name = Operation("name", name_ref)`, which is what callers call. Each backend has a file for it:
`triton_<file>.py` (kernels for CUDA), `numba_<file>.py` (kernels for a CPU) or `torch_<file>.py` (fewer torch calls
than the specification). TABLE lists the backends in the order in which they are asked. The reference serves the rest.

An operation that only kernels serve, because its arguments are theirs (a plan of theirs, memory of other ranks), is
declared with `@kernel`, and has no specification of its own.

A backend's module is imported at the first call that it serves, so a node on a CPU imports no triton and a node on CUDA
no numba. `BATON_TRITON=0` switches Triton off. If triton or numba is missing, one warning says so.

To add a backend, write its file and add a row here. To add an operation, also declare it in its own file.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["triton", "numba", "torch"]

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_FLOAT32 = frozenset({torch.float32})
_FP8 = frozenset({torch.float8_e4m3fn})
_INT32 = frozenset({torch.int32})


class Backend(NamedTuple):
    """One implementation of an operation: the function of the operation's name in a module of kernels/."""

    kind: Kind
    module: str
    device: Literal["cuda", "cpu"] | None  # of the tensor that decides; None: any
    dtypes: frozenset[torch.dtype] | None = None  # of the tensor that decides; None: any
    serves: str | None = None  # a function of `module`: takes the same arguments, returns whether it can serve the call
    has_switch: bool = True  # False: BATON_TRITON=0 does not switch it off


def _triton(module: str, dtypes: frozenset[torch.dtype] | None = None, serves: str | None = None) -> Backend:
    return Backend("triton", module, "cuda", dtypes, serves)


def _numba(module: str, dtypes: frozenset[torch.dtype] | None = _FLOAT32) -> Backend:
    return Backend("numba", module, "cpu", dtypes)


TABLE: Mapping[str, tuple[Backend, ...]] = MappingProxyType(
    {
        # norm.py, silu.py, rotary.py
        "rms_norm": (
            _triton("products.triton_norm", _FLOATS, "serves"),
            Backend("torch", "products.torch_norm", None, _FLOAT32),
        ),
        "add_rms_norm_": (_numba("products.numba_rows"), _triton("products.triton_norm", _FLOATS, "serves_sum")),
        "silu_mul": (_triton("products.triton_silu", _FLOATS, "serves"), _numba("products.numba_rows")),
        "clamped_silu_mul": (_triton("products.triton_silu", _FLOATS, "serves"),),
        "turns": (_triton("products.triton_rotary"),),
        # paged_rows.py
        "attend": (_numba("attention.numba_attention"),),
        "attend_stored": (_numba("attention.numba_attention", None),),
        # paged_plan.py
        "decode_attention": (_triton("attention.triton_attention"),),
        "extend_attention": (_triton("attention.triton_extend"),),
        "norm_rotate_store": (_triton("state.triton_store"),),
        "token_rows": (_triton("state.triton_store"),),
        "pack": (_triton("attention.triton_visibility"),),
        # latents.py
        "latent_values": (_triton("attention.triton_latent_heads", _FLOATS),),
        "absorb_latents": (_triton("attention.triton_latent_heads"),),
        "turn_latents": (_triton("attention.triton_latent_heads"),),
        "latent_attention": (_triton("attention.triton_latents"),),
        "expanded_attention": (_triton("attention.triton_expanded"),),
        # picks.py
        "index_scores": (_numba("attention.numba_picks"),),
        "paged_index_scores": (_triton("attention.triton_picks"),),
        "paged_picks": (_triton("attention.triton_picks"),),
        # paged_entries.py
        "turn_heads_": (_triton("entries.triton_heads"),),
        "compress_paged": (_triton("entries.triton_compress"),),
        "attend_entries": (_triton("entries.triton_attend"),),
        # streams.py
        "cross_streams": (_triton("streams.triton_streams", _FLOATS),),
        "end_streams": (_triton("streams.triton_streams", _FLOATS),),
        "write_streams": (_triton("streams.triton_streams", _FLOATS),),
        # history.py
        "gather_keys": (_triton("attention.triton_history", _FLOATS | _FP8),),
        "join_parts": (_triton("attention.triton_history", _FLOATS),),
        # linear.py
        "linear": (_triton("products.triton_linear"),),
        "gated_linear": (_triton("products.triton_linear"),),
        "linear_parts": (_triton("products.triton_linear"),),
        "sum_parts": (_triton("products.triton_linear"),),
        "fuses": (_triton("products.triton_linear"),),
        # fp8.py
        "round_rows": (_triton("products.triton_fp8_rows", _FLOATS),),
        "round_to_scale": (_triton("products.triton_fp8_rows", _FLOATS),),
        "add_rms_norm_round_": (_triton("products.triton_fp8_rows", _FLOATS, "serves_norm"),),
        "silu_mul_round": (_triton("products.triton_fp8_rows", _FLOATS, "serves_silu"),),
        "fp8_linear": (_triton("products.triton_fp8", _FP8, "serves"),),
        "fp8_linear_parts": (_triton("products.triton_fp8", _FP8, "serves"),),
        "fp8_gated_linear": (_triton("products.triton_fp8", _FP8, "serves"),),
        "gates_fp8": (_triton("products.triton_fp8", _FP8),),
        # routes.py, experts.py
        "routes": (_triton("experts.triton_routes", _FLOATS, "serves"),),
        "shares_of": (_triton("experts.triton_routes", _FLOATS, "serves_shares"),),
        "place_experts": (_triton("experts.triton_places", None, "serves"),),
        "experts_linear": (_triton("experts.triton_experts", None, "serves"),),
        "gated_experts_linear": (_triton("experts.triton_experts", None, "serves"),),
        "mix_parts": (_triton("experts.triton_experts", _FLOATS, "serves_mix"),),
        "gated_experts_of_row": (_triton("experts.triton_expert_row"),),
        "experts_of_row": (_triton("experts.triton_expert_row"),),
        # processors.py, sample.py, best_tokens.py, noise.py, logprobs.py
        "process_logits": (_triton("sampling.triton_processors", _FLOATS),),
        "perturbed_argmax": (_triton("sampling.triton_sample", _FLOATS),),
        "perturbed_topk": (_triton("sampling.triton_sample", _FLOATS, "serves_topk"),),
        "best_of_share": (_triton("sampling.triton_sample", _FLOATS),),
        "best_of_all": (_triton("sampling.triton_sample"),),
        "top_logprobs": (_triton("sampling.triton_logprobs", _FLOATS),),
        "add_gumbel_noise_": (_triton("sampling.triton_noise", _FLOAT32), _numba("sampling.numba_noise")),
        # rows.py, trees.py
        "advance_": (_triton("state.triton_rows"),),
        "gather_rows": (_triton("state.triton_rows"),),
        "assign_rows_": (_triton("state.triton_rows"),),
        "packed": (_triton("state.triton_rows"),),
        "grow_": (_triton("state.triton_growth"),),
        "choose": (_triton("state.triton_growth"),),
        "ancestry": (_triton("state.triton_trees"),),
        "walk_chain": (_triton("state.triton_trees"),),
        "walk_tree": (_triton("state.triton_trees"),),
        "move_slots_": (_triton("state.triton_trees"),),
        # paged_delta.py
        "delta_round": (_triton("state.triton_delta_round"),),
        "delta_tree": (_triton("state.triton_delta_tree"),),
        "pass_edges": (_triton("state.triton_delta_tree"),),
        "delta_prompt": (_triton("state.triton_delta_prompt"),),
        "gate_heads": (_triton("state.triton_delta_gate"),),
        # rows.py, pages.py; torch cannot read a peer's pool, so BATON_TRITON=0 leaves pages as they are
        "copy_numbers_": (_triton("state.triton_rows"),),
        "copy_columns_": (_triton("state.triton_rows"),),
        "load_column_": (_triton("state.triton_rows"),),
        "gather_pages": (_triton("state.triton_pages"),),
        "least_of_many": (_triton("state.triton_pages"),),
        "page_checksums": (_triton("state.triton_pages", _INT32)._replace(has_switch=False),),
        # all_reduce.py
        "all_reduce": (_triton("ranks.triton_all_reduce"),),
        "all_max": (_triton("ranks.triton_all_reduce"),),
        "all_gather": (_triton("ranks.triton_all_reduce"),),
        "all_gather_columns": (_triton("ranks.triton_all_reduce"),),
        "all_reduce_norm_": (_triton("ranks.triton_all_reduce", None, "serves_norm"),),
        "reduce_scatter": (_triton("ranks.triton_all_reduce"),),
        "reduce_scatter_norm_": (_triton("ranks.triton_all_reduce", None, "serves_scatter"),),
    }
)


class Operation(Generic[P, R]):
    """An operation that can be called like its reference. The device and dtype of one tensor choose the backend."""

    def __init__(self, name: str, reference: Callable[P, R], by: Callable[P, torch.Tensor] | None = None) -> None:
        """`by` returns the tensor that decides, from a call's arguments. Without `by` it is the first argument."""
        assert name in TABLE and name not in _operations, name
        self.name, self.reference, self.__doc__ = name, reference, reference.__doc__
        self._by = by
        self._on_cpu: dict[torch.dtype, Callable[P, R]] = {}
        self._elsewhere: dict[tuple[bool, torch.dtype], Callable[P, R]] = {}  # on CUDA or not, as on "meta"
        _operations[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        by = self._by
        tensor: Any = args[0] if by is None else by(*args, **kwargs)
        if tensor.is_cpu:
            function = self._on_cpu.get(tensor.dtype)
        else:
            function = self._elsewhere.get((tensor.is_cuda, tensor.dtype))
        return (function or self._choose(tensor))(*args, **kwargs)

    def forget(self) -> None:
        """Choose anew at the next call."""
        self._on_cpu.clear()
        self._elsewhere.clear()

    def _choose(self, tensor: torch.Tensor) -> Callable[P, R]:
        """Return the first backend's function, or one that asks predicates and falls through to the next backend."""
        function: Callable[P, R] = self.reference
        for backend in reversed(backends(self.name, tensor)):
            module = _module(backend.module)
            own = getattr(module, self.name)
            function = own if backend.serves is None else _if(getattr(module, backend.serves), own, function)
        if tensor.is_cpu:
            self._on_cpu[tensor.dtype] = function
        else:
            self._elsewhere[tensor.is_cuda, tensor.dtype] = function
        return function


_operations: dict[str, Operation[Any, Any]] = {}  # by name, those whose file has been imported
_preferred: Kind | Literal["reference"] | None = None


def backends(name: str, tensor: torch.Tensor) -> list[Backend]:
    """Return the backends of an operation that can be used for a tensor of this device and dtype, in order."""
    if _preferred == "reference":
        return []
    fitting = [each for each in TABLE[name] if _fits(each, tensor) and _is_usable(each)]
    return sorted(fitting, key=lambda each: each.kind != _preferred)


def kernel(declared: Callable[P, R]) -> Callable[P, R]:
    """Declare an operation that only one backend serves, on any device. `declared` has the backend's arguments. Its
    body does what the backend's `serves` refuses; without `serves` it has none."""
    name = declared.__name__
    [backend] = TABLE[name]

    @functools.wraps(declared)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        module = _module(backend.module)
        if backend.serves is not None and not getattr(module, backend.serves)(*args, **kwargs):
            return declared(*args, **kwargs)
        return getattr(module, name)(*args, **kwargs)

    return call


@functools.cache
def captures(device: torch.device) -> bool:
    """Return whether forwards and rounds on this device read no tensor on the host, so that a CUDA graph can hold
    them."""
    return _serves("triton", "cuda", device)


@functools.cache
def reader(device: torch.device, dtype: torch.dtype) -> Kind:
    """Return which kernels read pages of this device and dtype where they lie. "torch": none do, and torch gathers
    the pages first."""
    if captures(device):
        return "triton"
    return "numba" if dtype is torch.float32 and _serves("numba", "cpu", device) else "torch"


@contextmanager
def preferring(kind: Kind | Literal["reference"]) -> Iterator[None]:
    """Ask this kind of backend first, whatever the environment says. In its interpreter, Triton then serves tensors of
    any device. "reference" switches all backends off. For tests and for comparing."""
    global _preferred
    before, _preferred = _preferred, kind
    forget()
    try:
        yield
    finally:
        _preferred = before
        forget()


def forget() -> None:
    """Choose all backends anew, after a change of the environment."""
    captures.cache_clear()
    reader.cache_clear()
    for operation in _operations.values():
        operation.forget()


@functools.cache
def is_installed(kind: Kind) -> bool:
    """Import what a kind of backend needs. If it is missing, warn once."""
    if kind == "torch":
        return True
    try:
        version = importlib.import_module(kind).__version__
    except ImportError as error:
        logger.warning("%s cannot be used (%s); torch computes instead, which is slower", kind, error)
        return False
    logger.info("kernels by %s %s", kind, version)
    return True


def _fits(backend: Backend, tensor: torch.Tensor) -> bool:
    return _runs_on(backend.kind, backend.device, tensor.device.type) and (
        backend.dtypes is None or tensor.dtype in backend.dtypes
    )


def _serves(kind: Kind, device_type: str, device: torch.device) -> bool:
    if _preferred == "reference":
        return False
    return _runs_on(kind, device_type, device.type) and _is_on(kind) and is_installed(kind)


def _runs_on(kind: Kind, own: str | None, device_type: str) -> bool:
    """Return whether a backend for devices of type `own` runs on tensors of `device_type`."""
    is_interpreted = kind == _preferred == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return is_interpreted or own in (None, device_type)


def _is_usable(backend: Backend) -> bool:
    return (_is_on(backend.kind) or not backend.has_switch) and is_installed(backend.kind)


def _is_on(kind: Kind) -> bool:
    return kind != "triton" or kind == _preferred or os.environ.get("BATON_TRITON") != "0"


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


def _if(serves: Callable[..., bool], own: Callable[P, R], other: Callable[P, R]) -> Callable[P, R]:
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        return own(*args, **kwargs) if serves(*args, **kwargs) else other(*args, **kwargs)

    return chosen
