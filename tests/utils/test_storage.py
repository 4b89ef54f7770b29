"""Objects in a bucket: they are what was written, one of several creators wins, and failures are one sentence."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from crosstrain.utils import storage
from crosstrain.utils.errors import StorageError, UserError
from fixtures_bucket import Bucket, refuse, reset, slow

DATA = bytes(range(256)) * 1024


def test_objects_are_what_was_written(bucket: Bucket, tmp_path: Path) -> None:
    root = storage.join(bucket.url, "run")
    assert storage.listing(root) == {} == storage.files(root)
    storage.write(storage.join(root, "a", "x"), DATA)
    (tmp_path / "y").write_bytes(DATA)
    storage.upload(tmp_path / "y", storage.join(root, "y"))
    assert storage.listing(root) == {"a": None, "y": len(DATA)}
    assert storage.files(root) == {"a/x": len(DATA), "y": len(DATA)}
    storage.download(storage.join(root, "a", "x"), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == DATA == storage.read(storage.join(root, "y"))
    assert storage.size(storage.join(root, "y")) == len(DATA)
    storage.remove(storage.join(root, "a"))
    storage.remove(storage.join(root, "a"))  # nothing there is no mistake
    assert storage.listing(root) == {"y": len(DATA)}
    with pytest.raises(FileNotFoundError):
        storage.read(storage.join(root, "a", "x"))


def test_one_of_several_creators_wins(bucket: Bucket) -> None:
    url = storage.join(bucket.url, "lock")
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda i: storage.create(url, b"%d" % i), range(4)))
    assert won.count(True) == 1
    assert storage.read(url) == b"%d" % won.index(True)


def test_a_folder_is_renamed_with_all_below_it(bucket: Bucket) -> None:
    root = storage.join(bucket.url, "run")
    for name in ("a/x", "a/b/y", "ab"):
        storage.write(storage.join(root, name), name.encode())
    storage.rename(storage.join(root, "a"), storage.join(root, "a.damaged"))
    assert storage.files(root) == {"a.damaged/x": 3, "a.damaged/b/y": 5, "ab": 2}
    assert storage.read(storage.join(root, "a.damaged", "b", "y")) == b"a/b/y"


def test_what_passes_istried_again(bucket: Bucket) -> None:
    url = storage.join(bucket.url, "x")
    with bucket.interfered(refuse(2, "503 Slow Down", "SlowDown", "PUT")):
        storage.write(url, DATA)
    resets = iter([reset, reset])
    with bucket.interfered(lambda environ: next(resets, lambda _: None)(environ)):
        assert storage.read(url) == DATA
    with bucket.interfered(slow(0.2)):
        assert storage.read(url, 256, 512) == DATA[256:512]


def test_what_does_not_pass_is_one_sentence(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    url = storage.join(bucket.url, "x")
    monkeypatch.setattr(storage, "_ATTEMPTS", 1)
    for status, code in (("400 Bad Request", "ExpiredToken"), ("403 Forbidden", "AccessDenied")):
        with (
            bucket.interfered(refuse(100, status, code)),
            pytest.raises(StorageError, match="the credentials were refused, are missing or have expired") as refused,
        ):
            storage.read(url)
        assert "secret" not in str(refused.value)
    with (
        bucket.interfered(refuse(100, "503 Slow Down", "SlowDown")),
        pytest.raises(StorageError, match=r"s3://bucket/x: failed after 1 attempt\(s\) \(The SlowDown message\.\)"),
    ):
        storage.read(url)
    with pytest.raises(StorageError, match="unknown protocol s4"):
        storage.read("s4://bucket/x")
    with pytest.raises(FileNotFoundError):
        storage.write("s3://no-such-bucket/x", b"")


class _Failing(MemoryFileSystem):
    """A service whose errors have a status, as Azure's have, and whose library takes its time to give up."""

    protocol = "failing"
    cachable = False
    status, seconds, attempts = 503, 0.0, 0

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        if not self.status:
            raise ValueError("Must provide an account")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        type(self).attempts += 1
        time.sleep(self.seconds)
        error = RuntimeError("what the service says")
        error.status_code = self.status  # type: ignore[attr-defined]
        raise error


def test_errors_of_other_services_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("failing", f"{__name__}._Failing", clobber=True)
    monkeypatch.setattr(storage, "_PATIENCE", 0.2)
    monkeypatch.setattr(_Failing, "seconds", 0.3)
    for status, kind, words, attempts in (
        (403, StorageError, r"the credentials were refused.* \(what the service says\)", 1),
        (404, FileNotFoundError, "what the service says", 1),
        (503, StorageError, r"failed after 2 attempt\(s\) \(what the service says\)", 2),
        (0, StorageError, r"failing://bucket/x: cannot be opened \(Must provide an account\)", 0),
    ):
        monkeypatch.setattr(_Failing, "status", status)
        monkeypatch.setattr(_Failing, "attempts", 0)
        with pytest.raises(kind, match=words):
            storage.read("failing://bucket/x")
        assert _Failing.attempts == attempts


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(UserError, match=r"needs the package adlfs.*crosstrain\[azure\]"):
        storage.read("az://container/x")
