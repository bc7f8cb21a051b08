"""A model of the Hugging Face hub becomes a directory on this host: checked early, downloaded once, resumed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hub_server
import pytest
from filelock import FileLock
from heads import write_head
from hub_server import TOKEN, HubServer, running
from huggingface_hub import close_session, constants, file_download

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint import hub
from baton.engine.checkpoint.hub import commit_of, name_of, repository, small_files
from baton.engine.checkpoint.model_check import check_model, fetched
from baton.metadata.errors import BatonError
from baton.metadata.logs import size_in_words
from baton.metadata.version import install_command
from baton.prefill_node.config import PrefillConfig

CHUNK = 1 << 14


class Host(NamedTuple):
    """This host, its hub, and what it told the operator."""

    hub: HubServer
    cache: Path
    said: list[str]

    def fetch(self, *nodes: Any) -> list[Any]:
        self.hub.asked.clear()
        return fetched(nodes, self.said.append)

    def refusal(self, node: Any) -> str:
        """Return the one sentence that refuses a node."""
        with pytest.raises(BatonError) as error:
            check_model(self.fetch(node)[0])
        words = str(error.value)
        assert error.value.exit_status == 2 and "\n" not in words, words
        return words


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    cache = tmp_path / "cache"
    with running(HubServer()) as server:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub, "_CHUNK_BYTES", CHUNK)
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "DOWNLOAD_CHUNK_SIZE": CHUNK,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.chdir(tmp_path)
        yield Host(server, cache, [])
        close_session()  # before the server, so that no connection is left


@pytest.fixture
def model(tmp_path: Path, checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint that a test may add files to."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "source")


def test_what_is_read_is_downloaded_once_for_all_nodes(host: Host, model: Path) -> None:
    """No code, no pickle, no other form of the weights."""
    for name in ("modeling_x.py", "pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "README.md"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    commit = host.hub.add("org/model", model).commit
    nodes = [PrefillConfig(model="org/model"), DecodeConfig(model="org/model"), DecodeConfig(model="org/model")]
    found = host.fetch(*nodes)
    assert [type(each) for each in found] == [type(each) for each in nodes]
    (directory,) = {Path(each.model) for each in found}
    check_model(found[0])
    there = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    assert there >= {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert not {path for path in there if path.endswith((".py", ".bin", ".md")) or "/" in path}
    assert (commit_of(directory), name_of(directory)) == (commit, "org/model")
    assert host.hub.downloads("model.safetensors") == ["model.safetensors"]
    assert sum(path == "/api/models/org/model" for _, path, _ in host.hub.asked) == 1, host.hub.asked
    size = size_in_words((model / "model.safetensors").stat().st_size)
    assert host.said == [
        f"downloading org/model at commit {commit[:12]}: 1 file, {size}, to {host.cache}/models--org--model"
    ]
    assert host.fetch(*nodes) == found
    assert [method for method, path, _ in host.hub.asked if "resolve" in path] == [] and len(host.said) == 1


def test_an_interrupted_download_goes_on(host: Host, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host.hub.add("org/model", model)
    size = (model / "model.safetensors").stat().st_size
    host.hub.break_after = 3 * CHUNK
    assert size > 4 * CHUNK
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)  # between the library's own tries
    words = host.refusal(DecodeConfig(model="org/model"))
    assert words.startswith(f"the download of org/model from {host.hub.url} broke off ("), words
    assert words.endswith("); the next start takes it up where it ended"), words
    host.hub.break_after = None
    (config,) = host.fetch(DecodeConfig(model="org/model"))
    parts = [part for method, path, part in host.hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert len(parts) == 1 and parts[0].startswith("bytes=") and parts[0] != "bytes=0-", parts
    assert " of it is here already, to " in host.said[-1]
    assert (Path(config.model) / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("is_in_lfs", [True, False])
def test_a_file_that_arrived_damaged_is_not_kept(
    host: Host, model: Path, is_in_lfs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of an earlier download, for one, may have been damaged when the host lost its power."""
    if not is_in_lfs:
        monkeypatch.setattr(hub_server, "_etag", hub_server._git)
        monkeypatch.setattr(hub_server, "_entry", lambda data: {"size": len(data), "blobId": hub_server._git(data)})
    data = (model / "model.safetensors").read_bytes()
    host.hub.add("org/model", model)
    host.fetch(DecodeConfig(model="org/model"))
    (blob,) = [path for path in host.cache.rglob("blobs/*") if path.stat().st_size == len(data)]
    blob.rename(f"{blob}.baton.incomplete")
    Path(f"{blob}.baton.incomplete").write_bytes(bytes(100))
    assert "model.safetensors of org/model at commit " in host.refusal(DecodeConfig(model="org/model"))
    (config,) = host.fetch(DecodeConfig(model="org/model"))
    assert (Path(config.model) / "model.safetensors").read_bytes() == data


