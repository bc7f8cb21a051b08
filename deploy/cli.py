"""The `baton` command. Everything heavy is imported by the subcommand that needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..metadata.errors import BatonError
from .config_file import print_tables, read_tables
from .flags import Parser, Setting, add_flag, by_name, resolve
from .help_text import EPILOG, SUMMARIES, TITLE
from .lifeline import die_with_parent

_CONFIGS = {  # command, which is also the name of its TOML table: where its configuration class is
    "up": ("deploy.plan", "UpConfig"),
    "router": ("router.config", "RouterConfig"),
    "prefill": ("prefill_node.config", "PrefillConfig"),
    "decode": ("decode_node.config", "DecodeConfig"),
    "chat": ("deploy.chat", "ChatConfig"),
    "explain": ("deploy.explain", "ExplainConfig"),
}

_RID_HELP = "the answer's x-request-id, or `id` in its body; without one the recent requests are listed"


def main(argv: list[str] | None = None) -> int:
    """Runs one command line; returns its exit status: 0, that of the error (metadata/errors.py), 130 (interrupted)."""
    die_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except BatonError as error:
        if _is_debug(argv):
            raise
        print(f"baton: error: {error}", file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "safetensors") or _is_debug(argv):
            raise
        print(f"baton: error: a node needs {error.name}: pip install 'baton-serve[node]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 1


def _is_debug(argv: list[str]) -> bool:
    words = " ".join(argv).replace("=", " ")
    return "--log-level debug" in words


def _run(argv: list[str]) -> int:
    parser = Parser(
        prog="baton", description=TITLE, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    parsers: dict[str | None, Parser] = {None: parser}
    for name, summary in SUMMARIES.items():
        parsers[name] = command = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        if name in argv:  # the others' flags are not looked at, and their imports cost time
            _add_command_flags(name, command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parsers[args.command].refuse(unknown[0])
    if args.version:
        print(f"baton {_version()}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    return _dispatch(args.command, args)


def _version() -> str:
    from importlib.metadata import version

    return version("baton-serve")


def _module(name: str) -> Any:
    return import_module(f"..{name}", __package__)


def _config(command: str) -> type:
    module, name = _CONFIGS[command]
    return getattr(_module(module), name)


def _settings(command: str) -> dict[str, Setting]:
    """What the command's flags, and the keys of its TOML table, set. `up` has those of all that it starts."""
    if command != "up":
        return by_name(_config(command))
    configs = (_config(name) for name in ("up", "router", "prefill", "decode"))
    return by_name(*configs, skip=_module("deploy.plan").DECIDED)


def _add_command_flags(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "keys":
        parser.add_argument("file", metavar="FILE", help="the file to write; must not exist")
        parser.add_argument("--allow-list", metavar="LIST", help="add the public key to this file (made if missing)")
        parser.add_argument("--name", help="the process's name there: its node id, or router (default: FILE's stem)")
        return
    if name == "explain":
        parser.add_argument("rid", nargs="?", metavar="RID", help=_RID_HELP)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file whose table [{name}] sets these options")
    parser.add_argument("--print-config", action="store_true", help="print the configuration in force as TOML and exit")
    for setting in _settings(name).values():
        add_flag(parser, setting)


def _dispatch(name: str, args: argparse.Namespace) -> int:
    if name == "keys":
        return _make_keys(Path(args.file), args.name, args.allow_list)
    tables = read_tables(args.config, {table: _settings(table) for table in _CONFIGS}) if args.config else {}
    if name == "up":
        plan = _module("deploy.plan").make_plan(args, tables, os.environ)
        return _print(plan.tables()) if args.print_config else _module("deploy.launcher").run(plan)
    config = resolve(_config(name), args, tables.get(name, {}), os.environ)
    if args.print_config:
        return _print({name: config})
    if name == "explain":
        return _module("deploy.explain").run(config, args.rid)
    # Threads that spin while they wait take the cores of the other processes here: measured on two cores with three
    # threads, 140 tokens a second against 400. Must be set before torch loads its OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    modules = {"router": "router.main", "prefill": "prefill_node.main", "decode": "decode_node.main"}
    return _module(modules.get(name, "deploy.chat")).run(config)


def _print(configs: Mapping[str, Any]) -> int:
    print(print_tables(configs), end="")
    return 0


def _make_keys(file: Path, name: str | None, allow_list: str | None) -> int:
    """Prints the public key as a line for an allow-list, and nothing else, to stdout."""
    lists, pairs = _module("metadata.bus.allow_list"), _module("metadata.bus.curve").KeyPair
    name = name or file.stem
    keys = pairs.generate()
    line = lists.line_of(name, keys.public)
    if allow_list is not None:
        lists.with_line(allow_list, line)  # before the key is written
    keys.write(file)
    print(f"wrote {file}: it is secret, for `--keys {file}` of one process", file=sys.stderr)
    if allow_list is None:
        print(
            "its line for an allow-list (or let all processes have a copy of this file, and no list):", file=sys.stderr
        )
    else:
        lists.add_line(allow_list, line)
        print(f"added to {allow_list}, which every process gets a copy of (--allow-list):", file=sys.stderr)
    print(line, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
