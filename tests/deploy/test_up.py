"""The plan of `baton up`: command lines, keys, drafter, threads; and the checks of model directory and port."""

from __future__ import annotations

import os
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from baton.decode_node.config import DecodeConfig
from baton.deploy.cli import main
from baton.deploy.up import Plan, UpConfig, check_port, commands, free_port, split_threads
from baton.metadata.bus.curve import KeyPair
from baton.metadata.errors import ConfigError
from baton.prefill_node.config import PrefillConfig
from baton.router.config import RouterConfig


def default_plan() -> Plan:
    return Plan(UpConfig(), RouterConfig(), PrefillConfig(), DecodeConfig())


def test_the_commands_of_a_plan() -> None:
    given = RouterConfig(api_key="hunter2", allow_origin=("https://a.example", "http://b:1"), allow_host=("c",))
    made = commands(
        Plan(UpConfig(prefill=2, decode=1), given, PrefillConfig(), DecodeConfig(threads=3)),
        node_port=5701,
        http_port=8001,
    )
    assert [item.name for item in made] == ["router", "prefill-0", "prefill-1", "decode-0"]
    router, *nodes = made
    assert "--port=8001" in router.argv
    assert "--expect=prefill=2,decode=1" in router.argv
    assert "--node-address=tcp://127.0.0.1:5701" in router.argv
    allowed = ["--allow-origin=https://a.example", "--allow-origin=http://b:1", "--allow-host=c"]
    assert [word for word in router.argv if word.startswith("--allow")] == allowed
    assert router.environ["BATON_API_KEY"] == "hunter2"
    for node in nodes:
        assert "--router=tcp://127.0.0.1:5701" in node.argv
        assert f"--node-id={node.name}" in node.argv
        assert "BATON_API_KEY" not in node.environ
    assert nodes[-1].environ["OMP_NUM_THREADS"] == "3"
    assert not any("hunter2" in word for item in made for word in item.argv)


def test_several_routers_share_the_nodes_and_what_they_must_share(tmp_path: Path) -> None:
    plan = replace(default_plan(), up=UpConfig(routers=2)).secured(tmp_path)
    first, second, *nodes = commands(plan, node_port=5701, http_port=8001)
    assert (first.name, second.name, first.role) == ("router-0", "router-1", "router")
    assert {"--port=8002", "--node-address=tcp://127.0.0.1:5702"} <= set(second.argv)
    assert any(word.endswith("router-1.key") for word in second.argv)
    assert first.environ["BATON_CACHE_SECRET"] == second.environ["BATON_CACHE_SECRET"]
    for node in nodes:
        assert "--router=tcp://127.0.0.1:5701,tcp://127.0.0.1:5702" in node.argv
    twice = replace(plan, router=RouterConfig(ops_address="127.0.0.1:9000"))
    with pytest.raises(ConfigError, match=r"--ops-address 127\.0\.0\.1:9000: each of --routers 2 would listen there"):
        commands(twice, node_port=5701, http_port=8001)
    with pytest.raises(ConfigError, match="--routers 0: must be 1 to 16"):
        UpConfig(routers=0)


def test_successive_ports_are_all_free() -> None:
    first = free_port(count=3)
    for port in range(first, first + 3):
        check_port("127.0.0.1", port)


def test_roles_may_have_unlike_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of all nodes share the cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    plan = Plan(UpConfig(prefill=2), RouterConfig(), PrefillConfig(tp=2), DecodeConfig(tp=3))
    _, *prefill, decode = commands(plan, node_port=5701, http_port=8001)
    for node in prefill:
        assert {"--tp=2", "--threads=2"} <= set(node.argv)
    assert {"--tp=3", "--threads=2"} <= set(decode.argv)


def test_ranks_with_sequences_of_their_own_share_the_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    plan = Plan(UpConfig(), RouterConfig(), PrefillConfig(tp=2), DecodeConfig(dp_attention=3))
    _, prefill, decode = commands(plan, node_port=5701, http_port=8001)
    assert {"--tp=2", "--threads=3"} <= set(prefill.argv)
    assert {"--dp-attention=3", "--threads=3"} <= set(decode.argv)


