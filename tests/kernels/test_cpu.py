"""The CPU's questions are the table's."""

from __future__ import annotations

import torch

from baton.kernels import cpu, paged_rows


def test_float32_on_a_cpu_is_compiled_for() -> None:
    assert cpu.compiled(torch.empty(0)) and not cpu.compiled(torch.empty(0, dtype=torch.bfloat16))
    assert cpu.attend is paged_rows.attend and cpu.attend_stored is paged_rows.attend_stored
