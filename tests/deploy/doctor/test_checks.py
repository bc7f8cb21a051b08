"""The checks of a host, with made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.deploy.doctor.checks import check_host
from baton.deploy.doctor.facts import Cache, Facts, Holder, Port, Reached, Requirement, Tried
from baton.deploy.doctor.gpu_facts import DeviceFile, Driver, Gpu, GpuFacts, NumaPlace, Torch
from baton.engine.gpus import UsedMemory
from baton.metadata.version import install_command

GIB = 1 << 30
ONE = Gpu("H200", "0000:1b:00.0", 140 * GIB, can_share=True)
OTHER = Gpu("H200", "0000:43:00.0", 140 * GIB, can_share=True)
GPU = GpuFacts(
    files=(DeviceFile("/dev/nvidia0", is_open_to_us=True),),
    driver=Driver(cuda=(13, 0), gpus=(ONE, OTHER)),
    torch=Torch(version="2.13.0+cu130", cuda="13.0", num_gpus=2),
    used=(UsedMemory(ONE.bus, GIB, 140 * GIB),),
    places=(NumaPlace(ONE.bus, 0, frozenset({0, 1})),),
)
BLIND = Torch(version="2.13.0+cu130", cuda="13.0")
HEALTHY = Facts(
    python=(3, 11, 7),
    baton="0.1.0",
    requirements=(Requirement("pyzmq", "26", "", "26.4.0"), Requirement("torch", "2.11", "node", "2.13.0+cu130")),
    triton="3.6.0",
    gpu=GPU,
    cores=frozenset({0, 5}),
    max_open_files=65536,
    shm_bytes=64 << 20,
    free_memory=200 * GIB,
    ports=(Port("--port", "127.0.0.1", 8000),),
    keys=Tried("cluster.key"),
    api_keys=Tried("api.keys"),
    model=Tried("DIR"),
    caches=(Cache("kernels of Triton", "/cache", is_writable=True, free_bytes=9 * GIB),),
    routers=(Reached("tcp://r:5700", "", 1500, "taken"),),
)


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpu": GpuFacts(**({name: getattr(GPU, name) for name in GPU.__struct_fields__} | changes))}


CASES = {  # what is wrong: changed facts, the check, the level, words of the finding, words of the mend
    "old Python": ({"python": (3, 10, 1)}, "versions", "error", "3.10.1", "3.11"),
    "a package of the router": (
        {"requirements": (Requirement("pyzmq", "26", "", None),)},
        "packages", "error", "pyzmq is missing", install_command(),
    ),
    "an old torch": (
        {"requirements": (Requirement("torch", "2.11", "node", "2.9.1+cu128"),)},
        "packages", "error", "torch 2.9.1+cu128 is older than 2.11", install_command("node"),
    ),
    "an extra": (
        {"requirements": (Requirement("opentelemetry-sdk", "1.30", "otel", None),)},
        "packages", "note", "opentelemetry-sdk is missing", install_command("otel"),
    ),
    "device files": (
        gpu(files=(DeviceFile("/dev/nvidia0", is_open_to_us=False),)), "GPU driver", "error", "/dev/nvidia0", "--gpus",
    ),
    "hidden GPUs": (
        gpu(visible="", driver=Driver(failure="cuInit says CUDA_ERROR_NO_DEVICE (100)")),
        "GPU driver", "error", "hides", "Unset",
    ),
    "a driver that fails though one GPU is chosen": (
        gpu(visible="0", driver=Driver(failure="cuInit says CUDA_ERROR_UNKNOWN (999)")),
        "GPU driver", "error", "999", "driver",
    ),
    "a container without the GPUs": ({"gpu": GpuFacts(num_on_bus=8)}, "GPU driver", "note", "8 GPUs", "--gpus all"),
    "a driver that fails": (
        gpu(driver=Driver(failure="cuInit says CUDA_ERROR_SYSTEM_NOT_READY (802)")),
        "GPU driver", "error", "802", "driver",
    ),
    "torch that hangs": (gpu(torch=Torch(failure="no answer within 60 s")), "torch", "error", "60 s", "Install torch"),
    "torch for the CPU": (gpu(torch=Torch(version="2.13.0+cpu")), "torch", "error", "without CUDA", "build of torch"),
    "an old driver": (
        gpu(torch=BLIND, driver=Driver(cuda=(12, 4), gpus=(ONE,))), "torch", "error", "CUDA 12.4", "Update the driver",
    ),
    "torch sees no GPU": (gpu(torch=BLIND), "torch", "error", "sees no GPU", "driver"),
    "no triton": ({"triton": None}, "torch", "error", "triton is missing", "pip install triton"),
    "memory in use": (
        gpu(used=(UsedMemory(ONE.bus, 70 * GIB, 140 * GIB),)),
        "GPU memory", "warning", "75.2 GB of 150.3 GB", "--memory-share",
    ),
    "no peer access": (
        gpu(driver=Driver(cuda=(13, 0), gpus=(ONE, OTHER), apart=((0, 1),))),
        "GPU peers", "warning", "0 and 1", "topo -p2p",
    ),
    "no shared memory of a GPU": (
        gpu(driver=Driver(cuda=(13, 0), gpus=(Gpu("vGPU", ONE.bus, 140 * GIB, can_share=False),))),
        "GPU peers", "warning", "GPU 0 cannot be given", "driver",
    ),
    "a far NUMA node": ({"cores": frozenset({8})}, "NUMA", "warning", "NUMA node 0", "numactl --cpunodebind=0"),
    "no memfd": ({"has_sealed_memory": False}, "memory", "warning", "memfd", "memfd_create"),
    "little memory": ({"free_memory": GIB // 2}, "memory", "error", "537 MB", "End other processes"),
    "64 files": ({"max_open_files": 64}, "open files", "error", "64 files", "ulimit -Hn"),
    "1,024 files": ({"max_open_files": 1024}, "open files", "warning", "1,024 files", "ulimit -Hn"),
    "a port of Baton": (
        {"ports": (Port("--port", "127.0.0.1", 8000, "taken", Holder(7, "python", is_baton=True)),)},
        "ports", "note", "held by Baton (process 7)", "--cluster",
    ),
    "a port of another program": (
        {"ports": (Port("--port", "127.0.0.1", 8000, "taken", Holder(7, "nginx", is_baton=False)),)},
        "ports", "warning", "held by nginx (process 7)", "another --port",
    ),
    "a port of another user": (
        {"ports": (Port("--port", "127.0.0.1", 80, "port 80 is not allowed"),)},
        "ports", "warning", "port 80", "another --port",
    ),
    "a key file": ({"keys": Tried("a.key", "a.key is malformed")}, "key files", "error", "a.key is malformed", ""),
    "open API keys": (
        {"are_api_keys_public": True}, "key files", "warning", "api.keys may be read", "chmod 600 api.keys",
    ),
    "a model": ({"model": Tried("DIR", "DIR lacks x.safetensors")}, "model", "error", "DIR lacks", ""),
    "a cache": (
        {"caches": (Cache("kernels of Triton", "/ro", is_writable=False, free_bytes=GIB),)},
        "caches", "warning", "/ro", "TRITON_CACHE_DIR",
    ),
    "a full disk": (
        {"caches": (Cache("kernels of Triton", "/full", is_writable=True, free_bytes=1 << 20),)},
        "caches", "error", "1 MiB", "Free space",
    ),
    "a proxy": ({"proxies": {"HTTP_PROXY": "http://p:3128"}}, "proxies", "warning", "http://p:3128", "NO_PROXY="),
    "no way to the router": (
        {"routers": (Reached("tcp://r:5700", "timed out"),)}, "router", "error", "timed out", "--node-address",
    ),
    "a key that the router does not take": (
        {"routers": (Reached("tcp://r:5700", "", 1500, "refused"),)},
        "router", "error", "does not take the key of cluster.key", "must name this key",
    ),
    "a router with keys, and no key here": (
        {"routers": (Reached("tcp://r:5700", "", 1500, "refused"),), "keys": None},
        "router", "error", "does not take a node without a key", "Give --keys",
    ),
    "a router that is stuck": (
        {"routers": (Reached("tcp://r:5700", "", 1500, "unanswered"),)},
        "router", "warning", "not to the key", "its log",
    ),
}  # fmt: skip


def test_a_healthy_host_has_one_short_line_per_check() -> None:
    findings = list(check_host(HEALTHY))
    assert {each.level for each in findings} == {"ok"}
    assert {each.check for each in findings} == {case[1] for case in CASES.values()} | {"/dev/shm", "memlock"}
    assert all(len(each.what) < 100 for each in findings)


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_with_its_mend(case: str) -> None:
    changes, check, level, what, mend = CASES[case]
    wrong = [each for each in check_host(replace(HEALTHY, **changes)) if each.level != "ok"]
    assert [(each.check, each.level) for each in wrong] == [(check, level)]
    assert what in wrong[0].what
    assert mend in wrong[0].mend
    assert bool(mend) == bool(wrong[0].mend)


def test_a_host_without_gpu_is_not_told_about_gpus() -> None:
    facts = replace(HEALTHY, gpu=GpuFacts(torch=Torch(version="2.13.0+cpu")), triton=None)
    findings = list(check_host(facts))
    assert {each.level for each in findings} == {"ok"}
    assert not {"GPU memory", "GPU peers", "NUMA"} & {each.check for each in findings}
