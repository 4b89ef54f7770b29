"""Preparation on two Ray nodes of one core against one process of one core, the same files.

    unshare -n sh -c 'ip link set lo up && python benchmarks/corpus_on_ray.py'

Ray listens on the machine's addresses, so run it in a network namespace, as above. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else other programs come first
}  # fmt: skip

import ray
from crosstrain_plugins.builtin.commands.prepare.options import DedupOptions, NearOptions, PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from ray.cluster_utils import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="of text")
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as folder:
        source, rng = Path(folder, "text.jsonl"), random.Random(0)
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(20_000)]
        with open(source, "w") as file:
            while file.tell() < megabytes << 20:
                file.write(json.dumps({"text": " ".join(rng.choices(words, k=400))}) + "\n")
        small = Path(folder, "small.jsonl")
        small.write_text("".join(source.read_text().splitlines(keepends=True)[:200]))
        prepare(PrepareOptions(input=str(small), train_tokenizer=4000), Path(folder, "small"), False)
        options = PrepareOptions(
            input=str(source), tokenizer=str(Path(folder, "small", "tokenizer")), workers=1,
            dedup=DedupOptions(near=NearOptions()),
        )  # fmt: skip
        os.sched_setaffinity(0, {0})
        began = time.perf_counter()
        prepare(options, Path(folder, "one"), False)
        one = time.perf_counter() - began
        os.sched_setaffinity(0, range(os.cpu_count() or 1))

        began = time.perf_counter()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        start = time.perf_counter() - began
        options.engine, options.workers = "ray", 2
        began = time.perf_counter()
        prepare(options, Path(folder, "two"), False)
        two = time.perf_counter() - began
        same = Path(folder, "one/tokens.bin").read_bytes() == Path(folder, "two/tokens.bin").read_bytes()
        load = os.getloadavg()[0]
        print(f"one process {one:.1f} s, two nodes {two:.1f} s: {one / two:.2f}x; equal: {same}; cluster {start:.1f} s;"
              f" load {load:.1f}")  # fmt: skip
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
