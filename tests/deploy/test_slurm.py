"""The batch script of deploy/slurm, run by bash. Commands of Slurm are stand-ins here, which start the steps on this
host; docs/clusters.md says what was tried with Slurm itself."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from baton.deploy.cli import main

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/baton.sbatch"
ADDRESSES = {"host1": "10.0.0.1", "host2": "10.0.0.2"}
STAND_INS = {
    # writes what it was asked, and runs the step as a process of the job
    "srun": f"""#!{sys.executable}
import json, os, subprocess, sys
flags = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
host = next((flag.split("=")[1] for flag in flags if flag.startswith("--nodelist=")), "host2")
inherited = [name for name in os.environ if name.startswith(("SLURM_GPUS", "SLURM_CPUS", "SLURM_NTASKS"))]
name = next(flag.split("=")[1] for flag in flags if flag.startswith("--job-name="))
os.environ |= {{"SLURMD_NODENAME": host, "STEP": name, "SRUN": json.dumps(sys.argv[1 : len(sys.argv) - len(command)])}}
sys.exit(f"srun also reads {{inherited}}" if inherited else subprocess.call(command))
""",
    # one file per start; it stays until the job drains
    "baton": """#!/bin/bash
if [ "$1" = keys ]; then echo secret > "$2"; exit; fi
file=$JOB/$STEP.$(ls "$JOB" | grep -c "^$STEP\\.")
printf '%s\\0' "$SRUN" "$@" > "$file.part" && mv "$file.part" "$file.start"
if [ "$STEP" = "$REFUSED" ]; then exit 3; fi
echo $$ >> "$JOB/running"
trap 'exit 0' TERM
while :; do sleep 0.02; done
""",
    "scontrol": """#!/bin/bash
case $* in
"show hostnames host[1-2]") printf 'host1\\nhost2\\n' ;;
"-o show node host1") echo "NodeName=host1 CoresPerSocket=1 NodeAddr=10.0.0.1 NodeHostName=host1 Port=1" ;;
"-o show node host2") echo "NodeName=host2 CoresPerSocket=1 NodeAddr=10.0.0.2 NodeHostName=host2 Port=1" ;;
"-o show job 7") echo "JobId=7 PreemptEligibleTime=2026-11-29T21:56:52 PreemptTime=$PREEMPTED" ;;
"requeue 7") echo > "$JOB/requeued" ;;
*) echo "$*" >> "$JOB/unknown" ;;
esac
""",
    "squeue": """#!/bin/bash
[ "$*" = "--steps --noheader --jobs=7 --format=%j" ] || echo "$*" >> "$JOB/unknown"
ls "$JOB" | sed -n 's/\\.start$//p'
""",
    "scancel": """#!/bin/bash
