"""Train on the machines of a Ray cluster: an actor on each, which runs a launcher of `crosstrain train`.

When a machine is lost, all start again on those that are there, as soon as they are enough, and resume from the newest
checkpoint; an error that a new start cannot mend ends the job. Made by:

    crosstrain launch --to ray --nodes 2 --cfg-path projects/gpt2_345m_8gpu.yaml
    ray job submit --working-dir . -- python FILE
"""

import ctypes
import os
import signal
import subprocess
import sys

import ray
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, RESTARTS = 2, 20
RESOURCES = {"CPU": 32, "GPU": 8}  # of a machine, of which each needs 112 GiB of memory
TRAIN = [
    sys.executable, "-m", "crosstrain", "train", "--cfg-path", "projects/gpt2_345m_8gpu.yaml", "--nnodes", str(NODES),
    "--nproc-per-node", "8", "--options",
    "run.max_restarts=20",
]  # fmt: skip
ENVIRONMENT = {}


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a launcher without its actor would train on


@ray.remote(max_concurrency=2)
class Machine:
    process = None

    def address(self) -> str:
        return get_node_ip_address()

    def train(self, rank: int, host: str) -> int:
        command = [*TRAIN, f"--node-rank={rank}", f"--rdzv-endpoint={host}:29400"]
        self.process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, preexec_fn=end_with_parent)
        return self.process.wait()

    def stop(self) -> int:
        """End the launcher, which saves first where it can."""
        self.process.terminate()
        try:
            return self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def run() -> int:
    """Train once on NODES machines; returns the exit code. Raises RayError when a machine or its actor is lost."""
    group = placement_group([{kind: n for kind, n in RESOURCES.items() if n}] * NODES, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())  # waits until there are enough machines
        machines = [
            Machine.options(
                num_cpus=RESOURCES["CPU"], num_gpus=RESOURCES["GPU"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(NODES)
        ]  # fmt: skip
        host = ray.get(machines[0].address.remote())
        running = [machine.train.remote(rank, host) for rank, machine in enumerate(machines)]
        try:
            codes = ray.get(running)  # raises as soon as one is lost
        except ray.exceptions.RayError:
            stopped = [machine.stop.remote() for machine in machines]
            ray.wait(stopped, num_returns=NODES, timeout=300)
            raise
        return max(codes)
    finally:
        remove_placement_group(group)


for left in range(RESTARTS, -1, -1):
    try:
        sys.exit(run())
    except ray.exceptions.RayError as error:
        print(f"a machine was lost ({type(error).__name__}); {left} restarts are left", flush=True)
sys.exit(1)
