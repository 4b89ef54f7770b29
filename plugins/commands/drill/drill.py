"""Two short runs of a project, one of them with faults."""

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from crosstrain import UserError, find_checkpoint
from crosstrain.checkpoint.digests import digests
from crosstrain.checkpoint.files import Reader

from .faults import FAULTS

_SLOW = re.compile(r"(rank \d+ is a straggler)")
_RESTARTED = re.compile(
    r"^(?!a worker was added)(.*); (?:all ranks restarted \(restart \d+ of \d+\) and continue|\d+ ranks go on) from "
    r"step (\d+)",
    re.MULTILINE,
)
_RANKS = re.compile(r"; (\d+) ranks go on from step")
_PATIENCE = 600.0  # seconds until a run that takes no step is given up
_TIMEOUT = 10  # run.collective_timeout, in seconds: a frozen worker is given up after this time


@dataclass
class Result:
    """One fault and its cost."""

    fault: str
    step: int  # last complete step before the fault
    named: str  # description of the fault in the log; empty if there is none
    repeated: int  # steps that were taken again
    seconds: float  # from the fault until a step beyond `step` was complete


@dataclass
class Drill:
    """Runs of a project in subfolders of `folder`."""

    project: str
    options: list[str]
    workers: int
    folder: Path
    steps: int

    def run(self, faults: list[str], count: int, seed: int) -> list[Result]:
        """Train without faults and with faults; return a result for each fault. Raises UserError if a run fails."""
        if self._start("undisturbed").wait():
            raise UserError(f"the run without faults failed; see {self.folder / 'undisturbed.log'}")
        rng = random.Random(seed)
        width = (self.steps - 1) // count
        planned = [1 + i * width + rng.randrange(width) for i in range(count)]
        process, results = self._start("disturbed"), list[Result]()
        try:
            for number, step in enumerate(planned):
                self._wait(process, lambda step=step: self._step() >= step, f"did not reach step {step}")
                results.append(self._disturb(process, faults[number % len(faults)], rng))
            if process.wait(_PATIENCE):
                raise UserError(f"the run with faults failed; see {self.folder / 'disturbed.log'}")
        finally:
            if process.poll() is None:
                for child in (*psutil.Process(process.pid).children(recursive=True), process):
                    child.kill()
        return results

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = [
            *self.options, f"run.output_dir={self.folder / name}", "run.max_epoch=null", f"run.max_iters={self.steps}",
            f"run.save_interval={max(1, self.steps // 10)}", "run.log_interval=1", "run.max_restarts=1000",
            f"run.collective_timeout={_TIMEOUT}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "crosstrain", "train", "--cfg-path", self.project]
        command += ["--nproc-per-node", str(self.workers), "--options", *options]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _log(self) -> str:
        return (self.folder / "disturbed.log").read_text(errors="replace")

    def _step(self) -> int:
        """Return the last complete step of the run with faults."""
        path = self.folder / "disturbed" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def _wait(self, process: subprocess.Popen[bytes], condition: Callable[[], bool], problem: str) -> None:
        """Wait for a condition. Raises UserError if the run with faults ends before, or if it takes too long."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the run with faults {problem}; see {self.folder / 'disturbed.log'}")
            time.sleep(0.02)

    def _disturb(self, process: subprocess.Popen[bytes], fault: str, rng: random.Random) -> Result:
        def all_train() -> bool:
            """After a fault, the workers start again, or the others first go on without one."""
            ranks = _RANKS.findall(self._log())
            return len(_workers(process.pid)) == self.workers and (not ranks or int(ranks[-1]) == self.workers)

        self._wait(process, all_train, f"ended before the fault {fault}, so it needs more --steps")
        known, length = len(_RESTARTED.findall(self._log())), len(self._log())
        step, begun = self._step(), time.monotonic()
        FAULTS[fault](rng.choice(_workers(process.pid)))
        if fault != "slow":
            problem = f"did not recover from {fault}"
            self._wait(process, lambda: len(_RESTARTED.findall(self._log())) > known, problem)
        self._wait(process, lambda: self._step() > min(step, self.steps - 1), f"did not pass step {step}")
        seconds = time.monotonic() - begun
        if fault == "slow":
            return Result(fault, step, next(iter(_SLOW.findall(self._log()[length:])), ""), 0, seconds)
        named, resumed = _RESTARTED.findall(self._log())[known]
        return Result(fault, step, named, max(0, step - int(resumed)), seconds)

    def differences(self) -> str:
        """Return the differences between the runs, in words; empty if there are none."""
        quiet, disturbed = (_outcome(self.folder / name) for name in ("undisturbed", "disturbed"))
        return ", ".join(key for key in quiet if quiet[key] != disturbed[key])


def _workers(launcher: int) -> list[int]:
    """Return the process IDs of the workers, oldest first."""
    found = []
    for child in psutil.Process(launcher).children():
        with suppress(psutil.Error):  # the process has just ended
            if "spawn_main" in " ".join(child.cmdline()):
                found.append((child.create_time(), child.pid))
    return [pid for _, pid in sorted(found)]


def _outcome(run: Path) -> dict[str, Any]:
    """Return the samples and losses of a run's steps, and the digests of its last checkpoint."""
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    steps = {f"{key} of steps": [row[key] for row in rows] for key in ("samples", "loss")}
    return steps | {f"final {key}": each for key, each in digests(Reader.open(find_checkpoint(str(run)))).items()}


def table(results: list[Result]) -> str:
    """Return the results as text, with a line per fault and a line of totals."""
    lines = [f"{r.fault:<8}{r.step:>5}{r.repeated:>10}{r.seconds:>9.1f}  {r.named or '-'}" for r in results]
    repeated, seconds = sum(r.repeated for r in results), sum(r.seconds for r in results)
    total = f"{len(results)} faults: {repeated} steps repeated, {seconds:.1f} s until the next step"
    return "\n".join(["fault    step  repeated  seconds  named as", *lines, total])
