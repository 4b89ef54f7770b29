"""Preparation on a Ray cluster of two nodes, in a network namespace of its own: the same files, whatever is lost.

Ray listens on the machine's addresses whatever it is told, so everything here runs in a namespace with nothing but
loopback: this file runs itself there, with a part's name as its argument.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.prepare.options import DedupOptions, NearOptions, PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.pool import CorpusStage
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare

from conftest import ENVIRONMENT, ROOT, json_lines
from crosstrain.utils.errors import UserError

pytestmark = pytest.mark.slow
STAGES = ["FilterStage", "SignatureStage", "BandStage", "SimilarityStage", "TokenizeStage"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def in_a_namespace(part: str, folder: Path) -> dict[str, Any]:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, `unshare` and `ip` to make a network namespace")
    paths = os.pathsep.join(map(str, (ROOT / "platform", ROOT / "tests")))
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    done = subprocess.run(
        [*alone, sys.executable, __file__, part, str(folder)], capture_output=True, text=True, timeout=280,
        env=ENVIRONMENT | {"PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "seen.json").read_text())


def test_workers_and_a_node_are_lost_and_the_files_are_those_of_one_machine(tmp_path: Path) -> None:
    seen = in_a_namespace("losses", tmp_path)
    assert seen["undisturbed"] == seen["killed in each stage"] == seen["a node removed"] == seen["one machine"]
    assert seen["kills"] == STAGES
    assert seen["nodes"] == [2, 1]


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    seen = in_a_namespace("mistakes", tmp_path)
    assert seen["stage"].endswith("invalid at byte 0") or "is not UTF-8 text" in seen["stage"], seen
    assert seen["poison"].startswith("workers died 4 times over the same part of the input"), seen
    assert seen["folder"].endswith("engine: ray needs a file system that all machines of the cluster see"), seen
    assert seen["address"].startswith("ray_address: no Ray cluster can be joined"), seen


# ---- in the namespace


def corpus(folder: Path) -> PrepareOptions:
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ba", "de", "ki", "lo", "mu") for b in ("n", "r", "s", "t")]
    texts = [" ".join([f"text {i}:", *rng.choices(words, k=60)]) for i in range(3000)]
    texts += [text.replace("ban", "bar", 1) for text in texts[::3]]  # near-duplicates
    source = json_lines(folder / "text.jsonl", texts)
    dedup = DedupOptions(near=NearOptions(threshold=0.7))
    return PrepareOptions(input=str(source), train_tokenizer=300, dedup=dedup)


def workers() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_work"):
                yield int(path.parent.name)
        except OSError:
            continue


def losses(folder: Path) -> dict[str, Any]:
    import ray
    from crosstrain_plugins.builtin.commands.prepare import dedup, reader
    from crosstrain_plugins.builtin.commands.prepare.ray_pool import RayPool
    from ray.cluster_utils import Cluster

    reader.TASK_BYTES, dedup._PAIRS = 50_000, 100  # many items of each stage
    options = corpus(folder)
    prepare(options, folder / "alone", False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    options.engine, run = "ray", RayPool.run
    seen: dict[str, Any] = {"kills": [], "nodes": []}

    def after_the_first_result(act: Callable[[Any], None]) -> None:
        def watched(self: RayPool, stage: Any, items: Any) -> Iterator[Any]:
            for place, result in enumerate(run(self, stage, items)):
                if place == 0:
                    act(stage)
                yield result

        RayPool.run = watched  # type: ignore[method-assign]

    def kill_one(stage: Any) -> None:
        deadline = time.monotonic() + 60
        while (worker := next(workers(), None)) is None:  # none has an item at this moment
            assert time.monotonic() < deadline
        os.kill(worker, signal.SIGKILL)
        seen["kills"].append(type(stage).__name__)

    def remove_node(stage: Any) -> None:
        if type(stage).__name__ == "FilterStage":
            seen["nodes"].append(sum(node["Alive"] for node in ray.nodes()))
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    prepare(options, folder / "undisturbed", False)
    after_the_first_result(kill_one)
    prepare(options, folder / "killed", False)
    after_the_first_result(remove_node)
    options.workers = 2
    prepare(options, folder / "removed", False)
    seen["nodes"].append(sum(node["Alive"] for node in ray.nodes()))
    whole = content(folder / "alone")
    assert len(whole) > 5
    names = {"alone": "one machine", "undisturbed": "undisturbed", "killed": "killed in each stage",
             "removed": "a node removed"}  # fmt: skip
    same = {name: content(folder / made) == whole for made, name in names.items()}
    ray.shutdown()
    cluster.shutdown()
    return seen | same


def mistakes(folder: Path) -> dict[str, Any]:
    import ray
    from crosstrain_plugins.builtin.commands.prepare.ray_pool import RayPool
    from test_ray import Poison  # by a name that workers can import

    seen: dict[str, Any] = {}

    def said(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except UserError as error:
            seen[name] = str(error)

    (folder / "bad.txt").write_bytes(b"\xff\xfe\xfd")
    wrong = PrepareOptions(input=str(folder / "bad.txt"), train_tokenizer=300, engine="ray", ray_address="127.0.0.1:1")
    said("address", lambda: prepare(wrong, folder / "out", False))
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    wrong.ray_address = None
    said("stage", lambda: prepare(wrong, folder / "out", False))

    def run(pool: RayPool) -> None:
        with pool:
            list(pool.run(Poison(), [1, 2]))

    said("poison", lambda: run(RayPool(wrong, folder)))
    (folder / "elsewhere").mkdir()
    unseen = RayPool(wrong, folder / "elsewhere")
    with unseen:
        (folder / "elsewhere").rename(folder / "moved")  # as if it were on a disk of this machine alone
        said("folder", lambda: list(unseen.run(Poison(), [1])))
    ray.shutdown()
    return seen


class Poison(CorpusStage[int, int]):
    """A stage whose worker dies over the item 2."""

    def __call__(self, item: int) -> int:
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item


if __name__ == "__main__":
    _, part, place = sys.argv
    result = {"losses": losses, "mistakes": mistakes}[part](Path(place))
    (Path(place) / "seen.json").write_text(json.dumps(result))
