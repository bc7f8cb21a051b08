"""Compare the names that users rely on with their record, docs/stable_names.txt. docs/stability.md says what they are.

    python tests/stable.py            prints what is wrong, and exits with status 1 if something is
    python tests/stable.py --write    adds new names and new defaults to the record; refuses to drop a name

The names are read from the program itself: the table of routes, the types that decode and encode bodies, the settings
of the commands, the metrics. A line of the record is `KIND NAME: DESCRIPTION`. What users send (`field`, `flag`) may
take more kinds of values than before, but no fewer. What they read (`answer`, `json`, `metric`) keeps its type and its
labels, and a route the `key` that it needs. Defaults of `SHARED` settings stay. A name may leave the record if its line
says that it was deprecated in an earlier minor release, and a protocol when an earlier minor release speaks another one
that stays.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec import Struct, structs

from baton.deploy import cli, flags
from baton.deploy.bench.figures import Report
from baton.deploy.doctor.finding import Finding
from baton.metadata.errors import BatonError
from baton.metadata.logs import JsonFormatter
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.router.figures import other_names
from baton.router.figures.metrics import Metrics
from baton.router.http.bodies.fields import Converted, Ignored, Merged, Renamed, rules_of
from baton.router.http.server import errors, openapi
from baton.router.http.server.access import SESSION_HEADERS
from baton.router.http.server.routes import ROUTES

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "stable_names.txt"
COMMAND = "python tests/stable.py --write"
PRODUCT = ("decode_node", "deploy", "engine", "kernels", "metadata", "prefill_node", "router")
INTERNAL = {"BATON_PARENT"}  # environment variables between a launcher and its processes
FOR_DEVELOPERS = {"browser", "test"}  # extras
SHAPE_MAY_CHANGE = ("/admin/", "/debug/", "/live", "/openapi.json")  # answers of these routes
ROUTE_MAY_CHANGE = ("/page/",)
# Flags whose defaults stay: nodes of two releases meet only if these agree, or the text depends on them.
SHARED = (
    "--page-size",
    "--dtype",
    "--kv-dtype",
    "--state-dtype",
    "--quantization",
    "--speculative",
    "--draft-model",
    "--draft-dtype",
    "--draft-steps",
    "--draft-topk",
    "--draft-tokens",
)
# Names without a warning in the program, such as fields of answers: deprecated since which release, and what to use.
DEPRECATED: dict[str, str] = {}  # "answer Usage.old": "deprecated since 0.2: use Usage.new"

_SINCE = re.compile(r"deprecated since (\d+)\.(\d+)")
_VARIABLE = re.compile(r'"(BATON_[A-Z_]+)"')
Names = dict[str, str]  # kind and name -> description


def current_release() -> tuple[int, int]:
    """Return the minor release of this tree, such as (0, 1)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    major, minor, *_ = project["version"].split(".")
    return int(major), int(minor)


def names() -> Names:
    """Return the stable names of the program. A deprecated one is described by its deprecation."""
    found: Names = {}
    for part in (_commands(), _routes(), _metrics(), _others()):
        found.update(part)
    return found | {name: words for name, words in DEPRECATED.items() if name in found}


def _commands() -> Iterator[tuple[str, str]]:
    replaced = {each.old: each for each in flags.REPLACED}
    for command in cli.SUMMARIES:
        yield f"command {command}", ""
        parser = flags.Parser(prog=command, add_help=False)
        cli._add_command_flags(command, parser)
        settings = {} if command == "keys" else cli._settings(command)
        for action in parser._actions:
            flag = action.option_strings[0] if action.option_strings else str(action.metavar)
            kind = getattr(action.type, "__name__", "yes or no" if action.nargs == 0 else "str")
            setting = settings.get(action.dest)
            default = f" = {json.dumps(setting.default)}" if setting is not None else ""
            if row := replaced.get(flag):
                yield f"flag {command} {flag}", _deprecated(row.since, row.new)
                continue
            yield f"flag {command} {flag}", kind + default
            for choice in action.choices or ():
                yield f"flag {command} {flag}={choice}", ""


