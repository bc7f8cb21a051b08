"""The check of the model that a node is to load, before anything big is imported or started. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ...metadata.errors import ConfigError, ModelError
from ...metadata.handoff.schema.kv_layout import DTYPE_BYTES
from ...metadata.logs import size_in_words
from ..config import EngineConfig
from ..drafters.algorithm import find_drafter, settle
from ..gpus import gpu_memory
from ..ranks.shares import check_shares
from ..state.host_memory import available_memory
from . import hub
from .hub import HubSnapshot, Say
from .model_config import ModelConfig
from .model_files import check_directory, check_names, path_of, safetensors_files
from .quantization import chosen
from .read_config import read_model_config

FILES = "safetensors"  # value of --load-format; with others the weights are made
Config = TypeVar("Config", bound=EngineConfig)
DEMO = Path(__file__).parents[2] / "deploy" / "demo"


def resolve_model(model: str | None) -> Path:
    """Return the checkpoint directory; None is the demo model that ships with Baton. Raises ModelError."""
    return DEMO if model is None else path_of(model)


def fetched(nodes: Sequence[Config], say: Say) -> list[Config]:
    """Download the models of this host's nodes that are named by their repository on the Hugging Face hub. Return the
    configurations with directories in place of the names.

    All checks that need config.json alone come before the download of any weights. `say` gets lines for the operator.
    Raises ConfigError or ModelError, which name the remedy."""
    snapshots: dict[tuple[str, str | None], HubSnapshot] = {}  # a name is resolved once for all nodes
    settled: dict[Config, Config] = {}
    wanted: dict[Config, list[tuple[HubSnapshot, list[str]]]] = {}
    for config in dict.fromkeys(nodes):
        found = _find_models(config, snapshots, say)
        directories = {what: str(snapshot.directory) for what, snapshot in found.items()}
        settled[config] = replace(config, **directories, revision=None, draft_revision=None)
        wanted[config] = [(each, _weights_of(settled[config], what, each)) for what, each in found.items()]
    if snapshots:
        sizes = [sum(each.size(paths) for each, paths in wanted[config]) for config in nodes]
        check_memory([(settled[config], size) for config, size in zip(nodes, sizes, strict=True)])
    for snapshot in snapshots.values():
        paths = [path for found in wanted.values() for each, paths in found if each is snapshot for path in paths]
        hub.fetch_weights(snapshot, list(dict.fromkeys(paths)), say)
    return [settled[config] for config in nodes]


def _find_models(
    config: EngineConfig, snapshots: dict[tuple[str, str | None], HubSnapshot], say: Say
) -> dict[str, HubSnapshot]:
    """Return the snapshots that a node takes from the hub, by the setting that names them. `snapshots`: those found for
    other nodes, by name and revision; new ones are added."""
    found: dict[str, HubSnapshot] = {}
    for what, revision in (("model", config.revision), ("draft_model", config.draft_revision)):
        model = getattr(config, what)
        name = hub.repository(model)
        if name is not None:
            if (name, revision) not in snapshots:
                snapshots[name, revision] = hub.find(model, name, revision, say)
            found[what] = snapshots[name, revision]
        elif revision is not None:
            flag, given = f"--{what}".replace("_", "-"), "not given" if model is None else f"the path {model}"
            flags = f"{flag.replace('model', 'revision')} {revision}"
            raise ConfigError(f"{flags} is for ORG/NAME of the Hugging Face hub, but {flag} is {given}")
    return found


def _weights_of(config: EngineConfig, what: str, snapshot: HubSnapshot) -> list[str]:
    """Download all of a repository but its weights, and check it. Return the paths of the weights that the node will
    load, those of a drafter in the same repository included. `what`: the setting that names the repository."""
    is_model, needs_weights, directory = what == "model", config.load_format == FILES, snapshot.directory
    if snapshot.is_cached:
        _check_cached(snapshot, needs_weights=needs_weights)
        return []
    names = {path for path in snapshot.files if "/" not in path}
    check_names(Path(snapshot.name), names, needs_weights=needs_weights, needs_tokenizer=is_model)
    hub.fetch_small(snapshot)
    places = [directory]
    if is_model:
        check_config(config)
        drafter = _shipped_drafter(config, directory)
        places += [] if drafter in (None, directory) else [drafter]
    if not needs_weights:
        return []
    found: list[str] = []
    for place in places:
        inside = "" if place == directory else f"{place.name}/"
        there = {path.removeprefix(inside) for path in snapshot.files if path.startswith(inside)}
        found += [
            f"{inside}{path.name}" for path in safetensors_files(place, {each for each in there if "/" not in each})
        ]
    return found


def _check_cached(snapshot: HubSnapshot, *, needs_weights: bool) -> None:
    try:
        check_directory(snapshot.directory, needs_weights=needs_weights, needs_tokenizer=False)
    except ModelError as error:
        raise ModelError(f"the cache has {snapshot.words} only in part, and {snapshot.why_cached}: {error}") from None


def _shipped_drafter(config: EngineConfig, model_dir: Path) -> Path | None:
    """Return the directory of the drafter that comes with a model whose weights are not here yet."""
    config = settle(config, model_dir)
    if config.draft_model is not None:
        return None
    try:
        return find_drafter(config, model_dir)
    except ConfigError:
        if config.speculative == "mtp":  # it may be in the weights
            return None
        raise


def check_model(config: EngineConfig) -> None:
    """Check config.json and the names and headers of the files. Raise ConfigError or ModelError, which name the remedy,
    if they show that the model or the drafter cannot be loaded."""
    model_dir = resolve_model(config.model)
    needs_weights = config.load_format == FILES
    check_config(config)
    _check("--model", model_dir, needs_weights=needs_weights, needs_tokenizer=True)
    drafter = find_drafter(settle(config, model_dir), model_dir)
    if drafter is not None and drafter != model_dir:
        _check("--draft-model", drafter, needs_weights=needs_weights, needs_tokenizer=False)


def check_config(config: EngineConfig) -> None:
    """Raise ConfigError or ModelError, saying what to do, if config.json tells that the model cannot be served so."""
    model_dir = resolve_model(config.model)
    _check("--model", model_dir, needs_weights=False, needs_tokenizer=False)
    model = read_model_config(model_dir)
    chosen(model.quantization, config.quantization)
    longest_context(config, model)
    model = model.with_states(config.state_dtype)
    model.pool("float32", config.kv_dtype, model.page_size(config.page_size))
    check_shares(model, config.num_ranks, model.architecture, has_all_heads=config.dp_attention > 1)


def check_memory(nodes: Sequence[tuple[EngineConfig, int]]) -> None:
    """Raise ConfigError if nodes of this host, given with the bytes of their files of weights, cannot hold the weights:
    in its GPUs, or without any in its memory."""
    gpus = gpu_memory() if any(config.device != "cpu" for config, _ in nodes) else []
    of_host = 0
    for config, num_bytes in nodes:
        model = read_model_config(resolve_model(config.model))
        if gpus and config.device != "cpu":
            of_rank = num_bytes // config.num_ranks // (2 if config.quantization == "fp8" else 1)
            if of_rank > max(gpus):
                name = hub.name_of(resolve_model(config.model))
                raise ConfigError(
                    f"the weights of {name} take {size_in_words(of_rank)} of each GPU, which has "
                    f"{size_in_words(max(gpus))}: divide the model among more GPUs with --tp"
                )
        elif model.quantization is None and config.dtype in ("auto", "float32"):
            of_host += num_bytes * 4 // DTYPE_BYTES[model.checkpoint_dtype]
        else:
            of_host += num_bytes
    has = available_memory()
    if of_host > has:
        count = "the node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        raise ConfigError(
            f"the weights take {size_in_words(of_host)} for {count} on the CPU, and {size_in_words(has)} of memory are "
            "free: start fewer nodes (`--prefill 0 --decode 1` is one), or use a smaller model or a larger host"
        )


def stored_size(config: EngineConfig) -> int:
    """Return the bytes of the files of weights that a node loads: of its model and its drafter. Raises ModelError and
    ConfigError."""
    if config.load_format != FILES:
        return 0
    model_dir = resolve_model(config.model)
    drafter = find_drafter(settle(config, model_dir), model_dir)
    places = {model_dir, model_dir if drafter is None else drafter}
    return sum(path.stat().st_size for place in places for path in safetensors_files(place))


def longest_context(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest sequence that a node takes. Raises ConfigError if the model takes no such length."""
    if config.context_len is None:
        return model.context_len
    if not 1 <= config.context_len <= model.context_len:
        raise ConfigError(f"context_len {config.context_len} is out of range: the model takes 1 to {model.context_len}")
    return config.context_len


def _check(flag: str, model_dir: Path, *, needs_weights: bool, needs_tokenizer: bool) -> None:
    try:
        check_directory(model_dir, needs_weights=needs_weights, needs_tokenizer=needs_tokenizer)
    except ModelError as error:
        is_of_directory = str(error).startswith((f"{model_dir} ", f"{model_dir}:"))
        raise ModelError(f"{flag} {error}" if is_of_directory else str(error)) from None
