"""Compare background saves with no saves, and with plain torch.save of the same state.

    python benchmarks/checkpoint.py [--rounds 3] [--steps 24] [--every 6]

Measures the wall time of `steps` training steps of a small GPT-2 (6 layers x 384, vocabulary 50,304: 364 MB of weights
and moments). The three ways of saving take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Result, child, ratio, rounds, table

WAYS = ("background saves", "no save", "torch.save")


def measure(way: str, steps: int, every: int) -> Result:
    """Return the seconds of the training loop, including the last save, and the seconds that it waited for saves."""
    sys.path.insert(0, str(ROOT / "platform"))
    import numpy as np
    import torch

    from crosstrain.checkpoint.checkpointer import Checkpointer
    from crosstrain.config.load import load_config
    from crosstrain.data.loader import MicroBatch
    from crosstrain.distributed.group import Group
    from crosstrain.engine.build import build_model
    from crosstrain.engine.runner import Runner

    with tempfile.TemporaryDirectory() as folder:
        options = [
            "model.n_layer=6", "model.n_embd=384", "model.n_head=6", "model.vocab_size=50257", "run.device=cpu",
            "run.amp=bf16", f"run.output_dir={folder}",
        ]  # fmt: skip
        runner = Runner(None, load_config("projects/quickstart.yaml", options).run)
        runner.setup()
        build_model(load_config("projects/quickstart.yaml", options), runner, None, for_training=True)
        runner.set_learning_rate(1e-4)
        keeper = Checkpointer(Path(folder), Group(), lambda path, _: runner.model.export.save_config(path), keep_last=1)
        tokens = torch.as_tensor(np.random.default_rng(0).integers(0, 50257, (4, 129)))
        batch = MicroBatch(0, {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}, 512)
        runner.forward_backward([batch], 512)
        runner.optimizer_step()

        stalled, started = 0.0, time.perf_counter()
        for step in range(1, steps + 1):
            runner.forward_backward([batch], 512)
            runner.optimizer_step()
            if step % every == 0:
                before = time.perf_counter()
                if way == "background saves":
                    keeper.save(step, runner.held.shards(), {"step": step})
                elif way == "torch.save":
                    assert runner.optimizer is not None
                    state = {"model": runner.model.state_dict(), "optimizer": runner.optimizer.state_dict()}
                    torch.save(state, Path(folder, "checkpoint.pt"))
                stalled += time.perf_counter() - before
        keeper.wait()
        return {"seconds": time.perf_counter() - started, "stalled": stalled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.steps, arguments.every)))
        return

    def run(way: str) -> Result:
        return child(__file__, "--way", way, "--steps", str(arguments.steps), "--every", str(arguments.every))

    results = rounds(WAYS, run, arguments.rounds)
    rows = [[way, ratio(results[way], results["no save"], "seconds")] for way in WAYS if way != "no save"]
    print(
        table([f"{arguments.steps // arguments.every} saves in {arguments.steps} steps", "wall time / no save"], rows)
    )
    print("\nloop stalled, background / torch.save:", ratio(results[WAYS[0]], results[WAYS[2]], "stalled"))


if __name__ == "__main__":
    main()
