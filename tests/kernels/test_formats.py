"""What a configuration needs of the kernels is there without torch."""

from __future__ import annotations

import ast
from pathlib import Path

from baton.kernels import formats
from baton.kernels.products import fp8, silu
from baton.kernels.state import fp8_pages


def test_the_kernels_use_these_names_and_no_copies() -> None:
    assert (fp8.BLOCK, fp8_pages.ALIGNMENT, fp8_pages.SCALE_BYTES) == (
        formats.BLOCK,
        formats.ALIGNMENT,
        formats.SCALE_BYTES,
    )
    assert silu.SwigluClamp is formats.SwigluClamp


def test_it_imports_no_torch() -> None:
    tree = ast.parse(Path(formats.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "typing"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
