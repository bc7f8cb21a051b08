"""bench_all.py, with small programs in place of the measurements."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("bench_all.py")
HEADING = {"date": "2026-01-01 00:00", "device": "G", "torch": "2", "commit": "c1"}
POINT = {"batch": 1, "step_ms": 4.08, "floor_ms": 3.52, "x_floor": 1.16}
REPORT = HEADING | {"model": "8b", "num_layers": 32, "hidden_size": 4096, "checked_tokens": 5, "decode": [POINT]}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_all", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Bench:
    """A set of parts that write given reports to `tmp`."""

    def __init__(self, script: ModuleType, tmp: Path) -> None:
        self.script, self.tmp, self.out = script, tmp, tmp / "out"

    def part(
        self, name: str, report: dict[str, Any], then: str = "", model: str | None = None, num_gpus: int = 1
    ) -> Any:
        """Make a part that writes its report, then does what `then` says, and records that it ran."""
        code = "import sys; path = sys.argv[sys.argv.index('--json') + 1]; "
        code += f"open({str(self.tmp / name)!r}, 'a').write('.'); "
        code += f"open(path, 'w').write({json.dumps(report)!r}); {then}"
        return self.script.Part(name, ["-I", "-S", "-c", code], model, num_gpus)

    def run(self, *parts: Any, again: bool = False, **more: Any) -> list[str]:
        return self.script.measure(parts, self.tmp / "models", self.out, again=again, **more)

    def times(self, name: str) -> int:
        """Return how often a part has run."""
        return len((self.tmp / name).read_text()) if (self.tmp / name).exists() else 0

    def figures(self) -> dict[str, Any]:
        return json.loads((self.out / "figures.json").read_text())


@pytest.fixture
def bench(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(script, "write_gpu_figures", lambda folder, reports, method: None)
    return Bench(script, tmp_path)


def test_a_finished_part_is_not_measured_again(bench: Bench) -> None:
    one, two = bench.part("one", REPORT), bench.part("two", REPORT | {"commit": "c2"})
    assert bench.run(one) == []
    assert bench.run(one, two) == []  # as after a cut: it goes on where it stopped
    assert (bench.times("one"), bench.times("two")) == (1, 1)
    assert set(bench.figures()["parts"]) == {"one", "two"} and bench.figures()["commit"] == "c1, c2"
    assert bench.run(one, again=True) == []
    assert (bench.times("one"), bench.times("two")) == (2, 1)
    assert set(bench.figures()["parts"]) == {"one", "two"}, "the other part's figures stay"


def test_a_part_that_fails_is_named_and_the_others_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    broken = bench.part("broken", REPORT, "sys.exit('a stream is not the planted text')")
    unchecked = bench.part("unchecked", REPORT | {"checked_tokens": 0})
    assert bench.run(broken, unchecked, bench.part("fine", REPORT)) == ["broken", "unchecked"]
    assert set(bench.figures()["parts"]) == {"fine"}
    assert "broken: exit status 1" in capsys.readouterr().out
    assert "not the planted text" in (bench.out / "broken.log").read_text()
    assert bench.run(broken) == ["broken"] and bench.times("broken") == 2, "what failed is tried again"


def test_figures_of_a_part_that_fails_now_are_not_those_of_before(bench: Bench) -> None:
    assert bench.run(bench.part("one", REPORT), bench.part("two", REPORT)) == []
    assert bench.run(bench.part("one", REPORT, "sys.exit(1)"), again=True) == ["one"]
    assert set(bench.figures()["parts"]) == {"two"}


def test_the_tables_are_those_of_all_parts(bench: Bench) -> None:
    moved = HEADING | {"checked_bytes": 9, "devices": ["cuda:0"], "transports": ["cuda"], "page_size": 64}
    row = {"transport": "cuda", "checksums": True, "tokens": 64, "s": 0.00078, "gb_s": 10.8}
    bench.run(bench.part("engine-8b", REPORT), bench.part("handoff", moved | {"handoff": [row]}))
    text = (bench.out / "figures.md").read_text()
    assert text.startswith("device: G\ntorch: 2\ncommit: c1\ndate: 2026-01-01 00:00\n\nengine-8b: ")
    assert "| engine-8b | 1 | 4.08 | 3.52 | 1.16 |" in text
    assert "| handoff | cuda | True | 64 | 0.00078 | 10.8 |" in text


def test_missing_models_are_written_and_complete_ones_are_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models" / "llama-3.1-8b.partial").mkdir(parents=True)  # of a run that was cut off
    made: list[list[str]] = []
    run = bench.script.subprocess.run

    def fake(command: list[str], **more: Any) -> Any:
        if not command[1].endswith("synthetic.py"):
            return run(command, **more)
        made.append(command[2:])
        Path(command[3]).mkdir()
        return run([command[0], "-I", "-S", "-c", f"raise SystemExit({len(made) == 1})"], **more)

    monkeypatch.setattr(bench.script.subprocess, "run", fake)
    parts = [bench.part("one", REPORT, model="8b"), bench.part("two", REPORT, model="8b")]
    assert bench.run(*parts) == ["one"], "it could not be made the first time"
    assert bench.times("one") == 0 and bench.times("two") == 1
    assert bench.run(*parts) == [] and len(made) == 2
    assert made[0][:1] + made[0][2:] == ["llama-3.1-8b", "--planted", "--config-only", "--acceptance", "0.8", "0.2"]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["llama-3.1-8b"]


def test_parts_run_at_the_same_time_on_their_own_gpus(bench: Bench) -> None:
    """Each waits until the other has begun, so it would fail if they ran one after the other."""
    meet = (
        "import os, pathlib, time; own, other = {!r}, {!r}; pathlib.Path(own).write_text(os.environ['"
        "CUDA_VISIBLE_DEVICES']); end = time.monotonic() + 60\n"
        "while not pathlib.Path(other).exists():\n"
        "    assert time.monotonic() < end; time.sleep(0.01)"
    )
    marks = [str(bench.tmp / name) for name in ("mark1", "mark2")]
    parts = [bench.part("one", REPORT, meet.format(*marks)), bench.part("two", REPORT, meet.format(*marks[::-1]))]
    both = bench.part(
        "both",
        REPORT,
        f"import os; open({str(bench.tmp / 'all')!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])",
        None,
        2,
    )
    assert bench.run(both, *parts, gpus=["4", "7"]) == []
    assert (bench.tmp / "all").read_text() == "4,7"
    assert sorted(Path(mark).read_text() for mark in marks) == ["4", "7"]


def test_every_part_is_a_program_of_ours(script: ModuleType) -> None:
    one, two, four = (script.parts(Path("m"), num_gpus) for num_gpus in (1, 2, 4))
    names = [{part.name for part in each} for each in (one, two, four)]
    assert len(names[2]) == len(four) and names[0] < names[1] < names[2]
    assert [part.num_gpus for part in four] == sorted((part.num_gpus for part in four), reverse=True)
    for part in four:
        program = part.command[0]
        assert Path(program).is_file()
        assert (part.model is None) == program.endswith("bench_handoff.py")
    heads = [part.command[part.command.index("--drafter") + 1] for part in one if "--drafter" in part.command]
    assert heads == [f"m/llama-3.1-8b/eagle3-{share}" for share in ("0.8", "0.2", "0.8")]


@pytest.mark.parametrize("ends", ["", "sys.exit(1)"])
def test_the_exit_status_is_1_if_a_part_failed(
    ends: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [bench.part("one", REPORT, ends), bench.part("two", REPORT)]
    monkeypatch.setattr(bench.script, "parts", lambda *_: found)
    monkeypatch.setattr(bench.script, "visible_gpus", lambda: ["0"])
    arguments = ["--models", str(bench.tmp), "--out", str(bench.out), "--only", "one"]
    assert bench.script.main(arguments) == (1 if ends else 0)
    assert ("failed: one" in capsys.readouterr().out) == bool(ends)
    assert bench.times("two") == 0, "it was not asked for"
    with pytest.raises(SystemExit):
        bench.script.main([*arguments, "three"])
