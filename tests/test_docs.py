"""The pages are true: their tables are whole, what they name exists, and the drawing shows the tree."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from baton.deploy.cli import SUMMARIES, main

ROOT = Path(__file__).parents[1]
PRODUCT = ("decode_node", "deploy", "engine", "kernels", "metadata", "prefill_node", "router")
NOTES = [page for name in PRODUCT for page in sorted((ROOT / name).rglob("README.md")) if "demo" not in page.parts]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy/demo").rglob("*.md"), *NOTES])
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # the change log also names what is gone
WRAPPED = [page for page in PAGES if not page.is_relative_to(ROOT / "deploy/demo")]
ARCHITECTURE = ROOT / "docs/architecture.md"
MAX_COLUMNS = 100
SCRIPTS = [path for folder in ("deploy", "tests") for path in (ROOT / folder).rglob("*.py")]
COMMANDS = tuple(SUMMARIES)
# Of every command; of systemctl, buildah, kubectl, and Slurm's sbatch and scancel.
OTHERS_FLAGS = {"--help", "--now", "--target", "--build-arg", "--from-file", "--from-literal"}
OTHERS_FLAGS |= {"--batch", "--cpus-per-task", "--gpus-per-node", "--nodes", "--signal", "--time"}

_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join((*PRODUCT, 'docs', 'tests'))})/[\w./-]*")
_FLAG = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z0-9]+)*(?![\w-])")
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")

by_page = pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each line with its number, and whether it is code."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        yield number, line, is_code or is_fence or line.startswith("    ")


def _house() -> list[str]:
    """Return the lines of the drawing."""
    drawing = re.search(r"```house\n(.*?)```", ARCHITECTURE.read_text(encoding="utf-8"), re.S)
    assert drawing is not None
    return drawing[1].splitlines()


# Tables


def _tables(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each run of lines outside of code that begin with a bar, with the number of its first line."""
    rows: list[str] = []
    for number, line, is_code in _lines(text + "\n\n"):
        if line.startswith("|") and not is_code:
            rows.append(line.strip())
        elif rows:
            yield number - len(rows), rows
            rows = []


def _num_cells(row: str) -> int:
    return len(re.split(r"(?<!\\)\|", row)) - 2


def _faults(text: str) -> list[str]:
    """Yield faults of tables: a table cut in two by a blank line (its second half has no heading), and rows of another
    width."""
    faults = []
    for first, rows in _tables(text):
        if len(rows) < 2 or not re.fullmatch(r"[|:\- ]+", rows[1]):
            faults.append(f"line {first}: these rows have no heading; a blank line before them cuts their table in two")
            continue
        num_cells = _num_cells(rows[0])
        faults += [
            f"line {number}: {_num_cells(row)} cells; the heading has {num_cells}"
            for number, row in enumerate(rows, first)
            if _num_cells(row) != num_cells
        ]
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_on_a_page_is_whole(page: Path) -> None:
    assert not _faults(page.read_text(encoding="utf-8"))


def test_a_cut_table_is_found() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert _faults(table) == []
    assert _faults(f"```\n{table}\n| 3 | 4 |\n```\n") == []
    assert "line 5" in _faults(f"{table}\n| 3 | 4 |\n| 5 | 6 |\n")[0]
    assert "line 4" in _faults(f"{table}| 3 |\n")[0]


# Prose


@pytest.mark.parametrize("page", WRAPPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    """Tables, code, headings and pictures may be longer."""
    wide = [
        f"{page.name}:{number}"
        for number, line, is_code in _lines(page.read_text(encoding="utf-8"))
        if len(line) > MAX_COLUMNS and not is_code and not line.startswith(("|", "#", "![", "<!--"))
    ]
    assert not wide


# What pages name


@by_page
def test_every_path_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {match.rstrip(".-") for match in _PATH.findall(text)}  # a path's last dot may end a sentence
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


@by_page
def test_links_to_a_section_find_its_heading(page: Path) -> None:
    lost = []
    for target, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        other = (page.parent / target).read_text(encoding="utf-8") if target else page.read_text(encoding="utf-8")
        headings = {line.strip("# ") for _, line, is_code in _lines(other) if line.startswith("#") and not is_code}
        if section not in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}:
            lost.append(f"{target}#{section}")
    assert lost == []


def test_the_entry_page_leads_to_every_page() -> None:
    index = ROOT / "docs/index.md"
    links = {(index.parent / link).resolve() for link in _LINK.findall(index.read_text(encoding="utf-8"))}
    assert set(PAGES) - links == {index, ROOT / "README.md", *NOTES} - links


def test_the_architecture_names_every_room_with_notes() -> None:
    rooms = {str(page.relative_to(ROOT).parent) for page in NOTES}
    named = set(re.findall(r"\(\.\./([\w/]+)/README\.md\)", ARCHITECTURE.read_text(encoding="utf-8")))
    assert rooms == named


