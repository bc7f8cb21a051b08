"""`baton up` as a user runs it: it answers, reports errors clearly, and leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import free_port, wait_until
from thinned import thinned
from ties import Reference

BATON = [sys.executable, "-P", "-m", "baton.deploy.cli"]
DEMO = Path(__file__).parents[2] / "deploy" / "demo"
DEMO_DRAFTS = "eagle, 5 steps, drafter eagle/"
READY_S = 60
_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}  # as published


@dataclass
class Up:
    """A running `baton up`."""

    process: subprocess.Popen[str]
    port: int
    run_dir: Path
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    def wait_ready(self) -> None:
        wait_until(lambda: "Baton is ready" in self.said or self.process.poll() is not None, lambda: self.said, READY_S)
        assert self.process.poll() is None, self.said

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()


@contextmanager
def up(tmp_path: Path, model: Path, *flags: str) -> Iterator[Up]:
    port = free_port()
    output = tmp_path / "up.log"
    run_dir = tmp_path / "run"
    argv = ["up", "--model", str(model), "--port", str(port), "--run-dir", str(run_dir), "--num-pages", "64", *flags]
    with output.open("w") as log:
        process = subprocess.Popen([*BATON, *argv], stdout=log, stderr=subprocess.STDOUT, text=True)
    running = Up(process, port, run_dir, output)
    family: list[psutil.Process] = []
    try:
        running.wait_ready()
        family = running.family()
        yield running
    finally:
        if process.poll() is None:
            family += running.family()  # nodes that were restarted
            process.kill()
        process.wait()
        wait_until(lambda: not _alive(family), lambda: f"left behind: {_alive(family)}\n{running.said}", 10)


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Up]:
    """A running `baton up`, for tests after which it serves as before. At last it is killed, which leaves nothing."""
    with up(tmp_path_factory.mktemp("up"), model_dir) as running:
        yield running
        assert running.process.poll() is None, running.said


@pytest.mark.whole
def test_up_starts_several_routers_and_one_that_is_killed_starts_again(tmp_path: Path, model_dir: Path) -> None:
    with up(tmp_path, model_dir, "--routers", "2") as running:
        assert f"served by http://127.0.0.1:{running.port + 1}, too" in running.said
        other = replace(running, port=running.port + 1)
        model = running.request("GET", "/v1/models")[1]["data"][0]["id"]
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}

        def text(router: Up) -> str:
            status, answer = router.request("POST", "/v1/completions", body)
            assert status == 200, answer
            return answer["choices"][0]["text"]

        expected = text(running)
        assert text(other) == expected
        next(each for each in running.family() if "--node-address" in " ".join(each.cmdline())).kill()
        wait_until(lambda: "router-0 was killed by signal 9" in running.said, lambda: running.said)
        assert "router-1 serves on" in running.said and text(other) == expected
        wait_until(lambda: "router-0 serves again" in running.said, lambda: running.said, READY_S)
        wait_until(lambda: running.request("GET", "/ready")[0] == 200, lambda: running.said, READY_S)
        assert text(running) == expected


@pytest.mark.parametrize(
    ("family", "page_size", "fields"),
    [
        pytest.param("deepseek_v4", 128, {"compress_rates": _RATES}, id="deepseek_v4"),
        pytest.param("qwen3_5_text", 64, {}, id="qwen3_5", marks=pytest.mark.whole),
    ],
)
def test_up_finds_the_length_of_pages_by_itself(
    family: str, page_size: int, fields: dict[str, Any], tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint(family, **fields)
    reference, prompt = Reference(model), [(7 * i + i * i) % 500 + 1 for i in range(300)]
    body = {"model": model.name, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with up(tmp_path, model) as running:
        for node in ("prefill-0", "decode-0"):
            log = (running.run_dir / f"{node}.log").read_text()
            assert f"pages of {page_size} tokens" in log, log
        for cached in (0, 256):  # the whole pages before the last token
            status, answer = running.request("POST", "/v1/completions", body | {"return_token_ids": True})
            assert status == 200, answer
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            reference.assert_text(prompt, answer["choices"][0]["token_ids"])


@pytest.mark.timing
def test_up_answers_drafts_by_default_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with up(tmp_path, DEMO, "--no-draft-adaptive") as running:
        text_of_demo(running, DEMO_DRAFTS, is_speculated=True)
        family = running.family()
        assert len(family) == 3
        said = running.said
        assert f"http://127.0.0.1:{running.port}/v1" in said
        assert str(running.run_dir) in said
        assert {path.name for path in running.run_dir.glob("*.log")} == {"router.log", "prefill-0.log", "decode-0.log"}
        (keys,) = running.run_dir.glob("keys-*")
        used = {word for process in family for word in process.cmdline() if word.startswith("--keys=")}
        assert used == {f"--keys={keys / name}.key" for name in ("router", "prefill-0", "decode-0")}

        # what it prints can be pasted
        curl = re.search(r"(?s)  curl .*?}'\n", said)
        assert curl, said
        pasted = subprocess.run(["bash", "-c", curl[0]], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(pasted.stdout)["choices"][0]["finish_reason"] in ("stop", "length"), pasted

        chat = [*BATON, "chat", "--url", f"http://127.0.0.1:{running.port}", "--max-tokens", "8"]
        answered = subprocess.run(chat, input="hello\n", capture_output=True, text=True, timeout=60, check=False)
        assert answered.returncode == 0, answered.stderr

        start = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(20) == 0, running.said
        assert time.monotonic() - start < 8
        assert not _alive(family)
        assert not keys.exists()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", running.port))


@pytest.mark.whole
def test_the_demo_model_has_the_same_text_without_speculation(tmp_path: Path) -> None:
    texts = []  # test_speculation.py compares them in the gate
    for flags, words, is_speculated in (
        (["--no-draft-adaptive"], DEMO_DRAFTS, True),
        (["--speculative", "none"], "none", False),
    ):
        with up(tmp_path, DEMO, *flags) as running:
            texts.append(text_of_demo(running, words, is_speculated=is_speculated))
            running.process.terminate()
            assert running.process.wait(20) == 0, running.said
    assert len(set(texts)) == 1


def text_of_demo(running: Up, words: str, *, is_speculated: bool) -> str:
    """Check what the terminal and both nodes say about speculation, and whether drafts are accepted. Return the text of
    a request."""
    body = {"model": "demo", "prompt": "def main(", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    assert f"\nspeculation: {words}\n" in f"\n{running.said}"
    for node in ("prefill-0", "decode-0"):
        log = (running.run_dir / f"{node}.log").read_text()
        assert f"speculation: {words}\n" in log, log
    answer = running.request("POST", "/v1/completions", body)[1]
    num_accepted = answer["usage"].get("speculation", {}).get("accepted_tokens", 0)
    assert (num_accepted > 0) is is_speculated, answer
    text = answer["choices"][0]["text"]
    drafts = streamed_drafts(running.port, body)
    assert "".join(draft["text"] for draft in drafts) == text
    assert len(drafts) == 24 and (sum(draft["is_draft"] for draft in drafts) > 0) is is_speculated
    return text


def streamed_drafts(port: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the text of each token, and whether it is an accepted draft, from the chunks of a stream."""
    options = {"stream": True, "stream_options": {"include_drafts": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body | options), {"Content-Type": "application/json"})
    lines = connection.getresponse().read().splitlines()
    connection.close()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return [draft for chunk in chunks for choice in chunk["choices"] for draft in choice.get("drafts", [])]


