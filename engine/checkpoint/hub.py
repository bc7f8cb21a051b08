"""Models of the Hugging Face hub: ORG/NAME becomes a snapshot, a directory of the hub's cache on this host.

find            the commit of a revision, and the files of the repository at that commit
fetch_small     config.json, the tokenizer, templates: what is checked before anything large is downloaded
fetch_weights   *.safetensors

huggingface_hub does the requests and keeps the cache; it is imported when a name is given. Its own download begins an
interrupted file anew, and Ctrl-C waits for the files under way. So weights come here by its `http_get`, which can
resume, in threads that end with the process: into a part of a blob, which gets its name when its hash is right.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from ...metadata.errors import BatonError, ConfigError, ModelError
from ...metadata.logs import size_in_words
from ...metadata.version import install_command
from ..drafters.registry import DRAFTERS
from .model_files import did_you_mean, path_of

Say = Callable[[str], None]  # tells the operator one line

_NAME = re.compile(r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/|hf://)?([\w-][\w.-]*/[\w.-]*\w)/?")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of a commit or a small file; of a large file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHIPPED = "|".join(line.shipped_as for line in DRAFTERS.values() if line.shipped_as is not None)
_SMALL = re.compile(
    rf"[^/]+\.(json|jinja)|tiktoken\.model|additional_chat_templates/[^/]+\.jinja|({_SHIPPED})[^/]*/[^/]+\.json"
)
_MAIN = "main"  # the branch of a repository
_CHUNK_BYTES = 1 << 20  # of a file are written at once; an interruption loses fewer
_NUM_THREADS = 8  # files at once
_SAY_EVERY_S = 10.0  # without a terminal
_STOP_S = 2.0  # that threads get to end after an error or Ctrl-C


class File(NamedTuple):
    """A file of a repository."""

    size: int
    etag: str  # names its blob in the cache: the SHA-256 of a large file, the hash that git has of a small one


class HubSnapshot(NamedTuple):
    """A repository at one commit, and its directory on this host."""

    name: str
    revision: str
    commit: str  # that the revision means now
    directory: Path
    files: Mapping[str, File]  # by path in the repository; none if `is_cached`
    why_cached: str = ""  # why the hub could not be asked; "": it was

    @property
    def is_cached(self) -> bool:
        """Whether the snapshot is what the cache had, without asking the hub."""
        return bool(self.why_cached)

    @property
    def words(self) -> str:
        return f"{self.name} at commit {self.commit[:12]}"

    def size(self, paths: Iterable[str]) -> int:
        """Return the bytes of these files."""
        return sum(self.files[path].size for path in paths)


def repository(model: str | None) -> str | None:
    """Return the name of the repository that `model` means; None for a path. What exists on this host wins.
    Raises ModelError."""
    if model is None or path_of(model).exists():
        return None
    match = _NAME.fullmatch(model)
    return None if match is None else match[1]


def commit_of(model_dir: Path) -> str:
    """Return the commit of a snapshot's directory; "" for any other directory."""
    model_dir = model_dir.resolve()
    is_snapshot = model_dir.parent.name == "snapshots" and _HASH.fullmatch(model_dir.name)
    return model_dir.name if is_snapshot else ""


def name_of(model_dir: Path) -> str:
    """Return the name under which a model is served: ORG/NAME for a snapshot, else the name of the directory."""
    model_dir = model_dir.resolve()
    kept_as = model_dir.parent.parent.name.split("--")
    return "/".join(kept_as[1:]) if commit_of(model_dir) and kept_as[0] == "models" else model_dir.name


