"""The folder of a run: config.yaml, log.txt, metrics.jsonl, bad_steps.jsonl, profile/, checkpoints/ and tracker files.

Only one run trains in a folder at a time. The run's ID is in `.run_id` and in the checkpoints.

A run in a bucket also has a local folder. All local files except checkpoints are copied to the bucket at intervals.
"""

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
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from crosstrain.checkpoint import writer
from crosstrain.utils import storage
from crosstrain.utils.errors import TrainingError, UserError, os_errors_as, sentence
from crosstrain.utils.files import append, open_regular, read_regular, write_atomically
from crosstrain.utils.logging import TIME_FORMAT, log

if TYPE_CHECKING:  # so that reading a run's folder does not import torch
    from crosstrain.distributed.group import Group

_PATIENCE = 20  # seconds to wait for a killed run to end, or for a file to appear on other machines
_LONGEST_CONFIG = 1 << 20  # bytes
_INTERVAL = 60.0  # seconds between uploads of a run's files to a bucket
_WRITER = ".writer"  # file with the ID of the last process that wrote to a bucket from this folder
_copied: dict[Path, tuple[int, int]] = {}  # file of a run in a bucket -> its mtime and size when it was last copied
RUN_ID = re.compile(r"[0-9a-f]{32}")


class RunFolder:
    """Paths of a run's files. One process locks the folder, and checks during training that the run still owns it."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = storage.local(path).expanduser()
        self.config = path / "config.yaml"
        self.log = path / "log.txt"
        self.metrics = path / "metrics.jsonl"
        self.bad_steps = path / "bad_steps.jsonl"
        self.profile = path / "profile"
        self.checkpoints = path / "checkpoints"
        self._lock = path / ".lock"
        self.address = storage.origin(path) or str(path)
        self._sync: _Sync | None = None
        self.run_id: str | None = None
        self._descriptor: int | None = None  # descriptor of `.lock`; the kernel unlocks the file when the process ends

    def create(self, config: dict[str, Any], newest_run: str | None = None) -> None:
        """Create the folder, lock it for this process, and write the run's ID and config.yaml if they are missing.

        newest_run: the ID in the folder's newest checkpoint, used if the folder has no ID; None: make a new ID. Raises
        UserError if the folder is already locked or cannot be written to.
        """
        with self._written():
            self._hold(_PATIENCE)
            if storage.is_url(self.address):
                self._sync = _Sync(self)
            known = self.read_id()
            self.run_id = known or newest_run or uuid.uuid4().hex
            if known is None or not self.config.exists():
                self.describe(config)

    def describe(self, config: dict[str, Any]) -> None:
        """Write the run's ID, and replace the config.yaml of an earlier start. Raises UserError as `create` does."""
        with self._written():
            if self.read_id() != self.run_id:
                write_atomically(self.path / ".run_id", f"{self.run_id}\n")
            write_atomically(self.config, yaml.safe_dump(config, sort_keys=False))

    def check(self) -> None:
        """Raise UserError unless the folder can be created and written to. Leaves no files behind."""
        if storage.is_url(self.address):
            probe = storage.join(self.address, f".writable-{uuid.uuid4().hex}")  # a unique name
            with os_errors_as(UserError, f"run.output_dir: {self.address} cannot be written to"):
                storage.write(probe, b"")
                replaced = storage.create(probe, b"again")
                storage.remove(probe)
            if replaced:
                raise UserError(
                    f"run.output_dir: the server of {self.address} ignores the condition of a put (If-None-Match), so "
                    f"two runs could write there at once; use a different server or a local folder"
                )
        else:
            with self._written():
                path = self.path.absolute()
                tempfile.TemporaryFile(dir=next(p for p in (path, *path.parents) if os.path.lexists(p))).close()

    def _hold(self, patience: float) -> None:
        """Lock the folder's file `.lock`. Raises UserError if the file is still locked after `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            if _locks(descriptor, fcntl.LOCK_EX) and _is(self._lock, descriptor):  # the file was not renamed meanwhile
                self._descriptor = descriptor
                return
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise UserError(
                    f"run.output_dir: another process is training in {self.path}; choose a different folder"
                )
            time.sleep(0.05)

    def is_held(self) -> bool:
        """Return True if a process is training in the folder.

        Processes on other machines are noticed only if the file system shares locks.
        """
        with suppress(OSError), open_regular(self._lock, follow=False) as file:
            return not _locks(file.fileno(), fcntl.LOCK_SH)
        return False

    def note_end(self, error: Exception, patience: float) -> None:
        """Append the error that ended the run to the run's log, unless the folder is still locked.

        patience: seconds to wait for the processes of a killed worker to end.
        """
        deadline = time.monotonic() + patience
        while (held := self.is_held()) and time.monotonic() < deadline:
            time.sleep(0.25)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = sentence(" ".join(dict.fromkeys((lines[0], lines[-1]))))  # the first line and the error of a traceback
        with suppress(OSError):
            if not held and self.log.is_file():
                append(self.log, f"{time.strftime(TIME_FORMAT)} error: {said}\n")

    def read_config(self) -> str:
        """Return the text of config.yaml, which may be damaged or untrusted. Raises OSError as `read_regular` does."""
        return read_regular(self.config, _LONGEST_CONFIG, follow=False).decode(errors="replace")

    def read_id(self) -> str | None:
        """Return the ID of the run that owns the folder, or None if the folder has no ID."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            text = (self.path / ".run_id").read_text(encoding="ascii").strip()
            return text if RUN_ID.fullmatch(text) else None
        return None

    def _written(self) -> AbstractContextManager[None]:
        return os_errors_as(UserError, f"run.output_dir: {self.path} cannot be written to")

    def check_kept(self) -> None:
        """Raise TrainingError if the folder that this process locked was moved, deleted, or taken over by a new run."""
        with suppress(OSError):  # the next save will fail and report the error
            if self._descriptor is not None and not (
                _is(self._lock, self._descriptor) and self.read_id() == self.run_id
            ):
                raise TrainingError(
                    f"run.output_dir: {self.path} was moved, deleted or taken over by a different run during training, "
                    f"so this run ends; if you moved it to PLACE, the same command with run.output_dir=PLACE resumes "
                    f"from its last checkpoint"
                )

    def check_writer(self) -> None:
        """Raise CheckpointError if this process is no longer the writer of a run in a bucket."""
        writer.check(self.address, (self.path / _WRITER).read_text(encoding="ascii"))

    def copy(self) -> None:
        """Copy changed files, except checkpoints, to the run's bucket."""
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
        """If the run is in a bucket, copy the last changes there, and let other processes write to its folder."""
        if self._sync is not None:
            self._sync.close()

    def release(self) -> None:
        """Unlock the folder before this process ends. The process must not write to the folder afterwards."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def check_shared(self, world: "Group") -> None:
        """Raise UserError on every rank unless all ranks see the folder that rank 0 created. Collective."""
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
        """Wait until a file contains `token`; in a shared folder, this may take seconds. Returns False on timeout."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with suppress(OSError):
                os.listdir(proof.parent)  # `listdir` makes a network file system refresh its cache
                if proof.read_text() == token:
                    return True
            time.sleep(0.2)
        return False

    def set_aside(self) -> Path | None:
        """Rename an earlier run's folder to the first free NAME.1, NAME.2, ... Raises UserError for a folder in use."""
        if storage.is_url(self.address):
            raise UserError(f"--fresh: a folder in a bucket cannot be renamed; choose a new folder, not {self.address}")
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
            self.release()
        return aside


class _Sync:
    """Keeps this process the only writer of a run in a bucket, and copies the run's local files there at intervals."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._url, folder = run, run.address, run.path
        known = folder / _WRITER
        earlier = known.read_text(encoding="ascii") if known.exists() else None
        # If the local folder holds the last writer's ID, that process has ended, and the local files are the newest.
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
                log.warning("%s: the run's files could not be copied there (%s); training continues", self._url, error)
            self._failed = True


def bring(url: str, folder: Path) -> None:
    """Copy the files of a run in a bucket to a local folder, except checkpoints and the files of writers."""
    left = ("checkpoints", ".writers", ".lock", _WRITER)
    names = [name for name in storage.files(url) if name.partition("/")[0] not in left]
    left_out = []
    for name in sorted(names):
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except (OSError, ValueError):
            left_out.append(name)
        else:
            storage.download(storage.join(url, name), folder / name)
    if left_out:
        log.warning(
            "%s: %d object(s) are not copied, because their names are not valid file names here: %r",
            url,
            len(left_out),
            left_out[0][:80],
        )


def _locks(descriptor: int, kind: int) -> bool:
    """Lock a file, if its file system supports that. Returns False if the file is already locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Return True if `path` is the file that is open as `descriptor`."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
