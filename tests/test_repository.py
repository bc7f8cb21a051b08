"""The rules of the repository: which folder holds what, which imports and calls are allowed, which tests must exist."""

from __future__ import annotations

import ast
import functools
import itertools
import tomllib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
from imports import check_imports

ROOT = Path(__file__).parents[1]
FOLDERS = ["decode_node", "deploy", "engine", "kernels", "metadata", "prefill_node", "router"]
CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

MAY_IMPORT = {  # imports run downwards only
    "deploy": set(FOLDERS),
    "router": {"router", "metadata"},
    "prefill_node": {"prefill_node", "engine", "metadata"},
    "decode_node": {"decode_node", "engine", "metadata"},
    "engine": {"engine", "kernels", "metadata"},  # see ENGINE_READS
    "metadata": {"metadata"},
    "kernels": {"kernels"},
}
# The parts of metadata/ that engine/ may import: schema and wire types, and what every process needs.
ENGINE_READS = {
    *(
        f"baton.metadata.{name}"
        for name in (
            "cache.names",
            "config",
            "errors",
            "estimate",
            "garbage",
            "logs",
            "parent",
            "service_manager",
            "version",
            "wire",
        )
    ),
    *(
        f"baton.metadata.handoff.{name}"
        for name in (
            "descriptor_inbox",
            "memory",
            "pages",
            "ranks.orders",
            "ranks.shards",
            "schema",
        )
    ),
}
# They start a node of either role, so they also open sockets of metadata/bus and the handoff.
ENGINE_STARTUP = {"engine/startup.py", "engine/ranks/handoffs.py"}
NOT_SHIPPED = {"baton.deploy.demo.training"}  # the wheel holds the demo model, not the code that trained it
NO_TORCH = {"router"}  # test_the_router_imports_no_torch holds this for indirect imports too