def test_a_server_that_sends_more_than_it_lists_does_not_fill_the_disk(
    host: Host, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.hub.add("org/model", model)
    entry = hub_server._entry

    def less(data: bytes) -> dict[str, Any]:
        return entry(data) | ({"size": len(data) - 50} if len(data) > hub_server.SMALL else {})

    monkeypatch.setattr(hub_server, "_entry", less)
    size = (model / "model.safetensors").stat().st_size - 50
    assert f"it sends more than the {size:,} bytes that it lists" in host.refusal(DecodeConfig(model="org/model"))
    assert list(host.cache.rglob("*.incomplete")) == []


def test_no_thread_appends_to_a_part_once_a_download_has_ended(
    host: Host, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may go on with the part as soon as the lock is free."""
    for name in ("a", "b"):
        (model / name).write_bytes(name.encode() * 200 * CHUNK)
    host.hub.add("org/model", model)
    host.hub.bytes_per_s = 20 * CHUNK
    snapshot = hub.find("org/model", "org/model", None, host.said.append)
    hub.fetch_small(snapshot)
    started = threading.Event()
    update, http_get = hub._Meter.update, file_download.http_get

    def counted(meter: Any, num_bytes: float | None = 1) -> None:
        started.set()
        update(meter, num_bytes)

    def fails(url: str, *args: Any, **more: Any) -> None:
        if not url.endswith("/b"):
            return http_get(url, *args, **more)
        assert started.wait(10)
        raise OSError("no route to the host")

    monkeypatch.setattr(hub._Meter, "update", counted)
    monkeypatch.setattr(file_download, "http_get", fails)
    with pytest.raises(BatonError, match="no route"):
        hub.fetch_weights(snapshot, ["a", "b"], host.said.append)
    assert [thread for thread in threading.enumerate() if thread.name == "download"] == []
    (part,) = [path for path in host.cache.rglob("*.incomplete") if path.stat().st_size]
    assert part.stat().st_size < 200 * CHUNK


def test_drafters_are_found_in_the_repository_of_the_model_and_in_their_own(host: Host, model: Path) -> None:
    write_head(model / "eagle", "eagle", model)
    host.hub.add("org/head", write_head(model.parent / "head", "eagle", model))
    host.hub.add("org/model", model)
    (config,) = host.fetch(DecodeConfig(model="org/model"))
    assert not (Path(config.model) / "eagle" / "model.safetensors").exists(), "nobody asked for it"
    (config,) = host.fetch(DecodeConfig(model="org/model", speculative="eagle"))
    check_model(config)
    assert (Path(config.model) / "eagle" / "model.safetensors").exists()
    (config,) = host.fetch(DecodeConfig(model=str(model), speculative="eagle", draft_model="org/head"))
    check_model(config)
    assert (config.model, name_of(Path(config.draft_model))) == (str(model), "org/head")
    del host.hub.repositories["org/model"].files["eagle/config.json"]
    words = host.refusal(DecodeConfig(model="org/model", speculative="eagle"))
    assert "speculative eagle needs --draft-model" in words and host.hub.downloads(".safetensors") == []


def test_a_plan_takes_the_small_files_of_a_repository(host: Host, model: Path) -> None:
    (model / "times.json").write_text("{}")
    host.hub.add("org/model", model)
    assert (Path(small_files("org/model", host.said.append)) / "times.json").read_text() == "{}"
    assert small_files("llama-3.1-8b-h200", host.said.append) == "llama-3.1-8b-h200"
    assert host.hub.downloads(".safetensors") == [] and host.said == []


def test_a_directory_wins_over_a_name(host: Host, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "org" / "model")
    host.hub.add("org/model", model)
    config = DecodeConfig(model="org/model")
    assert host.fetch(config) == [config] and host.hub.asked == []
    words = host.refusal(replace(config, revision="v1"))
    assert words == "--revision v1 is for ORG/NAME of the Hugging Face hub, but --model is the path org/model"
    words = host.refusal(replace(config, draft_revision="v1"))
    assert words == "--draft-revision v1 is for ORG/NAME of the Hugging Face hub, but --draft-model is not given"


def test_a_revision_is_a_branch_or_a_commit(host: Host, model: Path) -> None:
    commit = host.hub.add("org/model", model).commit
    (config,) = host.fetch(DecodeConfig(model="org/model", revision=commit, load_format="dummy"))
    assert commit_of(Path(config.model)) == commit and config.revision is None
    assert host.hub.downloads(".safetensors") == [], "made weights are not downloaded"
    assert host.refusal(DecodeConfig(model="org/model", revision="v9")) == (
        "org/model has no revision v9: give --revision a branch, a tag or a whole commit"
    )


@pytest.mark.parametrize(
    ("files", "settings", "words"),
    [
        ({"model.safetensors": None, "m.gguf": "x"}, {}, "org/model has no *.safetensors files; Baton does not read"),
        ({"model.safetensors": None, "pytorch_model.bin": "x"}, {}, "; convert pytorch_model.bin: pickles are never"),
        ({"config.json": None, "model.safetensors": None, "adapter_config.json": "{}"}, {}, " is a LoRA adapter, and "),
        ({"tokenizer.json": None}, {}, "org/model has no tokenizer.json; copy it from the model that this one was"),
        ({"config.json": '{"architectures": ["MambaForCausalLM"]}'}, {}, "['MambaForCausalLM'] is not served; Baton"),
        ({}, {"tp": 7}, "query heads, which 7 ranks cannot divide; let --tp be a divisor"),
        ({}, {"context_len": 10**7}, "context_len 10000000 is out of range: the model takes 1 to "),
    ],
    ids=["GGUF", "pickles", "LoRA", "no tokenizer", "architecture", "ranks", "context"],
)
def test_what_cannot_be_served_is_refused_before_weights_are_downloaded(
    files: dict[str, str | None], settings: dict[str, Any], words: str, host: Host, model: Path
) -> None:
    for name, text in files.items():
        (model / name).unlink() if text is None else (model / name).write_text(text)
    host.hub.add("org/model", model)
    assert words in host.refusal(DecodeConfig(model="org/model", **settings))
    assert host.hub.downloads(".safetensors") == [] and host.said == []


def test_a_repository_that_does_not_open_is_named_with_what_to_do(
    host: Host, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "Qwen3-0.6B").mkdir(parents=True)
    assert "has no such repository, or it is private and HF_TOKEN does not open it; did you mean the directory " in (
        words := host.refusal(DecodeConfig(model="models/qwen3-06b"))
    )
    assert words.endswith("models/Qwen3-0.6B?")
    assert host.refusal(DecodeConfig(model="org/na--me")).endswith("and no name that a repository can have")
    host.hub.add("org/model", model, is_private=True)
    assert "or it is private and HF_TOKEN does not open it" in host.refusal(DecodeConfig(model="org/model"))
    host.hub.add("org/model", model, is_gated=True)
    assert host.refusal(DecodeConfig(model="org/model")) == (
        f"org/model is gated: accept its terms on {host.hub.url}/org/model, then set HF_TOKEN to a token of the "
        "account that did"
    )
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", host.hub.url.replace("://", "://user:password@"))
        words = host.refusal(DecodeConfig(model="org/model"))
        assert words.startswith("HF_ENDPOINT holds a password") and host.hub.url not in words
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token of HF_TOKEN" in host.refusal(DecodeConfig(model="org/model"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_model(host.fetch(DecodeConfig(model="org/model"))[0])


def test_names_that_a_server_gives_stay_inside_the_cache(
    host: Host, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.hub.add("org/model", model)
    with monkeypatch.context() as patch:
        patch.setattr(hub_server, "_git", lambda data: "../../../stolen")
        assert "does not answer as a hub (" in host.refusal(DecodeConfig(model="org/model"))
    with monkeypatch.context() as patch:
        patch.setattr(hub_server.Repository, "commit", "../../..")
        assert "does not answer as a hub (its commit is '../../..')" in host.refusal(DecodeConfig(model="org/model"))
    for size, sha256 in ((-1, "0" * 64), (1, "0" * 40)):
        entry = {"size": size, "blobId": "0" * 40, "lfs": {"size": size, "sha256": sha256, "pointerSize": 1}}
        monkeypatch.setattr(hub_server, "_entry", lambda _, entry=entry: entry)
        assert f"has size {size} and hash '{sha256}'" in host.refusal(DecodeConfig(model="org/model"))


def test_the_cache_answers_if_the_hub_cannot_be_asked(host: Host, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = host.hub.add("org/model", model).commit
    node = DecodeConfig(model="org/model")
    found = host.fetch(node)
    host.hub.status = 503
    assert host.fetch(node) == found
    assert host.said[-1] == f"org/model: {host.hub.url} answers 503; taking commit {commit[:12]} from the cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert host.fetch(node) == found and host.hub.asked == []
    assert host.refusal(DecodeConfig(model="org/other")) == (
        f"org/other is not in the cache ({host.cache}), and HF_HUB_OFFLINE forbids asking the hub; name another hub by "
        "HF_ENDPOINT, or give a directory"
    )
    (Path(found[0].model) / "model.safetensors").unlink()
    assert f"the cache has org/model at commit {commit[:12]} only in part, and HF_HUB" in host.refusal(node)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached (" in host.refusal(DecodeConfig(model="org/other"))


def test_a_disk_without_room_is_named(host: Host, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host.hub.add("org/model", model)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=10)))
        words = host.refusal(DecodeConfig(model="org/model"))
    assert f" in {host.cache}, which has 10 bytes free: make room, or set HF_HOME to a directory" in words
    assert host.hub.downloads(".safetensors") == []

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    words = host.refusal(DecodeConfig(model="org/model"))
    assert words.startswith(f"the disk of {host.cache} is full: make room, or set HF_HOME to a directory on a larger")


def test_a_second_process_waits_for_the_first_one(host: Host, model: Path) -> None:
    host.hub.add("org/model", model)
    (config,) = host.fetch(DecodeConfig(model="org/model", load_format="dummy"))
    first = FileLock(host.cache / "models--org--model" / ".baton.lock")
    first.acquire()

    def say(line: str) -> None:
        if line == "another process downloads org/model: waiting for it":
            first.release()

    (found,) = fetched([DecodeConfig(model="org/model")], say)
    assert found.model == config.model and not first.is_locked


def test_weights_that_this_host_cannot_hold_are_refused_before_the_download(
    host: Host, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.hub.add("org/model", model)
    size = (model / "model.safetensors").stat().st_size
    monkeypatch.setattr("baton.engine.checkpoint.model_check.available_memory", lambda: size)
    nodes = [PrefillConfig(model="org/model", device="cpu"), DecodeConfig(model="org/model", device="cpu")]
    with pytest.raises(BatonError, match=r"take .* for 2 nodes on the CPU, and .* are free: start fewer nodes \("):
        host.fetch(*nodes)
    monkeypatch.setattr("baton.engine.checkpoint.model_check.gpu_memory", lambda: [size - 1] * 2)
    assert ": divide the model among more GPUs with --tp" in host.refusal(DecodeConfig(model="org/model"))
    assert host.hub.downloads(".safetensors") == []
    host.fetch(DecodeConfig(model="org/model", tp=2))


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "https://huggingface.co/org/name", "hf.co/org/name/", "hf://org/name"):
        assert repository(name) == "org/name"
    for path in (None, "name", "./org/name", "/org/name", "a/b/c", "~/org/name", "../name"):
        assert repository(path) is None
    for path in ("~no-such-user/name", "n" * 5000):
        with pytest.raises(BatonError, match="is no path that this user can open: "):
            repository(path)
    assert (commit_of(tmp_path), name_of(tmp_path)) == ("", tmp_path.name)


def test_without_huggingface_hub_a_name_names_the_extra(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    words = host.refusal(DecodeConfig(model="org/model"))
    assert words.startswith("org/model is no directory here, ") and install_command("hub") in words


def test_a_node_says_what_is_wrong_once_and_sends_no_telemetry(host: Host) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**plain, "HF_ENDPOINT": host.hub.url, "HF_HOME": str(host.cache)}
    argv = [sys.executable, "-P", "-m", "baton.deploy.cli", "decode", "--model", "org/name"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("baton: error: org/name is no directory here, and ")
    assert [path for _, path, _ in host.hub.asked] == ["/api/models/org/name"]
    assert not any("torch" in agent or "agent/" in agent for agent in host.hub.agents), host.hub.agents