def test_ranks_of_each_role_are_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--prefill-tp", "2", "--decode-dp-attention", "3", "--print-config"]) == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert (tables["prefill"]["tp"], tables["decode"]["dp_attention"]) == (2, 3)
    both = ["up", "--tp", "2", "--decode-dp-attention", "3", "--print-config"]
    assert main(both) == 2
    words = capsys.readouterr().err
    assert "decode nodes would have both --tp 2 and --dp-attention 3: ranks have either some heads" in words
    assert words.endswith("add --decode-tp 1 or --decode-dp-attention 1\n")
    assert main([*both, "--decode-tp", "1"]) == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert [(tables[role]["tp"], tables[role]["dp_attention"]) for role in ("prefill", "decode")] == [(2, 1), (1, 3)]
    assert main(["up", "--tp", "2", "--dp-attention", "2", "--print-config"]) == 2


@pytest.mark.parametrize("kind", ["tp", "dp-attention"])
def test_ranks_of_no_node_are_refused_with_what_to_do(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["up", "--prefill", "0", f"--prefill-{kind}", "2", "--print-config"]
    assert main(wrong) == 2
    words = capsys.readouterr().err
    assert f"--prefill-{kind} 2: with --prefill 0 no prefill node starts; use --decode-{kind} 2" in words
    for right in (["--prefill", "1"], [f"--prefill-{kind}", "1", f"--decode-{kind}", "2"]):
        assert main([*wrong, *right]) == 0  # the last of equal flags counts
    assert main(["up", "--prefill", "0", f"--{kind}", "2", "--print-config"]) == 0


def test_a_flag_for_one_role_wins_over_that_for_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--tp", "4", "--prefill-tp", "2", "--print-config"]) == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert (tables["prefill"]["tp"], tables["decode"]["tp"]) == (2, 4)


def test_a_plan_without_prefill_nodes_lets_decode_nodes_compute_prompts() -> None:
    router, *nodes = commands(
        Plan(UpConfig(prefill=0, decode=2), RouterConfig(), PrefillConfig(), DecodeConfig()), 5701, 8001
    )
    assert "--local-prefill=always" in router.argv and [node.name for node in nodes] == ["decode-0", "decode-1"]
    assert not any("expect-prompts" in word for node in nodes for word in node.argv), "yes is their default"
    router, prefill, decode = commands(default_plan(), 5701, 8001)
    assert not any("local-prefill" in word for word in router.argv)
    assert "--no-expect-prompts" in decode.argv and "--no-expect-prompts" not in prefill.argv
    assert split_threads(4, 0, 1) == {"prefill": 3, "decode": 3}


@pytest.mark.parametrize(
    ("gpus", "up", "device", "words"),
    [
        ("0", UpConfig(), "cuda", "all 2 nodes share one GPU: it holds the weights 2 times"),
        ("0", UpConfig(prefill=2, decode=1), "cuda", "all 3 nodes share one GPU"),
        ("0", UpConfig(prefill=0, decode=1), "cuda", None),
        ("0,1", UpConfig(), "cuda", None),
        ("", UpConfig(), "cuda", None),
        ("0", UpConfig(), "cpu", None),
    ],
)
def test_nodes_of_both_roles_on_one_gpu_are_advised_against(
    gpus: str, up: UpConfig, device: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    advice = Plan(up, RouterConfig(), PrefillConfig(device=device), DecodeConfig(device=device)).advice
    assert (advice is None) == (words is None)
    assert advice is None or (words is not None and words in advice and "--prefill 0 --decode 1" in advice)


@pytest.mark.parametrize(
    ("gpus", "device", "tp", "num_gpus"),
    [
        ("0,1", "cuda", 1, 2),
        ("0,1,2,3", "auto", 1, 4),
        ("0", "cuda", 1, 0),
        ("", "auto", 1, 0),
        ("0,1", "cpu", 1, 0),
        ("0,1", "cuda", 2, 0),
        ("0,1,2,3,4,5,6,7,8", "cuda", 1, 0),
    ],
)
def test_a_shape_is_planned_for_two_to_eight_gpus_with_a_node_each(
    gpus: str, device: str, tp: int, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    plan = Plan(UpConfig(), RouterConfig(), PrefillConfig(device=device), DecodeConfig(device=device, tp=tp))
    assert plan.num_gpus_to_plan == num_gpus


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (0, 0, "--decode 0: must be 1 to 64, since only decode nodes generate"),
        (1, 0, "--decode 0: must be 1 to 64"),
        (-1, 1, "--prefill -1: must be 0 to 64"),
        (65, 1, "--prefill 65: must be 0 to 64"),
    ],
)
def test_a_plan_needs_a_decode_node(prefill: int, decode: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        UpConfig(prefill=prefill, decode=decode)


@pytest.mark.parametrize(
    ("gpus", "sizes", "shares"),
    [
        ("0", (0, 1), ["0.9"]),
        ("", (1, 1), [None, None]),
        ("0", (1, 1), ["0.45", "0.45"]),
        ("0,1", (1, 1), ["0.9", "0.9"]),
        ("0,1", (2, 1), ["0.45", "0.9", "0.45"]),
        ("3", (1, 2), ["0.3", "0.3", "0.3"]),
    ],
)
def test_nodes_of_one_gpu_divide_its_memory(
    gpus: str, sizes: tuple[int, int], shares: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert shares_of(*sizes, None, None) == shares


def shares_of(
    num_prefill: int, num_decode: int, prefill_share: float | None, decode_share: float | None
) -> list[str | None]:
    """Return the shares on the command lines of the nodes."""
    up = UpConfig(prefill=num_prefill, decode=num_decode)
    prefill, decode = PrefillConfig(memory_share=prefill_share), DecodeConfig(memory_share=decode_share)
    nodes = commands(Plan(up, RouterConfig(), prefill, decode), node_port=5701, http_port=8001)[1:]
    prefix = "--memory-share="
    return [next((word[len(prefix) :] for word in node.argv if word.startswith(prefix)), None) for node in nodes]


@pytest.mark.parametrize(
    ("sizes", "given", "shares"),
    [
        ((1, 1), (0.6, 0.3), ["0.6", "0.3"]),
        ((1, 1), (0.52, 0.45), ["0.52", "0.45"]),
        ((1, 1), (0.6, None), ["0.6", "0.3"]),
        ((1, 2), (0.3, None), ["0.3", "0.3", "0.3"]),
        ((2, 1), (None, 0.5), ["0.2", "0.2", "0.5"]),
    ],
)
def test_a_share_that_is_given_is_the_nodes_own(
    sizes: tuple[int, int], given: tuple[float, float], shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert shares_of(*sizes, *given) == shares


@pytest.mark.parametrize(("sizes", "given"), [((1, 1), (0.6, 0.5)), ((1, 2), (0.2, 0.45)), ((1, 1), (None, 0.9))])
def test_shares_beyond_a_gpu_are_refused(
    sizes: tuple[int, int], given: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"nodes of one GPU: let the shares of all sum to 0\.9"):
        shares_of(*sizes, *given)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert set(shares_of(*sizes, *given)) <= {"0.9", *map(str, given)}


@pytest.mark.parametrize(
    ("ranks", "visible", "shares"),
    [
        ((1, 2), ["0", "1,2"], ["0.9", "0.9"]),
        ((2, 2), ["0,1", "2,3"], ["0.9", "0.9"]),
        ((3, 2), ["0,1,2", "0,3"], ["0.45", "0.45"]),
        ((1, 5), ["0", "0,1,2,3"], ["0.45", "0.45"]),
    ],
)
def test_a_node_gets_a_gpu_for_each_of_its_ranks(
    ranks: tuple[int, int], visible: list[str], shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are too few, nodes share some. A node with more ranks than GPUs sees all, and refuses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    plan = Plan(UpConfig(), RouterConfig(), PrefillConfig(tp=ranks[0]), DecodeConfig(tp=ranks[1]))
    nodes = commands(plan, node_port=5701, http_port=8001)[1:]
    assert [node.environ["CUDA_VISIBLE_DEVICES"] for node in nodes] == visible
    assert [word for node in nodes for word in node.argv if "memory-share" in word] == [
        f"--memory-share={share}" for share in shares
    ]


def test_processes_get_fresh_keys_of_their_own(tmp_path: Path) -> None:
    """Only a process that can read the user's private files can join. Each run has new keys."""
    seen: set[bytes] = set()
    for _ in range(2):
        made = default_plan().secured(tmp_path)
        (keys_dir,) = tmp_path.iterdir()
        assert keys_dir.stat().st_mode & 0o777 == 0o700
        for command in commands(made, node_port=5701, http_port=8001):
            path, allow_list = keys_dir / f"{command.name}.key", keys_dir / "allow-list"
            assert {f"--keys={path}", f"--allow-list={allow_list}"} < set(command.argv)
            keys = KeyPair.load(path, allow_list)
            assert keys.name == command.name
            seen.add(keys.public)
    assert len(seen) == 2 * len(commands(made, node_port=5701, http_port=8001))


def test_configured_keys_are_used_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    KeyPair.create(path)
    given = Plan(UpConfig(), RouterConfig(keys=str(path)), PrefillConfig(), DecodeConfig())
    assert given.secured(tmp_path) is given
    assert list(tmp_path.iterdir()) == [path]


def flags_of(made: Plan) -> set[str]:
    """Return the speculation flags on the command lines of the nodes."""
    nodes = commands(made, node_port=5701, http_port=8001)[1:]
    says = [{word for word in node.argv if word.startswith(("--speculative", "--draft"))} for node in nodes]
    assert says[0] == says[1]
    return says[0]


def test_the_demo_model_speculates_unless_told_otherwise() -> None:
    assert default_plan().settled().speculation == "eagle, 5 steps, drafter eagle/"
    assert flags_of(default_plan().settled()) == {"--speculative=eagle", "--draft-steps=5"}
    off = Plan(UpConfig(), RouterConfig(), PrefillConfig(speculative="none"), DecodeConfig(speculative="none"))
    assert off.settled() == off
    assert off.speculation == "none"


def test_a_model_that_recommends_no_drafter_is_not_speculated(tmp_path: Path) -> None:
    model = str(tmp_path)
    made = Plan(UpConfig(), RouterConfig(), PrefillConfig(model=model), DecodeConfig(model=model)).settled()
    assert made.speculation == "none"
    assert flags_of(made) == {"--speculative=none"}


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (1, 3), (4, 1)])
def test_threads_are_divided(cores: int, prefill: int, decode: int) -> None:
    threads = split_threads(cores, prefill, decode)
    assert min(threads.values()) >= 1
    assert threads["decode"] >= threads["prefill"]
    total = threads["prefill"] * prefill + threads["decode"] * decode
    assert total <= max(cores, prefill + decode)
    assert cores < 4 or total < cores or cores <= prefill + decode, "the router has a core where there are enough"


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*taken.*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host no-such-host\.invalid"):
        check_port("no-such-host.invalid", 80)


@pytest.mark.parametrize(
    ("gpus", "variable", "kept"),
    [
        ("", "NUMBA_CACHE_DIR", "kernels_1/a.nbi"),
        ("0", "TRITON_CACHE_DIR", "AB/c.cubin"),
        ("0", "TRITON_HOME", ".triton/cache/AB/c.cubin"),
    ],
)
def test_the_first_start_says_that_it_compiles_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, variable: str, kept: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert "first start only" in (default_plan().first_start or "")
    (tmp_path / kept).parent.mkdir(parents=True)
    (tmp_path / kept).touch()
    assert default_plan().first_start is None


def test_a_router_off_loopback_has_an_admin_key_by_which_the_launcher_watches_it() -> None:
    def keys(**router: str) -> list[str | None]:
        plan = Plan(UpConfig(), RouterConfig(**router), PrefillConfig(), DecodeConfig())  # type: ignore[arg-type]
        return [plan.watched().router.admin_key for _ in range(2)]

    first, second = keys(host="::")
    assert first is not None and len(first) > 40 and first != second, "a new one for each run"
    assert keys(host="::", admin_key="given") == ["given", "given"]
    assert keys(host="127.0.0.1") == [None, None]


def test_cuda_on_a_host_without_it_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["up", "--device", "cuda", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--device cuda: torch sees no CUDA device on this host; use --device cpu or auto" in line


def test_models_are_checked_once_for_all_nodes_that_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str | None] = []
    counted: list[int] = []
    monkeypatch.setattr("baton.deploy.up.check_model", lambda config: checked.append(config.model))
    monkeypatch.setattr("baton.deploy.up.stored_size", lambda config: 7)
    monkeypatch.setattr("baton.deploy.up.check_memory", lambda nodes: counted.append(sum(size for _, size in nodes)))
    for num_prefill, model, expected in ((1, "/a", ["/a"]), (0, "/a", ["/a"]), (1, "/b", ["/b", "/a"])):
        up, prefill = UpConfig(prefill=num_prefill, decode=3), PrefillConfig(model=model)
        Plan(up, RouterConfig(), prefill, DecodeConfig(model="/a")).check_models()
        assert checked == expected
        checked.clear()
    assert counted == [28, 21, 28]