TEST_FOLDERS = {  # folders of tests/ that mirror no folder of the product
    "benchmarks": "programs that measure, run by hand, and what several of them use",
    "benchmarks/engine_times": "times of the engine in this process, and of two nodes in it",
    "benchmarks/kernel_times": "times of kernels in CUDA graphs",
    "benchmarks/made_models": "checkpoints whose text is known in advance",
    "benchmarks/ranks": "times of ranks, and of the handoff",
    "benchmarks/serving": "times of the router and of the whole system over HTTP",
    "benchmarks/upkeep": "what is run by hand before a release, and the build of its files",
    "chaos": "faults in real processes, and the fault injector",
    "fuzz": "random input to the decoders",
    "gpu": "tests that need a GPU",
    "hosts": "processes on hosts of their own, and faults of the network between them",
    "browser": "the page in a real Chromium",
    "integration": "real processes, started by the command line",
    "metadata/wire/golden": "recorded messages",
    "releases": "earlier versions of Baton",
    "seeds": "one file per invariant that a defect in the field taught",
    "support/checkpoints": "checkpoints and drafters, small or of published shapes",
    "support/clusters": "whole processes, and time limits on a busy machine",
    "support/devices": "kernels and memory of a GPU, and devices in its place",
    "support/fuzz": "hostile messages, and the golden bytes of good ones",
    "support/hosts": "hosts that are namespaces of Linux, and the switch between them",
    "support/nodes": "nodes in the process of a test, and sockets between them",
    "support/oracles": "what the output and the state must be",
    "support/ranks": "ranks of nodes, as threads and as processes",
    "support/suite": "the suite itself: matrices, imports",
    "support/published_templates": "chat templates in the shape of the published ones",
}
_ROOMS = ("", "engine_times", "kernel_times", "made_models", "ranks", "serving", "upkeep")
SHARED = [ROOT / "tests" / name for name in ("support", "chaos")]  # imported by bare names
SHARED += [ROOT / "tests" / "benchmarks" / name for name in _ROOMS]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _imports(path: Path) -> list[tuple[int, str]]:
    """Return every import as (line, absolute dotted name): type-only imports and those inside functions too."""
    package = ["baton", *path.relative_to(ROOT).parent.parts]
    found = []
    for node in _statements(_tree(path).body):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def _statements(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and what is inside them, but for expressions, which are most of a tree."""
    for node in nodes:
        yield node
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, inside, []))


def _import_graph(files: Iterable[Path], packages: Iterable[Path] = ()) -> dict[str, set[str]]:
    """Return the modules that each module imports, by dotted path below ROOT. `packages`: folders on sys.path."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    bare = {path.stem: name for name, path in modules.items() if path.parent in packages}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = graph[name] = set()
        for _, imported in _imports(path):
            full = imported.removeprefix("baton.")
            for wanted in (full, full.rpartition(".")[0], bare.get(imported.split(".")[0])):
                if wanted in modules and wanted != name:
                    found.add(wanted)
                    break
    return graph


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or not."""

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        queue = list(graph[start])
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                queue += graph[name]
        return seen

    reached = {name: reached_from(name) for name in graph}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted((set(circle) for circle in circles if circle), key=sorted)


def test_the_packages_are_the_folders_with_code() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {"baton", *("baton." + ".".join(path.relative_to(ROOT).parent.parts) for path in CODE)}
    folders -= NOT_SHIPPED
    assert sorted(listed) == listed
    assert set(listed) == folders


def test_every_package_but_kernels_has_an_init_that_exports_nothing() -> None:
    for folder in {path.parent for path in CODE if not path.is_relative_to(ROOT / "kernels")}:
        body = _tree(folder / "__init__.py").body
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), folder
    assert not [*(ROOT / "kernels").rglob("__init__.py")], "it would shadow the package `kernels` (STYLE)"


def test_a_room_has_few_files() -> None:
    """A reader finds a file by the names of its rooms."""
    sizes = Counter(path.parent.relative_to(ROOT) for path in CODE if path.name != "__init__.py")
    sizes |= Counter(path.parent.relative_to(ROOT) for path in (ROOT / "tests/support").rglob("*.py"))
    assert {str(room): size for room, size in sizes.items() if size > 20} == {}


def test_programs_find_all_rooms_of_support() -> None:
    """Programs that are run by hand put them on the path themselves."""
    paths = [path for folder in SHARED for path in folder.glob("*.py")]
    assert not [
        _name(path) for path in paths if '/ "support")' in path.read_text().replace('/ "support").glob("*")', "")
    ]


def test_the_root_holds_no_module() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_downwards(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, name in _imports(path):
            parts = name.split(".")
            if parts[0] == "baton" and len(parts) > 1 and parts[1] in FOLDERS and parts[1] not in MAY_IMPORT[folder]:
                wrong.append(f"{_name(path)}:{line} imports {name}")
            if parts[0] == "torch" and folder in NO_TORCH:
                wrong.append(f"{_name(path)}:{line} imports {name}")
    assert not wrong


def test_the_engine_reads_only_schema_and_types_of_metadata() -> None:
    wrong = []
    for path in (ROOT / "engine").rglob("*.py"):
        for line, name in _imports(path):
            is_allowed = any(f"{name}.".startswith(f"{allowed}.") for allowed in ENGINE_READS)
            if name.startswith("baton.metadata.") and not is_allowed and _name(path) not in ENGINE_STARTUP:
                wrong.append(f"{_name(path)}:{line} imports {name}")
    assert not wrong


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not _circles(_import_graph(CODE))
    shared = [path for folder in SHARED for path in sorted(folder.glob("*.py"))]
    assert not _circles(_import_graph(shared, SHARED))


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"d"}}
    assert _circles(graph) == [{"a", "b", "c"}]


def test_the_product_imports_no_test() -> None:
    shared = {path.stem for folder in SHARED for path in folder.glob("*.py")}
    wrong = []
    for path in CODE:
        for line, name in _imports(path):
            if name.startswith("baton.tests") or name.split(".")[0] in {"pytest", "tests", *shared}:
                wrong.append(f"{_name(path)}:{line} imports {name}")
    assert not wrong


def test_benchmarks_name_what_exists() -> None:
    """Nobody notices a name that has moved in a program that people run by hand, until they run it."""
    wrong = []
    for path in sorted((ROOT / "tests" / "benchmarks").rglob("*.py")):
        nodes = list(ast.walk(_tree(path)))
        modules: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "baton":
                for alias in node.names:
                    if _module_file(f"{node.module}.{alias.name}") is not None:
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    elif alias.name not in _names_of(node.module or ""):
                        wrong.append(f"{_name(path)}:{node.lineno} {node.module} has no {alias.name}")
        rebound = {node.id for node in nodes if isinstance(node, ast.Name) and _is_bound(node)}
        rebound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in rebound:
                module = modules.get(node.value.id)
                if module is not None and node.attr not in {*_names_of(module), "__name__", "__file__", "__doc__"}:
                    wrong.append(f"{_name(path)}:{node.lineno} {module} has no {node.attr}")
    assert not wrong


def _is_bound(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _module_file(name: str) -> Path | None:
    """Return the file of a module by its dotted name; None: there is no such module."""
    place = ROOT.joinpath(*name.split(".")[1:])
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((each for each in files if each.exists()), place if place.is_dir() else None)


@functools.cache
def _names_of(module: str) -> set[str]:
    """Return the names that a module has."""
    path = _module_file(module)
    if path is None or path.is_dir():
        return set()
    names: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and _is_bound(node):
            names.add(node.id)
    return names


def test_tests_mirror_the_folders() -> None:
    folders = [path for path in (ROOT / "tests").rglob("*") if path.is_dir() and any(path.glob("*.*"))]
    names = {str(path.relative_to(ROOT / "tests")) for path in folders if path.name != "__pycache__"}
    mirrored = {str(path.parent.relative_to(ROOT)) for path in CODE}
    assert names - mirrored - set(TEST_FOLDERS) == set()
    assert set(TEST_FOLDERS) <= names


def test_every_module_is_tested_in_the_room_of_its_name() -> None:
    """Tests of `router/waiting/queue.py` are in `tests/router/waiting`: a file of that name, or one that imports the
    module. A module of the same folder that such a module imports belongs to the same noun, and needs no file."""
    graph = _import_graph(CODE)
    tested: list[str] = []
    for path in CODE:
        room = ROOT / "tests" / path.relative_to(ROOT).parent
        is_tested = (room / f"test_{path.name}").exists() or "baton." + _dotted(path) in _imported_by_tests_in(room)
        tested += [_dotted(path)] if is_tested else []
    seen = set(tested)
    while tested:
        name = tested.pop()
        beside = {each for each in graph[name] if each.rpartition(".")[0] == name.rpartition(".")[0]} - seen
        seen |= beside
        tested += beside
    assert [_name(path) for path in CODE if path.name != "__init__.py" and _dotted(path) not in seen] == []


@functools.cache
def _imported_by_tests_in(room: Path) -> set[str]:
    """Return the modules and names that test files of this folder import, or the shared modules that they import."""
    imported = {name for path in room.glob("*.py") for _, name in _imports(path)}
    shared = [path for folder in SHARED for path in folder.rglob("*.py") if path.stem in imported]
    imported |= {name for path in shared for _, name in _imports(path)}
    return imported | {name.rpartition(".")[0] for name in imported}


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


_CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "getrusage"}


def test_only_tests_of_time_are_marked_timing() -> None:
    """They read a clock or name a limit in seconds. The mark lets a failed test be repeated; it must hide no race."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(_tree(path)) if "mark.timing" in path.read_text() else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                is_marked = any(
                    ast.unparse(each) == "pytest.mark.timing" for each in getattr(node, "decorator_list", ())
                )
                reads = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)} & _CLOCKS
                limits = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id.endswith("_S")}
                if is_marked and not reads | limits:
                    wrong.append(f"{_name(path)}: {node.name}")
    assert not wrong