@pytest.mark.parametrize("page", NOTES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_notes_name_are_in_their_room(page: Path) -> None:
    named = set(re.findall(r"`(\w+\.py)`", page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (page.parent / name).is_file()] == []


@pytest.fixture(scope="session")
def command_flags() -> dict[str, set[str]]:
    """Return the flags of each `baton` command, as its help lists them."""
    flags = {}
    for command in COMMANDS:
        with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
            main([command, "--help"])
        flags[command] = set(_FLAG.findall(shown.getvalue()))
    return flags


@cache
def _flags_in(path: Path) -> set[str]:
    return set(_FLAG.findall(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", sorted({*TODAY} & {*WRAPPED}), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_on_a_page_exists(page: Path, command_flags: dict[str, set[str]]) -> None:
    known = OTHERS_FLAGS.union(*command_flags.values(), *(_flags_in(path) for path in SCRIPTS))
    assert set(_FLAG.findall(page.read_text(encoding="utf-8"))) <= known


@by_page
def test_every_command_on_a_page_exists(page: Path, command_flags: dict[str, set[str]]) -> None:
    """The test finds the make target, `baton` command, script or module of each command line, with its flags."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    wrong = []
    for number, line, is_code in _lines(page.read_text(encoding="utf-8")):
        code = [line] if is_code else re.findall(r"`([^`]+)`", line)
        for part in (part.split("#")[0] for text in code for part in re.split(r"[;&]|\$ ", text)):
            flags = set(_FLAG.findall(part)) - OTHERS_FLAGS
            if (made := re.match(r"\s*make ([a-z]+)\b", part)) and made[1] not in targets:
                wrong.append(f"{number}: make {made[1]}")
            if ran := re.match(r"\s*(?:\S*/)?baton ([a-z]+)\b", part):
                unknown = flags - command_flags.get(ran[1], set())
                wrong += [f"{number}: baton {ran[1]} {sorted(unknown)}"] if unknown or ran[1] not in COMMANDS else []
            if script := re.search(r"\bpython3? (?:-P )?((?:tests|deploy)/\S+\.py|-m baton\.[\w.]+)", part):
                path = ROOT / (script[1].removeprefix("-m baton.").replace(".", "/").removesuffix("/py") + ".py")
                if not path.is_file() or not flags <= _flags_of(path):
                    wrong.append(f"{number}: {script[1]} {sorted(flags - _flags_of(path)) if path.is_file() else ''}")
    assert not wrong


def _flags_of(path: Path) -> set[str]:
    """Return the flags that a script, or a module of its folder that it imports, declares."""
    return set[str]().union(*(_flags_in(other) for other in path.parent.glob("*.py")))


# The drawing


def test_the_drawing_shows_every_folder() -> None:
    shown = set(re.findall(r"(?<![\w/])((?:\w+/)+)(?!\w)", "\n".join(_house())))
    code = {path.parent for name in PRODUCT for path in (ROOT / name).rglob("*.py")} - {ROOT}
    folders = {f"{folder.relative_to(ROOT)}/" for folder in code}
    assert shown - {"tests/"} == folders


def test_the_drawn_path_is_there_in_order() -> None:
    steps = [re.match(r" *(\d+)  (\S+\.py)  +\w", line) for line in _house() if re.match(r" *\d+  \S+/", line)]
    assert steps and all(steps)
    assert [int(step[1]) for step in steps if step] == list(range(1, len(steps) + 1))
    assert [step[2] for step in steps if step and not (ROOT / step[2]).is_file()] == []


def test_the_boxes_hold_the_steps_of_their_folders() -> None:
    """Every step's number stands in a box."""
    boxes = [line for line in _house() if not re.match(r" *\d+  \S+/", line)]
    numbers: set[int] = set()
    for first, last in re.findall(r"(?<![\w-])(\d+)(?:-(\d+))?(?![\w-])", "\n".join(boxes)):
        numbers |= set(range(int(first), int(last or first) + 1))
    steps = {int(match[1]) for line in _house() if (match := re.match(r" *(\d+)  \S+/", line))}
    assert numbers == steps


@pytest.mark.parametrize("tests", ["quick", "exactness", "other_processor"])
def test_the_tests_of_a_list_are_there(tests: str) -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / f"tests/{tests}.txt").read_text().splitlines()]
    wrong = []
    for line in filter(None, lines):
        path, _, name = line.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not (ROOT / path).exists() or (name and f"def {name.partition('[')[0]}(" not in text):
            wrong.append(line)
    assert wrong == []


def test_commits_that_the_pages_name_are_in_the_history() -> None:
    """A reader looks them up in a clone. Skipped where there is no whole history."""
    git = ["git", "-C", str(ROOT)]
    whole = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if whole.stdout.strip() != "false":
        pytest.skip("no whole history")
    named = {
        match[0]: page.name
        for page in TODAY
        for match in re.finditer(
            r"(?<![\w.#/-])(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,10}(?![\w.-])", page.read_text()
        )
    }
    asked = "".join(f"{commit}^{{commit}}\n" for commit in named)
    check = [*git, "cat-file", "--batch-check=%(objecttype)"]
    said = subprocess.run(check, input=asked, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (
        named
        and [(name, page) for (name, page), what in zip(named.items(), said, strict=True) if what != "commit"] == []
    )
