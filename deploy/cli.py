"""The `baton` command: its subcommands, their flags and their help. A subcommand's code is imported when it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..metadata.errors import BatonError
from ..metadata.service_manager import notify
from ..metadata.version import install_command
from .child import die_with_parent
from .config_file import print_tables, read_tables
from .flags import Parser, Setting, add_flag, by_name, nearest, replaced_flags, resolve
from .foreign_flags import COMMANDS

TITLE = """\
Baton serves large language models with prefill and decode in separate processes. A router takes
OpenAI-style requests, prefill nodes compute the KV cache of the prompts, decode nodes generate the answers."""

SUMMARIES = {  # command: one line of help
    "up": "start a router and nodes on this host, and stop them together",
    "router": "start the HTTP server that distributes requests to the nodes",
    "prefill": "start a node that computes the KV cache of prompts",
    "decode": "start a node that generates answers",
    "chat": "talk to a running model in the terminal",
    "top": "show the running service, or print it once",
    "explain": "show where a request spent its time",
    "doctor": "check this host, or a running cluster, and say how to mend what is wrong",
    "plan": "say how many prefill and decode nodes serve a load best, by simulation",
    "bench": "measure a running server under load, and compare two measurements",
    "keys": "make a key file, with which processes on several hosts trust each other",
}

EPILOG = """\
one host:
  baton up                          the demo model, one prefill and one decode node, http://127.0.0.1:8000
  baton up --model Qwen/Qwen3-0.6B  a repository of the Hugging Face hub, which is downloaded
  baton up --model DIR --decode 2   a directory with config.json, *.safetensors and tokenizer.json
  baton chat, baton top             in another terminal

several hosts (start them in any order; copy one key file to all, or make one key per process: docs/security.md):
  baton keys cluster.key
  router$   baton router  --node-address tcp://0.0.0.0:5700 --host 0.0.0.0 --keys cluster.key
  host1$    baton prefill --router tcp://ROUTER:5700 --bind-host HOST1 --model DIR --keys cluster.key
  host2$    baton decode  --router tcp://ROUTER:5700 --bind-host HOST2 --model DIR --keys cluster.key

what each process does:
  router    serves HTTP, turns text into tokens and back, chooses the nodes of a request; needs no model, no torch
  prefill   computes the KV pages of a prompt and its first token, and offers the pages
  decode    reserves pages, pulls the prompt's pages from prefill, checks them, and generates the rest

configuration:
  Each flag of `baton COMMAND --help` is also a key of the table [COMMAND] in a TOML file (--config FILE); in the key,
  dashes become underscores. --print-config prints the configuration in effect in this form. A flag wins over the
  environment (BATON_API_KEY, BATON_ADMIN_KEY), the environment over the file, the file over the default.

if something is wrong:
  anything             `baton doctor` checks this host, `baton doctor --cluster` the router and its nodes
  nothing starts       the last line on stderr says why; `baton up` names the log of the process that ended
  it does not answer   GET /ready says what is missing, /debug/nodes lists the nodes, /debug/ledger the owners of pages
  it is slow           `baton top` shows where requests wait, `baton explain` shows one request
  the handoff          GET /debug/handoff?format=text: pages, the fields beside them, bytes per request
  a crash              --log-level debug, and docs/operations.md
