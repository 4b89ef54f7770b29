"""The folder of a run: config.yaml, log.txt, metrics.jsonl, bad_steps.jsonl, profile/, checkpoints/, and what
trackers keep there. One run trains in it at a time; `.run_id` names the run, and so do its checkpoints.

The folder of a run in a bucket is a local one, whose files, except checkpoints, are copied there at intervals.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout

from crosstrain.checkpoint import writer
from crosstrain.utils import storage
from crosstrain.utils.errors import TrainingError, UserError, os_errors_as, sentence
from crosstrain.utils.files import append, open_regular, read_regular, write_atomically
from crosstrain.utils.logging import TIME_FORMAT, log

if TYPE_CHECKING:  # reading a run's folder needs no torch
    from crosstrain.distributed.group import Group

_PATIENCE = 20  # seconds that a run which was just killed may take to be gone, or a file to be seen elsewhere
_LONGEST_CONFIG = 1 << 20  # bytes
_INTERVAL = 60.0  # seconds between two copies of a run's files to a bucket
_WRITER = ".writer"  # file with the id of the last process that wrote to a bucket from this folder
_copied: dict[Path, tuple[int, int]] = {}  # file of a run in a bucket -> time and size when it was copied there
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class RunFolder:
    """Paths of a run's files. One process holds the folder, and makes sure while it trains that it stays the run's."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = storage.local(path).expanduser()
        self.config = path / "config.yaml"
        self.log = path / "log.txt"
        self.metrics = path / "metrics.jsonl"
        self.bad_steps = path / "bad_steps.jsonl"
        self.profile = path / "profile"
        self.checkpoints = path / "checkpoints"
        self.address = storage.origin(path) or str(path)
        self._sync: _Sync | None = None
        self.run_id: str | None = None
        self._held = ExitStack()  # lock and descriptor; released when the process ends, however it ends
        self._descriptor: int | None = None  # of the folder that is held, wherever it is moved to
        self._lock: FileLock | None = None
        self._lock_file: os.stat_result | None = None
        self._config: dict[str, Any] = {}

    def create(self, config: dict[str, Any], newest_run: str | None = None) -> None:
        """Make the folder, hold it for this process, and write its id and config.yaml if they are not there.

        A folder without an id takes `newest_run`, the id in its newest checkpoint, or a new one. Raises UserError where
        another process holds it, or it cannot be written to.
        """
        self._config = config
        with self._written():
            self._hold(_PATIENCE)
            if storage.is_url(self.address):
                self._sync = _Sync(self)
            known = self.read_id()
            self.run_id = known or newest_run or uuid.uuid4().hex
            if known is None or not self.config.exists():
                self.describe()

    def describe(self) -> None:
        """Write the run's id, and config.yaml anew, which an earlier start has left. Raises UserError as `create`."""
        with self._written():
            if self.read_id() != self.run_id:
                write_atomically(self.path / ".run_id", f"{self.run_id}\n")
            write_atomically(self.config, yaml.safe_dump(self._config, sort_keys=False))

    def check(self) -> None:
        """Raise UserError where the folder could not be made or written to; leaves nothing behind."""
        if storage.is_url(self.address):
            probe = storage.join(self.address, f".writable-{uuid.uuid4().hex}")  # which no other start removes
            try:
                storage.write(probe, b"")
                replaced = storage.create(probe, b"again")
                storage.remove(probe)
            except FileNotFoundError as error:
                raise UserError(f"run.output_dir: {self.address} cannot be written to ({error})") from None
            if replaced:
                raise UserError(
                    f"run.output_dir: the server of {self.address} ignores the condition of a put (If-None-Match), so "
                    f"two runs could write there at once; use another, or a disk"
                )
            return
        with self._written():
            path = self.path.absolute()
            tempfile.TemporaryFile(dir=next(p for p in (path, *path.parents) if os.path.lexists(p))).close()

    def _hold(self, patience: float) -> None:
        """Take the locks; raises UserError where another process has one.

        The folder itself is locked, too, as somebody may delete `.lock`.
        """
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as held:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                if self._descriptor is not None and os.path.sameopenfile(self._descriptor, descriptor):
                    os.dup2(self._descriptor, descriptor)  # which shares the lock that this process has
                held.callback(os.close, descriptor)
                try:
                    held.enter_context((lock := FileLock(self.path / ".lock")).acquire(timeout=patience))
                    if not _locks(descriptor, fcntl.LOCK_EX):
                        raise Timeout(str(self.path))
                except Timeout:
                    raise UserError(
                        f"run.output_dir: another process is training in {self.path}; choose another folder"
                    ) from None
                if _is(self.path, os.fstat(descriptor)):  # not renamed meanwhile
                    self._held.close()
                    self._held, self._lock = held.pop_all(), lock
                    self._descriptor, self._lock_file = descriptor, os.stat(self.path / ".lock")
                    return

    def is_held(self) -> bool:
        """Return whether a process trains in the folder, as far as its file system tells of other machines."""
        with suppress(OSError), open_regular(self.path / ".lock", follow=False) as file:
            if not _locks(file.fileno(), fcntl.LOCK_SH):
                return True
        with suppress(OSError), ExitStack() as opened:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, folder)
            return not _locks(folder, fcntl.LOCK_SH)
        return False

    def note_end(self, error: Exception, patience: float) -> None:
        """Append the error that ended the run to its log, unless another process holds the folder.

        patience: seconds that processes of a killed worker are given to end.
        """
        deadline = time.monotonic() + patience
        while (held := self.is_held()) and time.monotonic() < deadline:
            time.sleep(0.25)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = sentence(" ".join(dict.fromkeys((lines[0], lines[-1]))))  # of a traceback: whose it is, and the error
        with suppress(OSError):
            if not held and self.log.is_file():
                append(self.log, f"{time.strftime(TIME_FORMAT)} error: {said}\n")

    def read_config(self) -> str:
        """Return the text of config.yaml, which may be damaged or another's. Raises OSError as `read_regular`."""
        return read_regular(self.config, _LONGEST_CONFIG, follow=False).decode(errors="replace")

    def read_id(self) -> str | None:
        """Read the id of the run that the folder belongs to; None where it has none."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            text = (self.path / ".run_id").read_text(encoding="ascii").strip()
            return text if _RUN_ID.fullmatch(text) else None
        return None

    def _written(self) -> AbstractContextManager[None]:
        return os_errors_as(UserError, f"run.output_dir: {self.path} cannot be written to")

    def keep(self) -> bool:
        """Make sure that the next writes reach this run's folder. A deleted one is made again, and True is returned.

        Raises TrainingError where it was moved, or where a different run has taken its place.
        """
        assert self._descriptor is not None
        held = os.fstat(self._descriptor)
        try:
            stays = _is(self.path, held)
            made_again = not (stays and _is(self.path / ".lock", self._lock_file))
            if made_again and (stays or held.st_nlink == 0):  # a deleted folder has no link
                self._hold(0)
                stays = True
            if stays and (found := self.read_id()) in (None, self.run_id):
                if found is None or made_again:
                    self.describe()
                return made_again
        except OSError:  # saving will fail and say why
            return False
        except UserError:  # a process of a different run holds it
            pass
        raise TrainingError(
            f"run.output_dir: {self.path} was moved, or taken by another run, while it trained there, so it ends; "
            f"if you moved it to PLACE, the same command with run.output_dir=PLACE goes on from its last checkpoint"
        )

    def check_writer(self) -> None:
        """Raise CheckpointError where another process has become the writer of a run in a bucket."""
        writer.check(self.address, (self.path / _WRITER).read_text(encoding="ascii"))

    def copy(self) -> None:
        """Copy files that have changed, except checkpoints, to a run's bucket."""
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path)
            if name.parts[0] == "checkpoints" or (name.name.startswith(".") and name.name != ".run_id"):
                continue
            with suppress(FileNotFoundError):
                now = path.stat()
                if path.is_file() and _copied.get(path) != (state := (now.st_mtime_ns, now.st_size)):
                    storage.upload(path, storage.join(self.address, *name.parts))
                    _copied[path] = state

    def close(self) -> None:
        """Copy the last changes to the bucket, if there is one, and let others write there."""
        if self._sync is not None:
            self._sync.close()

    def release(self) -> None:
        """Let other processes take the folder before this one ends, which writes nothing more there."""
        if self._lock is not None and self._descriptor is not None:
            self._lock.release()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def check_shared(self, world: Group) -> None:
        """Raise UserError, on every rank, unless each sees the folder that rank 0 has made. Collective."""
        if world.size == 1 or storage.is_url(self.address):
            return
        proof, token = self.path / ".shared", world.broadcast(uuid.uuid4().hex)
        if world.rank == 0:
            with self._written():
                proof.write_text(token)
        blind = world.all_gather(None if self._holds(proof, token) else socket.gethostname())
        if world.rank == 0:
            proof.unlink(missing_ok=True)
        if hosts := sorted({host for host in blind if host}):
            raise UserError(
                f"run.output_dir: {self.path.absolute()} on {', '.join(hosts[:4])} is not the folder that rank 0 "
                f"writes to; put it on a file system that all nodes share"
            )

    @staticmethod
    def _holds(proof: Path, token: str) -> bool:
        """Wait for a file to hold `token`, which other machines may see seconds later. Returns False after that."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with suppress(OSError):
                os.listdir(proof.parent)  # has a network's file system look again
                if proof.read_text() == token:
                    return True
            time.sleep(0.2)
        return False

    def set_aside(self) -> Path | None:
        """Rename an earlier run's folder to the first free NAME.1, NAME.2, ...; UserError where it is in use."""
        if storage.is_url(self.address):
            raise UserError(f"--fresh: a folder in a bucket cannot be renamed; choose another than {self.address}")
        if not self.path.exists():
            return None
        names = (self.path.with_name(f"{self.path.name}.{number}") for number in count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        try:
            self._hold(_PATIENCE)
            os.rename(self.path, aside)
        except OSError as error:
            raise UserError(f"--fresh: {self.path} cannot be renamed to {aside} ({error.strerror})") from None
        finally:
            self._held.close()
        return aside


class _Sync:
    """Copying of a run's files, from a local folder that this process holds, to a bucket that it alone writes to."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._url, folder = run, run.address, run.path
        known = folder / _WRITER
        earlier = known.read_text(encoding="ascii") if known.exists() else None
        # Whose id stands in the folder that this process holds was killed, and the folder has its latest files.
        self._writer = writer.Writer.claim(run.address, killed=earlier)
        if self._writer.before != earlier or earlier is None:
            for path in folder.iterdir():
                if path.name != ".lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            bring(run.address, folder)
        write_atomically(known, self._writer.id)
        self._failed, self._over = False, threading.Event()
        self._thread = threading.Thread(target=self._renew, name="bucket", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        copied = time.monotonic()
        while not self._over.wait(writer.RENEWAL):
            self._try(self._writer.renew)
            if time.monotonic() - copied >= _INTERVAL:
                self._try(self._run.copy)
                copied = time.monotonic()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._try(self._run.copy)
        self._try(lambda: self._writer.renew(ended=True))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failed = False
        except (UserError, OSError) as error:
            if not self._failed:
                log.warning("%s: the run's files could not be copied there (%s); training goes on", self._url, error)
            self._failed = True


def bring(url: str, folder: Path) -> None:
    """Copy the files of a run in a bucket, except checkpoints and what belongs to its writers, to a local folder."""
    names = list[str]()
    for top, size in storage.listing(url).items():
        if top not in ("checkpoints", ".writers", ".lock", _WRITER):
            names += [top] if size is not None else [f"{top}/{n}" for n in storage.files(storage.join(url, top))]
    also_folders = {str(folder) for name in names for folder in Path(name).parents}
    possible = [
        name for name in names
        if name not in also_folders and "\0" not in name and max(map(len, os.fsencode(name).split(b"/"))) <= 255
    ]  # fmt: skip
    if left_out := sorted({*names} - {*possible}):
        log.warning(
            "%s: %d object(s) are left out, as no file here can have such a name: %r", url, len(left_out),
            left_out[0][:80],
        )  # fmt: skip
    for name in possible:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        storage.download(storage.join(url, name), folder / name)


def _locks(descriptor: int, kind: int) -> bool:
    """Lock a file or a folder, if its file system can; returns False where another process has the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:  # NFS locks files only
        return not isinstance(error, BlockingIOError)
    return True


def _is(path: Path, known: os.stat_result | None) -> bool:
    """Return True where `path` is this very file or folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return known is not None and os.path.samestat(os.stat(path), known)
    return False
