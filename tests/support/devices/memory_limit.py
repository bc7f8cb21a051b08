"""A device with little memory: torch on a CPU that raises torch.OutOfMemoryError above a limit, as CUDA does.

Every tensor that torch allocates in a `with` block counts with the bytes of its storage, as long as the storage lives.
Views count once. Memory that kernels use within one operation does not count, nor do arrays of NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryLimit:
    """Counts the tensors of its `with` blocks, which may be entered many times, but not within each other.

    `limit`: bytes that may be alive at once; None: as many as are asked for.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.peak = 0  # most bytes alive at once, since it was last set to 0
        self.num_failures = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by the address of torch's own object
        self._mode = _Mode(self._count)

    @property
    def num_bytes(self) -> int:
        """Bytes that are alive."""
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __enter__(self) -> MemoryLimit:
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._mode.__exit__(kind, error, at)

    @contextmanager
    def around(self, owner: Any, *names: str) -> Iterator[None]:
        """Let these methods of an object run within the limit, while the block lasts."""
        methods: dict[str, Callable[..., Any]] = {name: getattr(owner, name) for name in names}

        def limited(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                with self:
                    return method(*args, **options)

            return run

        for name, method in methods.items():
            setattr(owner, name, limited(method))
        try:
            yield
        finally:
            for name in names:
                delattr(owner, name)

    def _count(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        """Count the tensors that an operation returned, without those that it got."""
        known = {StorageWeakRef(each.untyped_storage()).cdata for each in before}
        is_new = False
        for tensor in after:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference.cdata not in known and reference.cdata not in self._alive:
                self._alive[reference.cdata] = reference, storage.nbytes()
                is_new = True
        if not is_new:
            return
        total = self.num_bytes
        if self.limit is not None and total > self.limit:
            self.num_failures += 1
            raise torch.OutOfMemoryError(f"CPU out of memory: {total} bytes are alive, {self.limit} may be")
        self.peak = max(self.peak, total)


class _Mode(TorchDispatchMode):
    def __init__(self, count: Callable[[list[torch.Tensor], list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(_tensors((args, kwargs)), _tensors(result))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree that have a storage. Packed weights have none."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided]