def test_a_second_up_on_a_taken_port_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        argv = [*BATON, "up", "--model", str(model_dir), "--port", str(port), "--run-dir", str(tmp_path / "run")]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    assert result.returncode == 2
    assert f"port {port}" in result.stderr
    assert "--port" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_a_node_that_dies_is_restarted_and_serves_again(running: Up) -> None:
    assert "\nspeculation: none\n" in f"\n{running.said}"
    body = {"prompt": "def main(", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body["model"] = running.request("GET", "/v1/models")[1]["data"][0]["id"]
    before = running.request("POST", "/v1/completions", body)[1]["choices"][0]["text"]
    decode = next(child for child in running.family() if "decode" in child.cmdline())
    decode.kill()
    wait_until(lambda: "decode-0 was killed by signal 9" in running.said, lambda: running.said, 10)

    def serves_again() -> bool:
        status, answer = running.request("POST", "/v1/completions", body)
        return status == 200 and answer["choices"][0]["text"] == before

    wait_until(serves_again, lambda: running.said, READY_S)


@pytest.mark.whole
def test_a_node_of_several_ranks_is_restarted_whole_when_one_dies(tmp_path: Path, model_dir: Path) -> None:
    body = {"prompt": "def main(", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with up(tmp_path, model_dir, "--prefill-tp", "2", "--decode-dp-attention", "2") as running:
        assert "1 prefill of 2 ranks and 1 decode of 2 ranks" in running.said
        body["model"] = running.request("GET", "/v1/models")[1]["data"][0]["id"]
        before = running.request("POST", "/v1/completions", body)[1]["choices"][0]["text"]
        decode = next(child for child in running.family() if "decode" in child.cmdline())
        [rank] = [each for each in decode.children() if any("spawn_main" in word for word in each.cmdline())]
        rank.kill()
        words = (
            f"decode-0 exited with status 1; next start in .*rank 1 \\(process {rank.pid}\\) ended with exit code -9"
        )
        wait_until(lambda: re.search(words, running.said), lambda: running.said, 10)

        def serves_again() -> bool:
            status, answer = running.request("POST", "/v1/completions", body)
            return status == 200 and answer["choices"][0]["text"] == before

        wait_until(serves_again, lambda: running.said, READY_S)
        running.process.terminate()
        assert running.process.wait(20) == 0, running.said


@pytest.mark.whole
def test_one_node_in_a_crash_loop_does_not_stop_the_others(tmp_path: Path, model_dir: Path) -> None:
    """decode-1 dies and cannot restart, because its key is gone; decode-0 answers until it has its key."""
    with up(tmp_path, model_dir, "--decode", "2") as running:
        name = running.request("GET", "/v1/models")[1]["data"][0]["id"]
        body = {"model": name, "prompt": "def main(", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        wait_until(lambda: len(_nodes(running)) == 3, lambda: running.said, READY_S)
        (key,) = running.run_dir.glob("keys-*/decode-1.key")
        key.rename(key.with_suffix(".away"))
        next(each for each in running.family() if "--node-id=decode-1" in each.cmdline()).kill()

        num_answers = 0

        def fails_again() -> bool:
            nonlocal num_answers
            status, answer = running.request("POST", "/v1/completions", body)
            assert status == 200, answer
            num_answers += 1
            return "decode-1 exited with status 2, the 4th time in a row" in running.said

        wait_until(fails_again, lambda: running.said, READY_S)
        assert num_answers > 4
        (degraded,) = running.request("GET", "/ready")[1]["degraded"]
        assert degraded["node"] == "decode-1" and degraded["state"] == "gone"
        key.with_suffix(".away").rename(key)
        wait_until(lambda: "decode-1 serves again" in running.said, lambda: running.said, READY_S)
        assert {"decode-0", "decode-1"} < set(_nodes(running))
        assert running.request("GET", "/ready")[1] == {"status": "ready"}
        assert "decode-0 serves on" in running.said
        running.process.terminate()
        assert running.process.wait(20) == 0, running.said


def test_a_drained_node_is_reported_on_the_terminal(running: Up) -> None:
    way_back = "decode node decode-0 is draining, since an operator asked for it (POST /admin/nodes/decode-0/undrain"
    assert running.request("POST", "/admin/nodes/decode-0/drain")[0] == 200
    wait_until(lambda: f"nothing is served now: {way_back}" in running.said, lambda: running.said, 20)
    assert running.request("POST", "/admin/nodes/decode-0/undrain")[0] == 200

    def has_ended() -> bool:
        return "requests are served again" in running.said.partition(way_back)[2]

    wait_until(has_ended, lambda: running.said, 20)


def _nodes(running: Up) -> list[str]:
    return [node["node_id"] for node in running.request("GET", "/debug/nodes")[1]["nodes"]]


@pytest.mark.parametrize(  # test_cluster_life.py has more, with forked nodes
    ("files", "words"),
    thinned(
        [
            ({}, ["config.json"]),
            ({"config.json": "{", "tokenizer.json": "{}", "model.safetensors": ""}, ["config.json"]),
            (
                {"config.json": '{"architectures": ["Unknown"]}', "tokenizer.json": "{}", "model.safetensors": ""},
                ["Unknown"],
            ),
        ],
        lambda i, *_: i == 2,
    ),
)
def test_a_wrong_model_directory_is_refused(tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, text in files.items():
        (model / name).write_text(text)
    argv = [*BATON, "up", "--model", str(model), "--port", str(free_port()), "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    for word in [str(model), *words]:
        assert word in result.stderr


@pytest.mark.whole
def test_print_config_is_a_file_that_starts_the_same(tmp_path: Path, model_dir: Path) -> None:
    argv = [*BATON, "up", "--print-config", "--model", str(model_dir), "--page-size", "8", "--transport", "zmq"]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    path = tmp_path / "baton.toml"
    path.write_text(printed)
    with up(tmp_path, model_dir, "--config", str(path)) as running:
        commands = [child.cmdline() for child in running.family()]
        nodes = [command for command in commands if "router" not in command]
        assert len(nodes) == 2
        for command in nodes:
            assert {"--page-size=8", "--transport=zmq"} <= set(command)
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.process.wait(20) == 0, running.said
