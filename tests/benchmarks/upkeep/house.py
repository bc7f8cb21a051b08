"""Count the files, lines, statements and words of a checkout, its import circles, its long functions, and what a
newcomer has to read.

    python tests/benchmarks/upkeep/house.py [CHECKOUT] [--lists PAGE]

The reading lists are those of docs/architecture.md of the checkout, or of PAGE: the steps of its ```house block, and
each ```files block. For an older commit, unpack it first: git archive COMMIT | tar -x -C DIR
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parents[3]
PRODUCT = ("decode_node", "deploy", "engine", "kernels", "metadata", "prefill_node", "router")
MAX_COLUMNS = 100
MAX_LINES = 60  # of a function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=HERE)
    parser.add_argument(
        "--lists", type=Path, metavar="PAGE", help="a page with reading lists (default: the checkout's)"
    )
    args = parser.parse_args()
    root: Path = args.checkout
    code = sorted(path for name in PRODUCT for path in (root / name).rglob("*.py"))
    tests = sorted((root / "tests").rglob("*.py"))
    for name, paths in _by_folder(root, code):
        print(_row(name, paths))
    print(_row("all without tests", code))
    print(_row("router/ with its folders", [path for path in code if path.relative_to(root).parts[0] == "router"]))
    print(_row("tests/benchmarks", [path for path in tests if "benchmarks" in path.parts]))
    print(_row("tests", tests))
    for name, paths in (("without tests", code), ("tests", tests)):
        print(f"statements, {name}: {sum(map(num_statements, paths)):,}")
    pages = sorted([*root.glob("*.md"), *(root / "docs").glob("*.md")])
    print(f"words in {len(pages)} pages (*.md, docs/*.md): {sum(len(_text(page).split()) for page in pages):,}")
    for name, paths in (("code without tests", code), ("pages, tables left out", pages)):
        lines = [line for path in paths for line in _text(path).splitlines() if not line.startswith("|")]
        wide = sum(len(line) > MAX_COLUMNS for line in lines)
        print(f"lines over {MAX_COLUMNS} columns, {name}: {wide:,} of {len(lines):,} ({100 * wide / len(lines):.1f} %)")
    circles = import_circles(root, code)
    print(f"import circles, type-only imports included: {len(circles)} ({sum(map(len, circles))} files)")
    for circle in circles:
        print(f"    {' '.join(circle)}")
    for num_lines, name in sorted(long_functions(root, code), reverse=True):
        print(f"function of {num_lines} lines: {name}")
    print_lists(root, args.lists or root / "docs/architecture.md")


def print_lists(root: Path, page: Path) -> None:
    """Print how long each reading list of a page is."""
    for name, files in reading_lists(_text(page)):
        print(_row(f"to read: {name}", [root / file for file in files]))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _row(name: str, paths: list[Path]) -> str:
    missing = [str(path) for path in paths if not path.is_file()]
    lines = sum(len(_text(path).splitlines()) for path in paths if path.is_file())
    return f"{name:<52} {len(paths):>4} files {lines:>7,} lines" + (f"   missing: {missing}" if missing else "")


def _by_folder(root: Path, code: list[Path]) -> Iterator[tuple[str, list[Path]]]:
    for folder in sorted({path.parent for path in code}):
        yield str(folder.relative_to(root)), [path for path in code if path.parent == folder]


def reading_lists(page: str) -> Iterator[tuple[str, list[str]]]:
    """The life of a request, as the drawing's steps, and each list of files with its name."""
    if drawing := re.search(r"```house\n(.*?)```", page, re.S):
        yield "life of a request", re.findall(r"^ *\d+  (\S+\.py)", drawing[1], re.M)
    for name, files in re.findall(r"```files (.*?)\n(.*?)```", page, re.S):
        yield name, files.split()


def num_statements(path: Path) -> int:
    """Count the statements of a file's syntax tree: joined lines count as before, docstrings as one each."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(_text(path))))


def long_functions(root: Path, code: Iterable[Path]) -> Iterator[tuple[int, str]]:
    """Yield the functions of more than MAX_LINES lines: their lines, docstring included, and where they are."""
    for path in code:
        for node in ast.walk(ast.parse(_text(path))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_LINES:
                    yield num_lines, f"{path.relative_to(root)}:{node.lineno} {node.name}"


def import_circles(root: Path, code: list[Path]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in code}
    imports = {name: set(_imports(name, path, modules)) - {name} for name, path in modules.items()}
    reach = {name: _reach(name, imports) for name in imports}
    circles = {frozenset({name, *(other for other in reach[name] if name in reach[other])}) for name in imports}
    return sorted(sorted(circle) for circle in circles if len(circle) > 1)


def _reach(name: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        if (other := waiting.pop()) not in seen:
            seen.add(other)
            waiting += imports[other]
    return seen


def _imports(name: str, path: Path, modules: Iterable[str]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(_text(path))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
        target = ".".join(part for part in base if part)
        for alias in node.names:
            full = f"{target}.{alias.name}" if target else alias.name
            if full in modules or target in modules:
                yield full if full in modules else target


if __name__ == "__main__":
    main()