def _routes() -> Iterator[tuple[str, str]]:
    document = openapi.document(ROUTES)
    schemas = document["components"]["schemas"]
    sent: set[str] = set()
    read: set[str] = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.startswith(ROUTE_MAY_CHANGE):
                continue
            yield f"route {method.upper()} {path}", ""
            for parameter in operation["parameters"]:
                if "name" in parameter and parameter["in"] == "query":
                    yield f"parameter {method.upper()} {path} {parameter['name']}", ""
            _reach(operation.get("requestBody", {}), schemas, sent)
            if not path.startswith(SHAPE_MAY_CHANGE):
                _reach(operation["responses"], schemas, read)
    for route in ROUTES:
        if not route.path.startswith(ROUTE_MAY_CHANGE):
            yield f"key {route.method} {route.template}", route.needs.name.lower().replace("_", " ")
    kinds = {kind.__name__: kind for kind in _structs_of(Struct)}
    for name in sent:
        yield from _fields(name, schemas[name])
        yield from _renamed(kinds[name])
    for name in read - sent:
        yield from _answers("answer", name, schemas[name])
    for name in {*map(str.lower, openapi._HEADERS), *SESSION_HEADERS}:
        yield f"header {name}", ""
    for kind, status in (*errors._STATUSES, (BatonError, 500)):
        yield from _error(status, kind.code)
    for code, status in errors._STATUS_OF_NODE_FAULT.items():
        yield from _error(status, code)


def _error(status: int, code: str) -> Iterator[tuple[str, str]]:
    kind = errors._TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    yield f"error {status}" if status == 400 else f"error {status} {code}", f"type {kind}"


