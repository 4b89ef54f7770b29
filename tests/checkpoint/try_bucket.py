"""Try any bucket by hand: objects, one of several creators, a run that is killed and resumed, and its checkpoints.

    python tests/checkpoint/try_bucket.py az://container/folder

The library of the protocol finds the service as it always does, by its own variables and files. `docs/buckets.md` says
what was tried so. Everything is below a new folder, which is deleted at the end.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crosstrain.utils import storage

ROOT = Path(__file__).parents[2]
WRITTEN = Path(__file__).parent / "format_1"  # a project and its data
DATA = bytes(range(256)) * 65536


def try_objects(root: str) -> None:
    assert storage.listing(root) == {} == storage.files(root)
    with tempfile.TemporaryDirectory() as folder:
        (given := Path(folder, "given")).write_bytes(DATA)
        storage.upload(given, storage.join(root, "a", "x"))
        storage.download(storage.join(root, "a", "x"), Path(folder, "taken"))
        assert Path(folder, "taken").read_bytes() == DATA
    assert storage.listing(root) == {"a": None}
    assert storage.read(storage.join(root, "a", "x"), 300_000, 300_009) == DATA[300_000:300_009]
    storage.rename(storage.join(root, "a"), storage.join(root, "b"))
    assert storage.files(root) == {"b/x": len(DATA)}
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: storage.create(storage.join(root, "lock"), b"%d" % i), range(8)))
    assert won.count(True) == 1, "the service ignores the condition of a put"
    assert storage.read(storage.join(root, "lock")) == b"%d" % won.index(True)
    storage.remove(root)
    assert storage.files(root) == {}


def command(*words: str, machine: Path) -> subprocess.Popen[bytes]:
    """Start a command on a machine, which is a folder with whatever it keeps."""
    environment = os.environ | {"XDG_CACHE_HOME": str(machine), "PYTHONPATH": str(ROOT / "platform")}
    words = (sys.executable, "-m", "crosstrain", *words)
    return subprocess.Popen(words, env=environment, cwd=WRITTEN, start_new_session=True)


def train(run: str, machine: Path) -> subprocess.Popen[bytes]:
    options = "run.save_interval=5", "run.keep_last=100", "run.max_iters=60", f"run.output_dir={run}"
    return command("train", "--cfg-path", "project.yaml", "--options", *options, machine=machine)


def losses(run: str) -> list[tuple[int, float]]:
    rows = map(json.loads, storage.read(storage.join(run, "metrics.jsonl")).splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def saved(run: str) -> list[str]:
    names = storage.files(storage.join(run, "checkpoints"))
    return sorted(name.split("/")[0] for name in names if name.endswith("/manifest.json"))


def try_run(root: str, machines: Path) -> None:
    whole, killed = storage.join(root, "whole"), storage.join(root, "killed")
    assert train(whole, machines / "first").wait() == 0
    for machine, least in (("first", 1), ("first", 4), ("second", 8)):
        running = train(killed, machines / machine)
        while len(saved(killed)) < least and running.poll() is None:
            time.sleep(0.01)
        assert running.poll() is None, "the run ended before it could be killed"
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        print(f"killed on the {machine} machine with {len(saved(killed))} checkpoints", flush=True)
    assert train(killed, machines / "third").wait() == 0
    assert losses(killed) == losses(whole)
    assert saved(killed) == saved(whole)
    assert len(saved(whole)) == 12
    words = "evaluate", "--checkpoint", killed, "--generate", "the", "--max-new-tokens", "4"
    assert command(*words, machine=machines / "fourth").wait() == 0


if __name__ == "__main__":
    folder = storage.join(sys.argv[1], f"try-{uuid.uuid4().hex[:8]}")
    try_objects(folder)
    print("objects are what was written, and one of eight creators won")
    with tempfile.TemporaryDirectory() as temporary:
        try_run(folder, Path(temporary))
    storage.remove(folder)
    print("the killed run has the losses and checkpoints of the whole one, and its last checkpoint speaks")