def find(model: str, name: str, revision: str | None, say: Say) -> HubSnapshot:
    """Return the snapshot of `revision` of the repository `name`, which the operator called `model`. If the hub cannot
    be asked, the cache answers. Raises ModelError or ConfigError, saying what to do."""
    hub = _library(name)
    try:
        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
        files = {each.rfilename: _file(each) for each in info.siblings or ()}
        if not _HASH.fullmatch(str(info.sha)):
            raise ValueError(f"its commit is {info.sha!r}")
    except _faults() as error:
        if _has_answered(error):
            raise _refusal(error, name, revision, did_you_mean(Path(model))) from None
        return _cached(model, name, revision, _why_silent(error), say)
    return HubSnapshot(name, revision or _MAIN, info.sha, _storage(name) / "snapshots" / info.sha, files)


def _file(listed: Any) -> File:
    """Return a file as the hub lists it. Raises ValueError if its blob cannot be named after it."""
    etag, form = (listed.blob_id, _HASH) if listed.lfs is None else (listed.lfs.sha256, _SHA256)
    if not isinstance(listed.size, int) or listed.size < 0 or not form.fullmatch(str(etag)):
        raise ValueError(f"{listed.rfilename} has size {listed.size} and hash {etag!r}")
    return File(listed.size, etag)


def fetch_small(snapshot: HubSnapshot) -> None:
    """Download what Baton reads beside the weights. Raises as `find`."""
    _link(snapshot, [path for path in snapshot.files if _SMALL.fullmatch(path)])


def small_files(model: str, say: Say) -> str:
    """Return the directory with all but the weights of a repository; `model` itself if it names none. Raises as
    `find`."""
    name = repository(model)
    if name is None:
        return model
    snapshot = find(model, name, None, say)
    fetch_small(snapshot)
    return str(snapshot.directory)


def fetch_weights(snapshot: HubSnapshot, paths: Sequence[str], say: Say) -> None:
    """Download these files, after saying what and how much; on from where the last start was interrupted. The cache
    then knows the commit of the revision. Raises as `find`, also if the disk has no room."""
    if snapshot.is_cached:
        return
    storage = _storage(snapshot.name)
    try:
        if not all((snapshot.directory / path).exists() for path in paths):
            with _alone(snapshot, storage / ".baton.lock", say):
                _download(snapshot, paths, storage / "blobs", say)
                _link(snapshot, paths)
    except OSError as error:
        raise _refusal(error, snapshot.name, snapshot.revision) from None
    ref = storage / "refs" / snapshot.revision
    with suppress(OSError):  # the cache may be read-only
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(snapshot.commit)  # for a start that cannot ask the hub


@contextmanager
def _alone(snapshot: HubSnapshot, path: Path, say: Say) -> Iterator[None]:
    """Wait until no other process of this host downloads the repository."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process downloads {snapshot.name}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _library(name: str) -> Any:
    """Return huggingface_hub, which then sends no telemetry. Raises ConfigError if it is not installed."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read when it is imported
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # another protocol, which cannot resume
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError:
        raise ConfigError(
            f"{name} is no directory here, and to download it from the Hugging Face hub Baton needs huggingface_hub: "
            f"{install_command('hub')}, or give a directory"
        ) from None
    if urlsplit(constants.ENDPOINT).username is not None:
        raise ConfigError("HF_ENDPOINT holds a password, which logs would show: give the hub's token by HF_TOKEN")
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    return huggingface_hub


def _storage(name: str) -> Path:
    """Return the repository's directory in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute() / f"models--{name.replace('/', '--')}"


def _cached(model: str, name: str, revision: str | None, why: str, say: Say) -> HubSnapshot:
    """Return the snapshot that the cache has of a revision. `why`: the hub was not asked."""
    storage = _storage(name)
    ref = storage / "refs" / (revision or _MAIN)
    commit = ref.read_text().strip() if ref.is_file() else revision or ""
    directory = storage / "snapshots" / commit
    if not commit or not directory.is_dir():
        what = name if revision is None else f"revision {revision} of {name}"
        raise ModelError(
            f"{what} is not in the cache ({storage.parent}), and {why}{did_you_mean(Path(model))}; name another hub by "
            "HF_ENDPOINT, or give a directory"
        )
    say(f"{name}: {why}; taking commit {commit[:12]} from the cache")
    return HubSnapshot(name, revision or _MAIN, commit, directory, {}, why)


def _link(snapshot: HubSnapshot, paths: Iterable[str]) -> None:
    """Have the library put files into the snapshot's directory; it downloads those of which the cache has no blob."""
    missing = [path for path in paths if not (snapshot.directory / path).exists()]
    if not missing:
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    patterns = [re.sub(r"([*?[])", r"[\1]", path) for path in missing]
    try:
        with disable_progress_bars():
            snapshot_download(snapshot.name, revision=snapshot.commit, allow_patterns=patterns)
    except _faults() as error:
        raise _refusal(error, snapshot.name, snapshot.commit) from None


