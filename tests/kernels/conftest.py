"""Fixtures for tests of operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.kernels.operations import is_installed, preferring


@pytest.fixture(params=["reference", "triton"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test by the reference and by Triton."""
    if request.param == "triton" and not is_installed("triton"):
        pytest.skip("needs triton")
    with preferring(request.param):
        yield