[ "$*" = "--signal=TERM 7" ] || echo "$*" >> "$JOB/unknown"
kill $(cat "$JOB/running")
""",
}


class Job:
    """The script as a running job."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder / "job"
        self.submitted = folder / "submitted"
        commands = folder / "commands"
        for made in (self.folder, self.submitted, commands):
            made.mkdir()
        for name, text in STAND_INS.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_SUBMIT_DIR": str(self.submitted)}
        slurm |= {"SLURM_GPUS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "18", "SLURM_NTASKS": "2"}
        self.environ = {"PATH": f"{commands}:{os.environ['PATH']}", "JOB": str(self.folder), **slurm}
        self.environ |= {"REFUSED": "", "PREEMPTED": "None"}
        self.process = subprocess.Popen(["bash", str(SCRIPT)], env=self.environ | environ, stdout=subprocess.PIPE)

    def wait_for(self, *names: str) -> dict[str, tuple[list[str], list[str]]]:
        """Return the flags of srun and the arguments of `baton` of each step, when the steps named have started."""
        while {path.stem.split(".")[0] for path in self.folder.glob("*.start")} < {*names}:
            assert self.process.poll() is None
            time.sleep(0.02)
        steps = {}
        for path in self.folder.glob("*.start"):
            flags, *arguments = path.read_text().rstrip("\0").split("\0")
            steps[path.stem.split(".")[0]] = (json.loads(flags), arguments)
        return steps

    def signal(self, number: int, *, is_for_steps: bool = False) -> int:
        """Send a signal to the script, as Slurm does (--signal=B:...), or to its four steps. Return the exit status."""
        while len(pids := (self.folder / "running").read_text().split()) < 4:
            time.sleep(0.02)
        for pid in map(int, pids) if is_for_steps else (self.process.pid,):
            os.kill(pid, number)
        self.process.communicate(timeout=60)
        assert not (self.folder / "unknown").exists(), (self.folder / "unknown").read_text()
        return self.process.returncode


def parsed(arguments: list[str]) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as shown:
        assert main([*arguments, "--print-config"]) == 0
    return tomllib.loads(shown.getvalue())[arguments[0]]


def test_each_step_asks_for_what_its_process_needs_and_baton_reads_its_flags(tmp_path: Path) -> None:
    sizes = {"PREFILL": "1", "DECODE": "2", "DECODE_RANKS": "2", "CPUS": "6", "DRAIN_S": "50"}
    job = Job(tmp_path, MODEL="/models/m", REQUEUE="1", **sizes)
    steps = job.wait_for("router-0", "prefill-0", "decode-0", "decode-1")
    read = {name: parsed(arguments) for name, (_, arguments) in steps.items()}
    assert read["router-0"]["node_address"] == "tcp://0.0.0.0:5700"
    assert {each["drain_timeout_s"] for each in read.values()} == {50.0}
    nodes = [each for name, each in read.items() if name != "router-0"]
    assert {each["router"] for each in nodes} == {"tcp://10.0.0.1:5700"}
    assert {each["model"] for each in nodes} == {"/models/m"}
    assert [read[name]["tp"] for name in ("prefill-0", "decode-0", "decode-1")] == [1, 2, 2]
    assert {each["bind_host"] for each in nodes} == {"10.0.0.2"}  # of the host on which the steps run
    assert (Path(read["decode-0"]["keys"])).stat().st_mode & 0o77 == 0
    flags = {name: {*flags} for name, (flags, _) in steps.items()}
    assert {"--gres=none", "--nodelist=host1", "--cpus-per-task=2"} < flags["router-0"]
    assert {"--gpus-per-task=2", "--cpus-per-task=6"} < flags["decode-1"]
    assert (job.submitted / "baton-7/urls").read_text() == "http://10.0.0.1:8000\n"
    assert job.signal(signal.SIGTERM) == 0
    assert not (job.folder / "requeued").exists()


def test_at_the_end_of_its_time_the_job_drains_and_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, DEVICE="cpu", DECODE="2", REQUEUE="1")
    steps = job.wait_for("router-0", "prefill-0", "decode-0", "decode-1")
    assert all("--gres=none" in flags for flags, _ in steps.values())
    assert job.signal(signal.SIGUSR1) == 0
    assert (job.folder / "requeued").exists()


def test_a_job_that_another_one_preempts_drains_and_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, DEVICE="cpu", DECODE="2", REQUEUE="1", PREEMPTED="2026-11-29T22:00:26")
    job.wait_for("router-0", "prefill-0", "decode-0", "decode-1")
    assert job.signal(signal.SIGTERM, is_for_steps=True) == 0
    assert (job.folder / "requeued").exists()


def test_a_process_that_was_refused_does_not_start_again(tmp_path: Path) -> None:
    job = Job(tmp_path, DECODE="3", REFUSED="decode-1")
    job.wait_for("router-0", "prefill-0", "decode-0", "decode-1", "decode-2")
    assert job.signal(signal.SIGTERM) == 0
    assert len([*job.folder.glob("decode-1.*")]) == 1


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is missing")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""
