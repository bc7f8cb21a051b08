"""Build the files of a release from the commit that is checked out: sdist, wheel, bill of materials, checksums.

    python tests/benchmarks/upkeep/distributions.py [OUT]

The same commit gives the same bits in every folder and at every time, with the setuptools of constraints.txt and the
same zlib. Uncommitted changes are not part of the files.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from bill_of_materials import bill_of_materials

ROOT = Path(__file__).parents[3]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the files of a release from the commit that is checked out.")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "dist", help="a folder; a release in it is removed")
    out: Path = parser.parse_args().out.absolute()
    empty(out)
    git = ["git", "-C", str(ROOT)]
    epoch = int(subprocess.run([*git, "log", "-1", "--format=%ct"], stdout=subprocess.PIPE, check=True).stdout)
    commit = subprocess.run([*git, "archive", "HEAD"], stdout=subprocess.PIPE, check=True).stdout
    with TemporaryDirectory() as folder:
        source = Path(folder)
        with tarfile.open(fileobj=BytesIO(commit)) as archive:
            archive.extractall(source, filter="data")
        sdist, wheel = build(source, out, epoch)
        pins = Path(shutil.copy(source / "constraints.txt", out))
        bill = out / sdist.name.replace(".tar.gz", ".cdx.json")
        bill.write_text(bill_of_materials(source, epoch), encoding="utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (sdist, wheel, bill, pins)]
    (out / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    print("".join(sums), end="")


def empty(out: Path) -> None:
    """Make an empty folder, in place of the release that it may hold. Refuses a folder with anything else."""
    if out.exists() and not (out / "SHA256SUMS").exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} holds no release (there is no SHA256SUMS in it): empty it, or name another folder")
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / "SHA256SUMS").touch()  # the folder of a build that was interrupted can be used again


def build(source: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Write the sdist of a source tree to `out`, and the wheel that this sdist gives. Returns their paths. `epoch`: the
    time of all files in them, in seconds since 1970."""
    with TemporaryDirectory() as folder:
        work = Path(folder)
        sdist = out / _run_hook(source, "build_sdist", work, epoch)
        _write_anew(work / sdist.name, sdist, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
        return sdist, out / _run_hook(work / sdist.name.removesuffix(".tar.gz"), "build_wheel", out, epoch)


def _run_hook(source: Path, hook: str, out: Path, epoch: int) -> str:
    """Let setuptools build one distribution, as pip would. Returns the file's name."""
    code = f"import sys; from setuptools.build_meta import {hook}; {hook}(sys.argv[1])"
    before = {*out.iterdir()}
    built = subprocess.run(
        [sys.executable, "-P", "-c", code, out],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        umask=0o022,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        raise SystemExit(f"{hook} failed in {source}:\n{built.stdout}")
    (made,) = {*out.iterdir()} - before
    return made.name


def _write_anew(sdist: Path, path: Path, epoch: int) -> None:
    """Copy an sdist without what setuptools took from this machine: times, owners and modes."""
    with (
        tarfile.open(sdist) as old,
        path.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in old:
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() else 0o644
            new.addfile(entry, old.extractfile(member) if member.isfile() else None)


if __name__ == "__main__":
    main()