_OF_EACH_ROLE = {"Outbox", "Request", "Reservations", "Sequence"}  # the same thing, as router and nodes have it


def test_no_two_public_classes_have_one_name() -> None:
    """One name means one thing in the whole tree."""
    places: dict[str, list[str]] = {}
    for path in CODE:
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "training" not in path.parts:
                places.setdefault(node.name, []).append(_name(path))
    shared = {name: found for name, found in places.items() if len(found) > 1 and name not in _OF_EACH_ROLE}
    assert shared == {}, "give one of them another name"
    assert places.keys() >= _OF_EACH_ROLE


def test_code_imports_relatively() -> None:
    wrong = []
    for path in CODE:
        for node in ast.walk(_tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [
                f"{_name(path)}:{node.lineno} {name}" for name in names if name.split(".")[0] in ("baton", *FOLDERS)
            ]
    assert not wrong


def test_the_router_imports_no_torch() -> None:
    """Imports every module of router/ in a new interpreter."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in CODE if path.is_relative_to(ROOT / "router")]
    modules = ["baton." + ".".join(path.parts) for path in paths if path.name != "__init__"]
    check_imports(modules, {"torch", "numpy", "transformers", "triton", "safetensors", "baton.engine"})


_FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "jsonpickle", "code"}
_FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pty.spawn", "runpy.run_path"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "pandas.read_pickle", "jinja2.Environment"),
    *("torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "subprocess.getoutput"),
}


def test_nothing_can_be_unpickled_or_evaluated() -> None:
    wrong = []
    for path in CODE:
        for line, name in _imports(path):
            if name.split(".")[0] in _FORBIDDEN_MODULES:
                wrong.append(f"{_name(path)}:{line} imports {name}")
        wrong += [f"{_name(path)}:{line} calls {reason}" for line, reason in _forbidden_calls(_tree(path))]
    assert not wrong


def _forbidden_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield calls that could run data as code, whatever name the module has imported the function as."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (reason := _forbidden(node, names)):
            yield node.lineno, reason


def _forbidden(call: ast.Call, names: dict[str, str]) -> str | None:
    first, dot, rest = ast.unparse(call.func).partition(".")
    name = names.get(first, first) + dot + rest
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in _FORBIDDEN_CALLS or name.endswith((".recv_pyobj", ".send_pyobj")):
        return name
    if name == "torch.load" and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if given.get("shell", "False") != "False":
        return f"{name} with a shell"
    if given.get("allow_pickle", "False") != "False":
        return f"{name} with allow_pickle"
    if given.get("trust_remote_code", "False") != "False":
        return f"{name} with trust_remote_code=True"
    return None


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "from torch import load as read\nread(f)",
        "import torch as t\nt.load(f)",
        "import numpy as np\nnp.load(f)",
        "from os import system\nsystem(x)",
        "run(x, shell=True)",
        "run(x, shell=flag)",
        "read(f, allow_pickle=True)",
        "socket.recv_pyobj()",
        "from jinja2 import Environment\nEnvironment()",
    ],
)
def test_the_scan_finds_each_forbidden_call(source: str) -> None:
    assert list(_forbidden_calls(ast.parse(source)))


def test_no_wall_clock_decides_anything_on_a_node() -> None:
    """Leases, heartbeats and deadlines use the monotonic clock, so that setting the time of day changes nothing. KV
    events carry the time of day, since their format has it, and nothing here reads it."""
    wrong = []
    for path in CODE:
        if path.relative_to(ROOT).parts[0] in ("metadata", "prefill_node", "decode_node", "engine", "kernels"):
            calls = [ast.unparse(node.func) for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
            bad = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}.intersection(calls)
            wrong += [f"{_name(path)}: {name}" for name in bad]
    assert wrong == ["metadata/cache/kv_events.py: time.time"]


_KINDS = ((dict, MappingProxyType), (list, tuple), (set, frozenset), (bytearray, bytes), (deque, tuple))
_CHANGES = {name for kind, frozen in _KINDS for name in {*dir(kind)} - {*dir(frozen)} if not name.startswith("_")}
_CHANGES = _CHANGES - {"copy", "maxlen"} | {"next", "setattr", "delattr"}
_VERBS = {"send", "recv", "open", "close", "start", "stop", "take", "give", "put", "write", "free", "release", "forget"}


def _changes_in_asserts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield side effects of asserts, which `python -O` would leave out: names bound, and calls whose name says that
    they change something (a container's mutator, a verb, torch's trailing underscore)."""
    for node in (inner for each in ast.walk(tree) if isinstance(each, ast.Assert) for inner in ast.walk(each)):
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            is_in_place = name.endswith("_") and not name.endswith("__")
            if name in _CHANGES or name.split("_")[0] in _VERBS or is_in_place:
                yield node.lineno, ast.unparse(node)


def test_no_assert_changes_anything() -> None:
    wrong = [f"{_name(path)}:{line} {code}" for path in CODE for line, code in _changes_in_asserts(_tree(path))]
    assert not wrong


@pytest.mark.parametrize(
    ("condition", "is_change"),
    [
        ("not self.queues.pop(group, ())", True),
        ("self.send(message)", True),
        ("(left := count()) == 0", True),
        ("next(ids) == 1", True),
        ("x.add_(1).sum() == 0", True),
        ("len(rows) == 1 and x.is_contiguous(), sorted(rows)", False),
        ("self.queues.get(group) is None", False),
    ],
)
def test_the_scan_finds_each_change_in_an_assert(condition: str, is_change: bool) -> None:
    assert bool(list(_changes_in_asserts(ast.parse(f"assert {condition}")))) == is_change


def test_every_module_has_a_docstring() -> None:
    assert not [_name(path) for path in CODE if path.name != "__init__.py" and not ast.get_docstring(_tree(path))]


def test_every_pin_is_exact_and_portable() -> None:
    parts = [part.splitlines() for part in (ROOT / "constraints.txt").read_text().split("\n\n")]
    pins = [[line for line in part if not line.startswith("#")] for part in parts]
    for part in pins:
        assert part == sorted(part, key=lambda pin: pin.split("==")[0].lower())
    for pin in itertools.chain.from_iterable(pins):
        name, _, version = pin.partition("==")
        assert name, pin
        assert version, pin
        assert "+" not in version, f"{pin}: a local version (such as +cpu) is not on the package index"


CODE_OF_METADATA = [path for path in CODE if path.relative_to(ROOT).parts[0] == "metadata"]
METADATA_ROOMS = {  # what each folder of metadata/ may import from the others
    "wire": {"wire"},
    "bus": {"bus", "wire"},
    "handoff": {"handoff", "bus", "wire"},
}


def _modules_of_metadata() -> dict[str, Path]:
    return {"baton." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CODE_OF_METADATA}


@pytest.mark.parametrize("room", METADATA_ROOMS)
def test_the_rooms_of_metadata_import_downwards(room: str) -> None:
    upwards = [
        f"{_name(path)}:{line} imports {module}"
        for path in CODE_OF_METADATA
        if path.relative_to(ROOT).parts[1] == room
        for line, module in _imports(path)
        if (parts := module.split("."))[:2] == ["baton", "metadata"]
        and parts[2] in METADATA_ROOMS
        and parts[2] not in METADATA_ROOMS[room]
    ]
    assert not upwards, "\n".join(upwards)


def test_no_import_of_metadata_closes_a_circle() -> None:
    """Imports for types alone count as well."""
    modules = _modules_of_metadata()
    imported = {
        name: {
            target
            for _, module in _imports(path)
            for target in (module, module.rpartition(".")[0])
            if target in modules and target != name
        }
        for name, path in modules.items()
    }
    while free := {name for name, targets in imported.items() if not targets}:
        imported = {name: targets - free for name, targets in imported.items() if name not in free}
    assert not imported, f"in circles, or above one: {sorted(imported)}"
