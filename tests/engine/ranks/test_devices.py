"""Every rank sees its own GPU first and all others behind it."""

from __future__ import annotations

import os

import pytest

from baton.engine.ranks.devices import check_devices, orders, see
from baton.metadata.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    check_devices(2, 2, "--tp")
    with pytest.raises(ConfigError, match=r"--tp 4 needs 4 GPUs, and this node sees 2 GPUs; use --tp 2 or less"):
        check_devices(4, 2, "--tp")
    with pytest.raises(ConfigError, match=r"--dp-attention 2 needs 2 GPUs, and this node sees 1 GPU; use .* 1$"):
        check_devices(2, 1, "--dp-attention")


def test_own_first_then_the_others() -> None:
    assert orders(3, range(3)) == ["0,1,2", "1,0,2", "2,0,1"]
    assert orders(1, [0, 0]) == ["0", "0"]  # two ranks share one


def test_what_the_node_does_not_see_its_ranks_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8f6a,7")
    assert orders(3, range(2)) == ["5,GPU-8f6a,7", "GPU-8f6a,5,7"]


def test_a_process_sees_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    see("1,0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
