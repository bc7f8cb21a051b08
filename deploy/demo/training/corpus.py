"""The training text of the demo model: Python's own standard library.

Files are named by their path below the library folder ("json/decoder.py"). A file belongs to the held-out set if the
hash of its name falls below a fraction, so the split is the same on every machine and survives added or removed files.
Neither the tokenizer nor the model ever sees a held-out file.

Short conversations are made of the training files: the docstring is the user's message, its function is the answer.
They teach the end-of-turn token and make the chat endpoint answer with code.
"""

import ast
import hashlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

END_OF_TEXT = "<|endoftext|>"  # between documents; also the first token of a prompt that starts a document
PAD = "<|pad|>"
SYSTEM, USER, ASSISTANT, END_OF_TURN = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN)  # in the order of their ids

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
MAX_TURNS = 6
MAX_ANSWER_LINES = 60


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the library: its name below the library folder, and its text with '\\n' line ends."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8."""
        return len(self.text.encode())

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite rather than to the library proper."""
        return any(part.startswith(("test", "idle_test")) for part in PurePosixPath(self.name).parts)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training files and held-out files, disjoint by name and by content."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(source: Path, held_out_fraction: float, max_files: int | None = None) -> Corpus:
    """Read the library below `source`; `max_files` keeps that many, by hash. FileNotFoundError if there are none."""
    files = sorted(_unique(_read_files(source)), key=lambda file: _fraction(f"order:{file.name}"))[:max_files]
    if not files:
        raise FileNotFoundError(f"no Python source below {source}")
    held_out = tuple(file for file in files if is_held_out(file.name, held_out_fraction))
    train = tuple(file for file in files if not is_held_out(file.name, held_out_fraction))
    return Corpus(train, held_out)


def is_held_out(name: str, held_out_fraction: float) -> bool:
    """Return whether the file of this name is kept out of all training."""
    return _fraction(name) < held_out_fraction


def conversations(files: tuple[SourceFile, ...]) -> list[str]:
    """Chat documents made of the documented functions of `files`, up to MAX_TURNS turns each, in source order."""
    documents: list[str] = []
    for file in files:
        if file.is_test:
            continue
        module_doc, turns = _documented_functions(file)
        for start in range(0, len(turns), MAX_TURNS):
            messages = [("system", module_doc)] if module_doc and (start // MAX_TURNS) % 2 == 0 else []
            for request, answer in turns[start : start + MAX_TURNS]:
                messages += [("user", request), ("assistant", answer)]
            documents.append(render_chat(messages))
    return documents


def render_chat(messages: list[tuple[str, str]]) -> str:
    """Return the text that the chat template makes of (role, content) pairs, without the leading end-of-text token."""
    return "".join(f"<|{role}|>{content}{END_OF_TURN}" for role, content in messages)


def _read_files(source: Path) -> Iterator[SourceFile]:
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source)
        # _sysconfigdata_* and config-* describe the machine the interpreter was built on.
        machine = name.name.startswith("_sysconfigdata") or name.parts[0].startswith("config-")
        if machine or SKIPPED_FOLDERS.intersection(name.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a few tests are deliberately not UTF-8
        is_table = "generated from" in text and "gencodec.py" in text  # encodings/: 256-entry tables
        if text.strip() and "\0" not in text and not is_table:
            yield SourceFile(name.as_posix(), text.replace("\r\n", "\n").replace("\r", "\n"))


def _unique(files: Iterator[SourceFile]) -> Iterator[SourceFile]:
    """Drop every file whose text, white space aside, was seen before."""
    seen: set[bytes] = set()
    for file in files:
        digest = hashlib.sha256("".join(file.text.split()).encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield file


def _fraction(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _documented_functions(file: SourceFile) -> tuple[str, list[tuple[str, str]]]:
    """The module's one-line description, and (request, answer) for each short function with a docstring."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return "", []
    lines = file.text.split("\n")
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    turns: list[tuple[str, str]] = []
    for node in sorted(functions, key=lambda node: node.lineno):
        summary = _summary(ast.get_docstring(node))
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        last = node.end_lineno or node.lineno
        if summary and last - first <= MAX_ANSWER_LINES:
            answer = textwrap.dedent("\n".join(lines[first:last]))
            turns.append((_request(node.name, summary), answer))
    return _summary(ast.get_docstring(module)), turns


def _summary(docstring: str | None) -> str:
    """The docstring's first paragraph on one line; empty if there is none."""
    return " ".join((docstring or "").strip().split("\n\n")[0].split())


def _request(name: str, summary: str) -> str:
    """Return a question for this function. The hash of its name and summary chooses the wording."""
    lowered = summary[0].lower() + summary[1:]
    wordings = (
        summary,
        f"Write a function to {lowered}",
        f"Write a Python function `{name}`: {lowered}",
        f"{name}: {summary}",
    )
    return wordings[int(_fraction(f"{name}:{summary}") * len(wordings))]
