"""Direct launches of compiled kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.direct_launch import launch

POINTER = torch.zeros(4, dtype=torch.int32)


class Kernel:
    """Launches as Triton does. A compiled kernel counts direct launches, or refuses them."""

    def __init__(self, *, is_direct: bool) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.num_direct = 0
        self._is_direct = is_direct

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launched(*args: object, **constants: object) -> Compiled:
            self.launches.append((grid, *args[2:], *constants.items()))
            return Compiled(self, is_direct=self._is_direct)

        return launched


class Compiled:
    def __init__(self, kernel: Kernel, *, is_direct: bool) -> None:
        self._kernel, self._is_direct = kernel, is_direct

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not self._is_direct:
            raise TypeError("no runner takes a stream")

        def launched(*args: object, stream: int | None) -> None:
            assert stream is None
            self._kernel.num_direct += 1
            self._kernel.launches.append((grid, *args[2:]))

        return launched


def run(kernel: Kernel, number: int, pointer: torch.Tensor = POINTER, words: int = 4) -> None:
    launch(kernel, (1, 1, 1), (pointer, POINTER), (number,), {"WORDS": words}, POINTER.device)


def test_a_launch_that_fails_is_done_by_the_public_form(caplog: pytest.LogCaptureFixture) -> None:
    """Each launch happens once, and one warning says why."""
    kernel = Kernel(is_direct=False)
    for number in range(4):
        run(kernel, number)
    assert [each[1] for each in kernel.launches] == [0, 1, 2, 3]
    assert caplog.text.count("launches no compiled kernel directly") == 1


def test_a_kernel_is_compiled_once_for_what_it_depends_on() -> None:
    """For a constant, a dtype and an alignment. Later launches have the same arguments."""
    kernel, others = Kernel(is_direct=True), [POINTER[1:], POINTER.view(torch.float32)]
    for pointer, words in ((POINTER, 4), (POINTER, 8), *((other, 4) for other in others)):
        before = kernel.num_direct
        for number in range(3):
            run(kernel, number, pointer, words)
        assert kernel.num_direct - before == 2, (pointer, words)
    assert [each[1] for each in kernel.launches] == [0, 1, 2] * 4
    assert kernel.launches[1] == ((1, 1, 1), 1, 4)


def test_an_empty_grid_launches_nothing() -> None:
    kernel = Kernel(is_direct=True)
    launch(kernel, (0, 1, 1), (POINTER, POINTER), (), {}, POINTER.device)
    assert not kernel.launches
