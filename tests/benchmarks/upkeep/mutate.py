"""Count the mutations of a module that its tests notice (with mutmut), and print those that they miss.

    .venv/bin/python -m pip install --target /tmp/mutmut mutmut==3.8.1
    PYTHONPATH=/tmp/mutmut .venv/bin/python tests/benchmarks/upkeep/mutate.py [MODULE ...] [--processes N]

mutmut is not a dependency: it is installed beside the environment. It runs in a copy of the checkout that has the
package's name. mutmut skips decorated functions, so the copy has properties as plain functions.

A mutant that is only slow does not count as noticed. A test may take 15 times as long as without a mutation, plus one
minute; a mutant that takes longer is counted as timed out.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MODULES = [  # each is tested in seconds by the test file of the same name
    "metadata/handoff/tickets.py",
    "metadata/bus/session.py",
    "metadata/handoff/schema/hidden_layout.py",
    "metadata/handoff/schema/schema.py",
    "engine/sampling/batch.py",
    "metadata/wire/protocol.py",
    "router/health/verdicts.py",
    "engine/models/head_file.py",
    "kernels/products/fp8.py",
    "engine/attention/latent_pieces.py",
    "engine/models/mtp.py",
    "engine/sampling/grammar.py",
    "engine/drafters/mtp_layers.py",
]
OUTCOMES = {0: "survived", 1: "killed", 3: "killed", 5: "survived", 33: "survived"} | dict.fromkeys(
    (-24, 24, 36, 152, 255), "timed out"
)
CONFIG = """
[tool.mutmut]
source_paths = ["baton"]
only_mutate = ["baton/{module}"]
pytest_add_cli_args = ["-p", "no:xdist", "-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "fork"
timeout_multiplier = 15.0
timeout_constant = 60.0
use_git_change_detection = false
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)} (default: all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="mutants tested at the same time")
    args = parser.parse_args()
    unknown = set(args.modules) - set(MODULES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: give one of {', '.join(MODULES)}")
    print("| module | mutants | killed | survived | timed out | killed % |\n|---|---|---|---|---|---|")
    survivors: list[str] = []
    for module in args.modules or MODULES:
        with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
            home = Path(directory)
            outcomes = mutate(home, module, args.processes)
            counts = Counter(outcomes.values())
            shares = [counts[name] for name in ("killed", "survived", "timed out")]
            assert sum(shares) == len(outcomes) > 0, counts
            share = f"{100 * shares[0] / len(outcomes):.1f}"
            print(f"| {module} | {len(outcomes)} | {' | '.join(map(str, shares))} | {share} |")
            sys.stdout.flush()
            source = home / "mutants" / "baton" / module
            survivors += [difference(source, name) for name, outcome in outcomes.items() if outcome != "killed"]
    print("", *survivors, sep="\n")


def mutate(home: Path, module: str, num_processes: int) -> dict[str, str]:
    """Return the outcome of each mutant. Ends the program if the tests fail without a mutation."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = home / "baton" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, target)
    path = home / "baton" / module
    path.write_text(without_property_decorators(path.read_text(encoding="utf-8")), encoding="utf-8")
    folder, _, name = module.rpartition("/")
    tests = json.dumps([f"baton/tests/{folder}/test_{name}"])
    (home / "pyproject.toml").write_text(CONFIG.format(module=module, tests=tests))
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(num_processes)]
    ran = subprocess.run(command, cwd=home, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"mutmut failed on {module}:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    results = json.loads((home / "mutants" / "baton" / f"{module}.meta").read_text())["exit_code_by_key"]
    return {name: OUTCOMES.get(code, f"exit code {code}") for name, code in results.items()}


def without_property_decorators(source: str) -> str:
    """Rewrite `@property def x(self): ...` as `def x(self): ...` and `x = property(x)`."""
    lines, tree = source.splitlines(), ast.parse(source)
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    functions = (node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef))
    for function in sorted(functions, key=lambda node: -node.lineno):  # from the last on: line numbers stay as they are
        if [ast.unparse(each) for each in function.decorator_list] == ["property"]:
            assert function.end_lineno is not None
            indent = " " * function.col_offset
            lines.insert(function.end_lineno, f"{indent}{function.name} = property({function.name})")
            del lines[function.decorator_list[0].lineno - 1]
    return "\n".join(lines) + "\n"


def difference(source: Path, name: str) -> str:
    """Return the lines that a mutant changes in its function, as a diff."""
    text = source.read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    mangled = name.rpartition(".")[2]
    stem = mangled.rpartition("__mutmut_")[0]
    bodies = [ast.get_source_segment(text, functions[each]) or "" for each in (f"{stem}__mutmut_orig", mangled)]
    name_only = stem.rpartition("ǁ")[2].removeprefix("x_")
    old, new = (
        body.replace(each, name_only).splitlines()
        for body, each in zip(bodies, (f"{stem}__mutmut_orig", mangled), strict=True)
    )
    changed = [
        line for line in difflib.unified_diff(old, new, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))
    ]
    return "\n".join([f"--- {name.removeprefix('baton.')}", *changed])


if __name__ == "__main__":
    main()