"""

_CONFIGS = {  # command (also the name of its TOML table): module and name of its configuration class
    "up": ("deploy.up", "UpConfig"),
    "router": ("router.config", "RouterConfig"),
    "prefill": ("prefill_node.config", "PrefillConfig"),
    "decode": ("decode_node.config", "DecodeConfig"),
    "chat": ("deploy.chat", "ChatConfig"),
    "top": ("deploy.top", "TopConfig"),
    "explain": ("deploy.explain", "ExplainConfig"),
    "doctor": ("deploy.doctor.config", "DoctorConfig"),
    "plan": ("deploy.sizing", "SizingConfig"),
    "bench": ("deploy.bench.config", "BenchConfig"),
}
_PROCESSES = {"router": "router.main", "prefill": "prefill_node.main", "decode": "decode_node.main"}

_EXTRAS = {  # module that may be absent: who needs it, and the extra that brings it
    "torch": ("a node", "node"),
    "numpy": ("a node", "node"),
    "numba": ("a node", "node"),
    "safetensors": ("a node", "node"),
    "rich": ("`baton top`", "terminal"),
}
_LEAVE_AGAIN_S = 0.2

_RID_HELP = "show this request: the x-request-id header of its answer, or `id` in the body (default: list recent ones)"
_COMPARE_HELP = "measure nothing; compare two files that --json wrote"


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Returns its exit status: 0, that of the error (metadata/errors.py), or 130 on Ctrl-C."""
    die_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    if _PROCESSES.keys() & set(argv):
        signal.signal(signal.SIGTERM, _leave)  # until the process serves, and has a handler of its own
    try:
        return _run(argv)
    except BatonError as error:
        if _is_debug(argv):
            raise
        print(f"baton: error: {error}", file=sys.stderr)
        notify(words=f"error: {error}")
        return error.exit_status
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS or _is_debug(argv):
            raise
        who, extra = _EXTRAS[library]
        print(f"baton: error: {who} needs {library}: {install_command(extra)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the error again at its end
        return 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _leave(_number: int, _frame: object) -> None:
    """End a process that serves nothing yet, in order: it holds no request, so it has nothing to finish.

    A library that is being imported may catch the exception. So it is raised again, unless it is under way.
    """
    signal.signal(signal.SIGALRM, _leave)
    signal.setitimer(signal.ITIMER_REAL, _LEAVE_AGAIN_S)
    if not isinstance(sys.exc_info()[1], SystemExit):
        raise SystemExit(0)


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
        if name in argv:  # the flags of other commands are not needed, and importing their classes takes time
            _add_command_flags(name, command)
    word = next((word for word in argv if not word.startswith("-")), None)
    if word is not None and word not in SUMMARIES and not {"-h", "--help"} & set(argv):
        behind = next((each for each in argv if each in SUMMARIES), None)
        if behind is not None:
            parser.error(f"the command stands before its flags: `baton {behind} {argv[0]} ...`")
        clause = COMMANDS.get(word)
        parser.error(f"there is no command {word!r}{nearest(word, SUMMARIES) if clause is None else f'; {clause}'}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        others = [name for name in ("up", *_PROCESSES) if any(each.flag == flag for each in _settings(name).values())]
        parsers[args.command].refuse(unknown[0], [name for name in others if name != args.command])
    for replaced in replaced_flags(argv):
        print(f"baton: warning: {replaced.words}", file=sys.stderr)
    if args.version:
        print(f"baton {_version()}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    return _dispatch(args.command, args)


def _version() -> str:
    from ..metadata.version import package_version

    return package_version()


def _module(name: str) -> Any:
    return import_module(f"..{name}", __package__)


def _config(command: str) -> type:
    module, name = _CONFIGS[command]
    return getattr(_module(module), name)


def _settings(command: str) -> dict[str, Setting]:
    """Return the settings of a command by name. `up` also has the settings of the processes that it starts."""
    if command != "up":
        return by_name(_config(command))
    configs = (_config(name) for name in ("up", *_PROCESSES))
    return by_name(*configs, skip=_module("deploy.up").DECIDED)


def _add_command_flags(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "keys":
        parser.add_argument("file", metavar="FILE", help="write the key pair to this file, which must not exist")
        parser.add_argument(
            "--allow-list",
            metavar="LIST",
            help="add the public key to this allow-list file; make the file if it is missing",
        )
        parser.add_argument(
            "--name",
            help="list the key under this name: the node id, or router, or router-NAME (default: the name of FILE)",
        )
        return
    if name == "explain":
        parser.add_argument("rid", nargs="?", metavar="RID", help=_RID_HELP)
    if name == "bench":
        parser.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), help=_COMPARE_HELP)
    parser.add_argument("--config", metavar="FILE", help=f"read these options from table [{name}] of this TOML file")
    parser.add_argument("--print-config", action="store_true", help="print the configuration in effect and exit")
    for setting in _settings(name).values():
        add_flag(parser, setting)


def _dispatch(name: str, args: argparse.Namespace) -> int:
    if name == "keys":
        return _make_keys(Path(args.file), args.name, args.allow_list)
    tables = read_tables(args.config, {table: _settings(table) for table in _CONFIGS}) if args.config else {}
    if name == "up":
        plan = _module("deploy.up").make_plan(args, tables, os.environ)
        return _print(plan.tables()) if args.print_config else _module("deploy.launcher").run(plan)
    config = resolve(_config(name), args, tables.get(name, {}), os.environ)
    if args.print_config:
        return _print({name: config})
    if name == "explain":
        return _module("deploy.explain").run(config, args.rid)
    if name == "doctor":
        return _module("deploy.doctor.doctor").run(config)
    if name == "bench":
        return _module("deploy.bench.main").run(config, args.compare)
    if name in _PROCESSES:
        return _run_process(name, config)
    return _module(_CONFIGS[name][0]).run(config)


def _run_process(name: str, config: Any) -> int:
    """Run a router or a node in this process. Its log starts here."""
    if name != "router":  # before torch is loaded
        notify("starting")
        checks = _module("engine.checkpoint.model_check")
        (config,) = checks.fetched([config], _say)
        checks.check_model(config)
    # OpenMP threads that spin while they wait take the cores of the other processes on this host. Must be set before
    # torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    process_name = name if name == "router" else _module("engine.startup").node_id(config, name)
    logs = _module("metadata.logs")
    logs.setup_logging(config, process_name)
    logs.log_uncaught()
    return _module(_PROCESSES[name]).run(config)


def _say(text: str) -> None:
    """Print an event of the time before a node's log starts."""
    _module("deploy.terminal").say(text)
    notify("starting", text)


def _print(configs: Mapping[str, Any]) -> int:
    print(print_tables(configs), end="")
    return 0


def _make_keys(file: Path, name: str | None, allow_list: str | None) -> int:
    """Write a key file. Prints the public key as a line for an allow-list to stdout, and everything else to stderr."""
    lists, pairs = _module("metadata.bus.allow_list"), _module("metadata.bus.curve").KeyPair
    name = name or file.stem
    keys = pairs.generate()
    line = lists.line_of(name, keys.public)
    if allow_list is not None:
        lists.with_line(allow_list, line)  # raises before the key is written
    keys.write(file)
    print(f"wrote {file}: it is secret; give it to one process with `--keys {file}`", file=sys.stderr)
    if allow_list is None:
        print("line for an allow-list (not needed if all processes get a copy of this file):", file=sys.stderr)
    else:
        lists.add_line(allow_list, line)
        print(f"added to {allow_list}; give every process a copy of it with --allow-list:", file=sys.stderr)
    print(line, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
