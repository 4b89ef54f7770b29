"""`crosstrain train`: check everything, then start the workers."""

from __future__ import annotations

from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.load import load_config
from crosstrain.distributed.launch.cluster_env import was_restarted
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.distributed.launch.signals import sigint_kills
from crosstrain.engine.build import batch_plan
from crosstrain.planning.fit import refuse_what_cannot_fit
from crosstrain.train.preflight import check
from crosstrain.train.worker import train_worker


def train(
    cfg_path: str, options: list[str], nproc_per_node: int | None, fresh: bool, device_memory: str | None = "",
    nodes: Nodes | None = None,
) -> int:  # fmt: skip
    """Train what `cfg_path` says; returns the exit code. Raises UserError for every mistake it can foresee.

    `device_memory`: what must be enough, such as 24GiB; "": a GPU's own; None: whatever there is.
    """
    with sigint_kills():  # plugins are imported
        config = load_config(cfg_path, options)
    how = Launch.detect(nproc_per_node, config.run.device, nodes, config.run.max_restarts)
    for size in how.world_sizes[1:]:
        batch_plan(config, size)
    check(config, how.world_sizes[0])
    if device_memory is not None and how.is_first and not was_restarted():
        refuse_what_cannot_fit(config, how.world_sizes[0], device_memory)
    if fresh and how.is_first and not was_restarted():
        aside = RunFolder(config.run.output_dir).set_aside()
        if aside:
            print(f"starting over; the earlier run is kept in {aside}")
    return launch(train_worker, (config.plain, how.starts_workers), how)
