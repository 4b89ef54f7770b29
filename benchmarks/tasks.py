"""Measure log-likelihood requests of lm-evaluation-harness: in batches, one by one, and dealt over two ranks.

    python benchmarks/tasks.py [--rounds 3]

Needs lm_eval. 400 requests with contexts of 20 to 200 tokens and continuations of 1 to 8 tokens, on a GPT-2 of 6 layers
of width 384; every rank has one thread. The numbers of one and of two ranks are compared, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import ROOT, Sizes, child, ratio, rounds, table, write_project

sys.path.insert(0, str(ROOT / "tests"))

REQUESTS = 400


def requests() -> list[tuple[None, list[int], list[int]]]:
    import numpy as np

    rng = np.random.default_rng(0)
    return [
        (
            None,
            rng.integers(0, 50000, rng.integers(20, 201)).tolist(),
            rng.integers(0, 50000, rng.integers(1, 9)).tolist(),
        )
        for _ in range(REQUESTS)
    ]


def measure(project: str, tokens: int) -> tuple[float, list[Any]]:
    """Return the seconds for all requests, and the results."""
    import torch
    from crosstrain_plugins.builtin.evaluations.tasks import lm_eval_harness as harness

    from crosstrain.config.load import load_config
    from crosstrain.engine.build import build_model, make_runner

    torch.set_num_threads(1)
    harness._TOKENS = tokens
    config = load_config(project)
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, None, for_training=False)
    model = harness.HarnessModel(runner, SimpleNamespace(eos_token_id=0), encode=lambda _: [], quiet=True)
    asked = requests()
    with runner.evaluating():
        model._loglikelihood_tokens(asked[:20])
        begun = time.perf_counter()
        found = model._loglikelihood_tokens(asked)
        seconds = time.perf_counter() - begun
    runner.close()
    return seconds, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("one by one", "batches", "two ranks"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        from fixtures_ranks import run_ranks

        with tempfile.TemporaryDirectory() as folder:
            run = {
                "runner": "ddp",
                "max_iters": 1,
                "micro_batch_size": 1,
                "output_dir": f"{folder}/out",
                "device": "cpu",
            }
            project = str(write_project(Path(folder), Sizes(), run))
            ranks = 2 if asked.side == "two ranks" else 1
            found = run_ranks(ranks, measure, project, 1 if asked.side == "one by one" else 8192, seconds=600)
        numbers = sum(value for value, _ in found[0][1])
        print(json.dumps({"seconds": max(seconds for seconds, _ in found), "numbers": numbers}))
        return
    sides = ["one by one", "batches", "two ranks"]
    found = rounds(sides, lambda side: child(__file__, "--side", side), asked.rounds)
    same = {result["numbers"] for side in sides[1:] for result in found[side]}
    print(table(["", "time"], [
        ["batches, of one by one", ratio(found["batches"], found["one by one"], "seconds")],
        ["two ranks, of one", ratio(found["two ranks"], found["batches"], "seconds")],
        ["same numbers on one and two ranks", len(same) == 1],
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