def _structs_of(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield from _structs_of(each)
        yield each


def _fields(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of an object that clients send, with the kinds of values that they take."""
    for field, given in schema.get("properties", {}).items():
        words = given.get("description", "")
        if words.startswith("Not served"):
            continue
        if given.get("deprecated"):
            yield f"field {name}.{field}", words[0].lower() + words[1:]
            continue
        default = f" = {json.dumps(given['default'])}" if "default" in given else ""
        yield f"field {name}.{field}", " or ".join(sorted(_kinds(given, with_values=True))) + default


def _renamed(kind: type[Struct]) -> Iterator[tuple[str, str]]:
    """Yield the fields of other servers that a type takes."""
    for field, rule in rules_of(kind).items():
        match rule:
            case Renamed(to=to, since=None):
                yield f"field {kind.__name__}.{field}", f"as {to}"
            case Converted(to=to):
                yield f"field {kind.__name__}.{field}", f"as {to}"
            case Merged():
                yield f"field {kind.__name__}.{field}", "as fields of the body"
            case Ignored() if field not in {each.encode_name for each in structs.fields(kind)}:
                yield f"field {kind.__name__}.{field}", "no effect"
            case _:
                pass


def _answers(prefix: str, name: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field, given in schema.get("properties", {}).items():
        yield f"{prefix} {name}.{field}", " or ".join(sorted(_kinds(given, with_values=False)))


def _reach(part: Any, schemas: Mapping[str, Any], found: set[str]) -> None:
    """Add the names of all schemas to which a part of the document leads."""
    if isinstance(part, dict):
        name = str(part.get("$ref", "")).removeprefix("#/components/schemas/")
        if name in schemas and name not in found:
            found.add(name)
            _reach(schemas[name], schemas, found)
        for each in part.values():
            _reach(each, schemas, found)
    elif isinstance(part, list):
        for each in part:
            _reach(each, schemas, found)


def _kinds(schema: Mapping[str, Any], *, with_values: bool) -> set[str]:
    """Return the kinds of values that fit a schema: types of JSON, names of objects, and, if `with_values`, the values
    of a field that takes only some."""
    if "$ref" in schema:
        return {schema["$ref"].rsplit("/", 1)[1]}
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return set[str]().union(*(_kinds(each, with_values=with_values) for each in schema[union]))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return {json.dumps(value) if with_values else _JSON_TYPES[type(value)] for value in values}
    if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
        return {f"list of {each}" for each in _kinds(schema["items"], with_values=with_values)}
    return {str(schema.get("type", "any"))}


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _metrics() -> Iterator[tuple[str, str]]:
    labels: dict[str, tuple[str, ...]] = {}
    for kind, name, names_of_labels in _families():
        labels[name] = names_of_labels
        yield f"metric {name}", f"{kind} by {', '.join(names_of_labels)}" if names_of_labels else kind
    for theirs in other_names.VLLM:
        found = sorted((theirs.labels or {})[label] for label in labels[theirs.ours] if label in (theirs.labels or {}))
        yield f"metric {theirs.theirs}", f"by {', '.join(found)}"
    for old, new, since in other_names.REPLACED:
        yield f"metric {old}", _deprecated(since, new)


def _families() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield type, name (of a counter without `_total`) and labels of each metric of a router without nodes."""
    metrics: Any = Metrics()
    nodes: Any = SimpleNamespace(nodes={}, groups={}, histories=())
    metrics.watch_nodes(nodes, lambda: 0)
    metrics.watch_service(nodes, SimpleNamespace(num_waiting_of={}), {}, lambda: True)
    for collector in metrics._registry._collector_to_names:
        if hasattr(collector, "_labelnames"):  # it has no series before its first use
            yield collector._type, collector._name, collector._labelnames
        else:
            for family in collector.collect():
                if not family.name.startswith("process_"):
                    yield family.type, family.name, family._labelnames


def _others() -> Iterator[tuple[str, str]]:
    schemas: Any
    for command, kind in (("bench", Report), ("doctor", Finding)):
        _, schemas = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
        for name, schema in schemas.items():
            yield from _answers(f"json {command}", name, schema)
    record = logging.makeLogRecord({"msg": "admitted", "levelname": "INFO", "rid": "r"})
    for field in json.loads(JsonFormatter("router").format(record)):
        yield f"log {field}", ""
    for status in sorted({0, 130, *(each.exit_status for each in _structs_of(BatonError))}):
        yield f"exit {status}", ""
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            for variable in set(_VARIABLE.findall(path.read_text(encoding="utf-8"))) - INTERNAL:
                yield f"variable {variable}", ""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in project["optional-dependencies"].keys() - FOR_DEVELOPERS:
        yield f"extra {extra}", ""
    for protocol in range(PROTOCOL_MIN, PROTOCOL_MAX + 1):
        yield f"protocol {protocol}", _words(current_release())


def _deprecated(since: str, new: str | None) -> str:
    return f"deprecated since {since}: " + ("leave it out" if new is None else f"use {new}")


def _words(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def read(text: str) -> Names:
    """Return the names of a record."""
    return {name: words for name, _, words in (line.partition(": ") for line in text.splitlines())}


def written(recorded: Names, found: Names) -> str:
    """Return the record of the names that were found. A protocol keeps the release that brought it."""
    kept = {name: words for name, words in recorded.items() if name.startswith("protocol ") and name in found}
    return "".join(f"{name}: {words}\n" if words else f"{name}\n" for name, words in sorted((found | kept).items()))


def faults(recorded: Names, found: Names, release: tuple[int, int]) -> list[str]:
    """Return what a user of the release before would miss: names that are gone, or that mean something else."""
    is_spoken = _has_earlier_protocol(recorded, found, release)
    return [
        f"{name} ({words}) {fault}"
        for name, words in recorded.items()
        if (fault := _fault(name, words, found, release)) is not None
        and not (name.startswith("protocol ") and is_spoken)
    ]


def _fault(name: str, words: str, found: Names, release: tuple[int, int]) -> str | None:
    deprecated = _SINCE.match(words)
    may_go = deprecated is not None and (int(deprecated[1]), int(deprecated[2])) < release
    if name not in found:
        return None if may_go else "is gone; it must work, deprecated, for one minor release (CONTRIBUTING.md)"
    now = found[name]
    if now == words or words == "no effect" or _SINCE.match(now) or may_go or name.startswith("protocol "):
        return None
    if name.startswith(("field ", "flag ")):
        (taken, _, default), (takes, _, new_default) = words.partition(" = "), now.partition(" = ")
        if lost := set(taken.split(" or ")) - set(takes.split(" or ")):
            return f"no longer takes {', '.join(sorted(lost))}"
        if name.startswith("flag ") and name.endswith(SHARED) and default != new_default:
            return f"has the default {new_default}; nodes must share it with those of the release before, so keep it"
        return None
    return f"has changed to {now}; give the new one another name, and keep the old one for a minor release"


def _has_earlier_protocol(recorded: Names, found: Names, release: tuple[int, int]) -> bool:
    """Return whether a protocol that is still spoken came with an earlier minor release."""
    came = [recorded[name] for name in found if name.startswith("protocol ") and name in recorded]
    return any(tuple(map(int, each.split("."))) < release for each in came)


def main(arguments: list[str]) -> int:
    """Compare or write the record. Returns the exit status."""
    before = RECORD.read_text(encoding="utf-8") if RECORD.exists() else ""
    found = names()
    wrong = faults(read(before), found, current_release())
    after = written(read(before), found)
    if not wrong and arguments == ["--write"]:
        RECORD.write_text(after, encoding="utf-8")
    elif not wrong and before != after:
        wrong = [f"{RECORD.relative_to(ROOT)} lacks names or defaults of the program: run `{COMMAND}`"]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