def _download(snapshot: HubSnapshot, paths: Sequence[str], blobs: Path, say: Say) -> None:
    """Download the files of which the cache has no blob. Raises BatonError."""
    paths = [path for path in paths if not (blobs / snapshot.files[path].etag).exists()]
    if not paths:
        return
    sizes = {path: snapshot.files[path].size for path in paths}
    here = {path: _size(_part(blobs, snapshot.files[path])) for path in paths}
    left = sum(sizes.values()) - sum(here.values())
    files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
    partly = f", {size_in_words(sum(here.values()))} of it is here already" if any(here.values()) else ""
    say(f"downloading {snapshot.words}: {files}, {size_in_words(sum(sizes.values()))}{partly}, to {blobs.parent}")
    free = shutil.disk_usage(blobs).free
    if free < left:
        raise ConfigError(
            f"{snapshot.name} needs {size_in_words(left)} in {blobs.parent.parent}, which has {size_in_words(free)} "
            "free: make room, or set HF_HOME to a directory on a larger disk"
        )
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    for path in paths:
        todo.put(path)
    with closing(_Meter(snapshot.name, sum(sizes.values()), sum(here.values()), say)) as meter:

        def work() -> None:
            with suppress(queue.Empty):
                while not meter.is_stopped:
                    path = todo.get_nowait()
                    try:
                        _fetch(snapshot, path, blobs, meter)
                        done.put(None)
                    except Exception as error:
                        done.put(error)

        count = min(_NUM_THREADS, len(paths))
        threads = [threading.Thread(target=work, name="download", daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for _ in paths:
                error = done.get()
                if error is not None:
                    raise _refusal(error, snapshot.name, snapshot.commit) if isinstance(error, _faults()) else error
        except KeyboardInterrupt:
            meter.close()
            say(f"stopped; the next start takes the download of {snapshot.name} up where it ended")
            raise
        finally:
            _end(threads, meter)


def _end(threads: Sequence[threading.Thread], meter: _Meter) -> None:
    """Let no thread append to a part any longer, since another process may. One that waits for the server is left."""
    meter.stop()
    deadline = time.monotonic() + _STOP_S
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _fetch(snapshot: HubSnapshot, path: str, blobs: Path, meter: _Meter) -> None:
    """Download one file, on from the part that is here."""
    from huggingface_hub import file_download
    from huggingface_hub.utils import build_hf_headers

    size, etag = snapshot.files[path]
    part = _part(blobs, snapshot.files[path])
    if _size(part) > size:
        part.unlink()
    url = file_download.hf_hub_url(snapshot.name, path, revision=snapshot.commit)
    with _Limited(part, size) as file:
        file_download.http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=build_hf_headers(),
            expected_size=size,
            tqdm_class=cast(Any, lambda **_: nullcontext(meter)),
        )
    digest = hashlib.sha256() if _SHA256.fullmatch(etag) else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with part.open("rb") as file:
        found = hashlib.file_digest(file, lambda: digest).hexdigest()
    if found != etag:
        part.unlink()
        raise ModelError(f"{path} of {snapshot.words} arrived damaged (hash {found}, not {etag}); start again")
    part.rename(blobs / etag)


def _part(blobs: Path, file: File) -> Path:
    return blobs / f"{file.etag}.baton.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _Limited(io.BufferedWriter):
    """A file to append to that takes at most `size` bytes: a server may send without an end."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._path, self._size = path, size

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._size:
            self._path.unlink()
            raise ValueError(f"it sends more than the {self._size:,} bytes that it lists for a file")
        num_bytes = super().write(data)
        self.flush()  # what a buffer holds would be written when the file is closed, after the download was stopped
        return num_bytes


class _Stopped(Exception):
    """The download was stopped."""


class _Meter:
    """Progress of a download of several files: the library's bar on a terminal, else a line every ten seconds. The
    library counts the bytes of each file here before it writes them, so this is also where a download is stopped."""

    def __init__(self, name: str, total: int, here: int, say: Say) -> None:
        from huggingface_hub.utils import tqdm

        self._name, self._total, self._done, self._say = name, total, here, say
        self._said_at = time.monotonic()
        self._lock = threading.Lock()
        self.is_stopped = False
        self._bar = tqdm(desc=name, total=total, initial=here, unit="B", unit_scale=True, disable=None)

    def close(self) -> None:
        self._bar.close()

    def stop(self) -> None:
        """Let every further `update` raise _Stopped."""
        with self._lock:
            self.is_stopped = True

    def update(self, num_bytes: float | None = 1) -> None:
        """Count bytes of one file; fewer than none if the server sends the file from its beginning."""
        with self._lock:
            if self.is_stopped:
                raise _Stopped
            self._done += int(num_bytes or 0)
            self._bar.update(num_bytes)
            now = time.monotonic()
            if not sys.stderr.isatty() and now - self._said_at >= _SAY_EVERY_S:
                self._said_at = now
                self._say(f"{self._name}: {size_in_words(self._done)} of {size_in_words(self._total)} are here")


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _faults() -> tuple[type[Exception], ...]:
    """Return the types of errors that requests and files raise."""
    from huggingface_hub import errors

    return (errors.HTTPError, OSError, ValueError, BatonError)  # pyright: ignore[reportPrivateImportUsage]


def _has_answered(error: Exception) -> bool:
    """Return whether a hub answered, and so decided."""
    status = _status(error)
    return isinstance(error, ValueError) if status is None else status < 500


def _why_silent(error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids asking the hub"
    status = _status(error)
    return f"{constants.ENDPOINT} " + (
        f"cannot be reached ({_first_line(error)})" if status is None else f"answers {status}"
    )


def _refusal(error: Exception, name: str, revision: str | None, hint: str = "") -> BatonError:
    """Return an error that names the problem and the remedy in one sentence. `hint`: a clause about a directory or
    repository that the operator may have meant."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, BatonError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(
            f"the disk of {constants.HF_HUB_CACHE} is full: make room, or set HF_HOME to a directory on a larger disk; "
            f"the next start takes the download of {name} up where it ended"
        )
    if isinstance(error, GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its terms on {constants.ENDPOINT}/{name}, then set HF_TOKEN to a token of the "
            "account that did"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{name} has no revision {revision}: give --revision a branch, a tag or a whole commit")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"{name} is no directory here, and {constants.ENDPOINT} has no such repository, or it is private and "
            f"HF_TOKEN does not open it{hint}"
        )
    if isinstance(error, HFValidationError):
        return ModelError(f"{name} is no directory here, and no name that a repository can have{hint}")
    if _status(error) == 401:
        return ModelError(f"{constants.ENDPOINT} does not accept the token of HF_TOKEN (or of `hf auth login`)")
    if isinstance(error, PermissionError):
        return ConfigError(f"{error.filename} cannot be written: set HF_HOME to a directory of this user")
    if _has_answered(error):
        what = f"answers {_status(error)}" if _status(error) else f"does not answer as a hub ({error})"
        return ModelError(f"{constants.ENDPOINT} {what} for {name}")
    return ModelError(
        f"the download of {name} from {constants.ENDPOINT} broke off ({_first_line(error)}); the next start takes it "
        "up where it ended"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
