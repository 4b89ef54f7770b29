"""Functions of strangers' data in processes with limits: results, errors, and every way to go too far."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from crosstrain.utils import limited_process
from crosstrain.utils.errors import DataError
from crosstrain.utils.limited_process import LimitedProcess, LimitError, TooLate


def work(asked: tuple[str, Any]) -> Any:
    kind, given = asked
    if kind == "process":
        return os.getpid()
    if kind == "data error":
        raise DataError(given)
    if kind == "error":
        raise KeyError(given)
    if kind == "panic":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(length=0)
        return tokenizer.encode("abc").ids
    if kind == "abort":  # Rust's answer where no memory is left
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 10_000)] * 5)
        return tokenizer.encode("a").ids
    if kind == "garbage":
        gc.collect()
    if kind in ("memory", "garbage"):
        return len(bytes(given))
    while kind == "endless":
        pass
    if kind == "once" and not Path(given).exists():
        Path(given).touch()
        time.sleep(60)
    while kind == "asleep":
        time.sleep(60)
    return given


def process(**limits: Any) -> LimitedProcess:
    return LimitedProcess(work, "the work", **limits)


def test_results_and_errors_come_from_one_other_process() -> None:
    limited = process()
    first = limited(("process", None))
    assert first != os.getpid()
    with pytest.raises(DataError, match=r"^no data$"):
        limited(("data error", "no data"))
    with pytest.raises(LimitError, match=r"^the work failed \('x'\)$"):
        limited(("error", "x"))
    with pytest.raises(LimitError, match=r"the work failed .*chunk size must be non-zero"):
        limited(("panic", None))
    assert limited(("text", "naïve")) == "naïve"
    assert limited(("process", None)) == first
    limited.close()


@pytest.mark.parametrize(("kind", "given", "said"), [
    ("abort", None, "crashed or used too much memory"), ("memory", 1 << 40, "MemoryError"),
    ("endless", None, r"took more than 0\.2 s of CPU time"),
])  # fmt: skip
def test_what_goes_too_far_is_one_error(kind: str, given: Any, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    limited = process(seconds=5.0 if kind == "abort" else 0.2)
    with pytest.raises(LimitError, match=rf"the work.*{said}"):
        limited((kind, given))
    assert limited(("text", "again")) == "again"
    assert capfd.readouterr() == ("", "")
    limited.close()


def test_memory_that_the_caller_has_freed_counts() -> None:
    held = [np.empty(1 << 24, np.uint8) for _ in range(40)]  # 16 MiB each
    del held[0]  # from now on pieces of this size come from the heap
    held += [np.empty(1 << 24, np.uint8) for _ in range(40)]
    above = np.empty(1 << 20, np.uint8)  # keeps the heap from shrinking
    unreachable = [np.empty(1 << 28, np.uint8)]
    unreachable.append(unreachable)
    del held, unreachable
    limited = process(memory=1 << 26)
    with pytest.raises(LimitError, match="MemoryError"):
        limited(("garbage", 1 << 28))
    assert above.size
    limited.close()


def test_limits_grow_with_the_text() -> None:
    limited = process(memory=1 << 26)
    with pytest.raises(LimitError, match="MemoryError"):
        limited(("memory", 1 << 28))
    assert limited(("memory", 1 << 28), size=1 << 20) == 1 << 28
    limited.close()


def test_an_urgent_call_ends_by_the_clock() -> None:
    limited, started = process(seconds=0.3, urgent=True), time.monotonic()
    with pytest.raises(TooLate, match=r"the work did not finish within 0\.3 s"):
        limited(("asleep", None))
    assert time.monotonic() - started < 20
    limited.close()


def test_a_signal_to_stop_the_run_does_not_fail_a_call(tmp_path: Path) -> None:
    limited = process()
    first = limited(("process", None))

    def stop() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        os.kill(first, signal.SIGTERM)  # a launcher sends it to all processes of a run

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert limited(("once", tmp_path / "began")) == tmp_path / "began"
    stopping.join()
    assert limited(("process", None)) != first
    limited.close()


def test_the_process_starts_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "_IDLE", 0.05)
    limited = process()
    first = limited(("process", None))
    deadline = time.monotonic() + 30
    while Path(f"/proc/{first}/stat").exists() and ") Z" not in Path(f"/proc/{first}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert limited(("process", None)) != first
    limited.close()


def test_it_ends_with_its_caller_and_keeps_nothing_of_it_open() -> None:
    reading, writing = os.pipe()
    if (caller := os.fork()) == 0:
        os.close(reading)
        os.write(writing, str(process()(("process", None))).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(caller, 0)
    assert int(os.read(reading, 100)) > 0
    assert os.read(reading, 100) == b""  # the end of the pipe: no process holds it
    os.close(reading)


def test_a_fork_of_the_caller_has_a_process_of_its_own() -> None:
    limited = process()
    first = limited(("process", None))
    reading, writing = os.pipe()
    if (caller := os.fork()) == 0:
        os.write(writing, str(limited(("process", None))).encode())
        limited.close()
        os._exit(0)
    os.waitpid(caller, 0)
    assert int(os.read(reading, 100)) != first
    assert limited(("process", None)) == first
    limited.close()
