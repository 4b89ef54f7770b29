"""Manifests of `crosstrain launch`: those that are shipped, flags, and a JobSet's restart."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from crosstrain_plugins.builtin.commands.launch import manifest as launch

from conftest import ENVIRONMENT, ROOT, Run, Workspace, kill, logged_step, wait_until
from crosstrain.cli.main import main
from fixtures_kill import INTERVALS, assert_same_weights, numbers

SHIPPED = {
    "job": "kubernetes/job.yaml", "jobset": "kubernetes/jobset.yaml", "trainjob": "kubernetes/trainjob.yaml",
    "pytorchjob": "kubernetes/pytorchjob.yaml", "serve": "kubernetes/serve.yaml", "slurm": "slurm.sh",
    "skypilot": "skypilot.yaml", "ray": "ray_job.py",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def planned_once() -> Iterator[None]:
    """The plan of equal arguments is made once in this module: it takes seconds."""
    real, kept = launch.plan, dict[str, Any]()

    def plan(*arguments: Any, **more: Any) -> Any:
        key = repr((arguments, more))
        if key not in kept:
            kept[key] = real(*arguments, **more)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "plan", plan)
        patch.chdir(ROOT)
        yield


def said(*words: str, code: int = 0) -> str:
    """What the verb prints: the manifest, or the error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["launch", *words]) == code, out.getvalue() + err.getvalue()
    return err.getvalue() if code == 1 else out.getvalue()


@pytest.mark.parametrize("to", SHIPPED)
def test_deploy_holds_what_the_command_in_it_prints(to: str) -> None:
    text = (ROOT / "deploy" / SHIPPED[to]).read_text()
    made_by = re.search(r"crosstrain launch .*", text)
    assert made_by is not None
    words = shlex.split(made_by[0])
    assert words[2:4] == ["--to", to]
    assert said(*words[2:]) == text


TINY = ("--nodes", "2", "--cfg-path", "projects/gpt2_345m_8gpu.yaml")


def test_flags_are_in_the_manifest_or_refused() -> None:
    text = said(
        "--to",
        "jobset",
        "--name",
        "mine",
        "--image",
        "registry/image:1",
        "--claim",
        "disk",
        "--queue",
        "team",
        "--grace",
        "777",
        "--spot",
        *TINY,
        "--options",
        "run.seed=5",
        "run.max_restarts=3",
    )
    jobset = list(yaml.safe_load_all(text))[-1]
    assert jobset["metadata"] == {"name": "mine", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 777
    assert "karpenter.sh/capacity-type" in str(pod["affinity"])
    [container] = pod["containers"]
    assert container["image"] == "registry/image:1"
    assert container["args"][-2:] == ["run.seed=5", "run.max_restarts=3"]
    assert {"persistentVolumeClaim": {"claimName": "disk"}, "name": "storage"} in pod["volumes"]
    text = said("--to", "slurm", "--queue", "gpu", "--time", "2:00:00", "--account", "lab", *TINY)
    assert "#SBATCH --partition=gpu" in text
    assert "#SBATCH --account=lab" in text
    assert "#SBATCH --time=2:00:00" in text
    assert "#SBATCH --gpus-per-node=h100:8\n" in said("--to", "slurm", "--gpu", "h100", *TINY)
    assert "#SBATCH --gpus-per-node=4\n" in said("--to", "slurm", "--nproc-per-node", "4", *TINY)
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60).returncode == 0
    refused = said("--to", "slurm", "--spot", *TINY, code=1)
    assert refused == "error: --spot: --to slurm does not use it; leave it out\n"
    sky = yaml.safe_load(said("--to", "skypilot", "--spot", "--gpu", "H200", *TINY))
    assert (sky["resources"]["use_spot"], sky["resources"]["accelerators"]) == (True, {"H200": 8})


ENV = ("--env", "NCCL_DEBUG=INFO", """WORDS=it's "two" $words""")


@pytest.mark.parametrize("to", ["job", "jobset", "trainjob", "pytorchjob"])
def test_pods_have_the_environment_and_machines_that_are_given(to: str) -> None:
    flags = ("--secret", "keys", "--node-selector", "gpu=h100", "example.org/pool=true")
    text = said("--to", to, *ENV, *flags, *TINY)

    def found(tree: Any, key: str) -> Iterator[Any]:
        inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
        for name, value in inner:
            yield from [value] if name == key else found(value, key)

    tree = list(yaml.safe_load_all(text))
    assert next(found(tree, "nodeSelector")) == {"gpu": "h100", "example.org/pool": "true"}
    assert next(found(tree, "envFrom")) == [{"secretRef": {"name": "keys"}}]
    assert {e["name"]: e["value"] for e in next(found(tree, "env"))} == dict(e.split("=") for e in ENV[1:])


def test_other_targets_have_the_environment_that_is_given(tmp_path: Path) -> None:
    script = said("--to", "slurm", *ENV, *TINY).partition("first=")[0] + 'echo "$NCCL_DEBUG $WORDS"\n'
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, timeout=60, check=True)
    assert done.stdout == """INFO it's "two" $words\n"""
    sky = yaml.safe_load(said("--to", "skypilot", *ENV, *TINY))
    assert sky["envs"] == dict(e.split("=") for e in ENV[1:])
    given = re.search(r"^ENVIRONMENT = (.*)$", said("--to", "ray", *ENV, *TINY), re.MULTILINE)
    assert given is not None
    assert ast.literal_eval(given[1]) == sky["envs"]
    refused = said("--to", "job", "--env", "NCCL_DEBUG", *TINY, code=1)
    assert "argument --env: expected NAME=VALUE, got 'NCCL_DEBUG'" in refused
    refused = said("--to", "slurm", "--node-selector", "a=b", *TINY, code=1)
    assert "--node-selector: --to slurm does not use it" in refused


PLACES = {"output/a": True, "/crosstrain/output/a": True, "s3://b/a": True, "/scratch/a": False, "outputs/a": False}


@pytest.mark.parametrize(("folder", "stays"), PLACES.items())
def test_a_run_of_pods_is_on_their_volume(folder: str, stays: bool) -> None:
    text = said("--to", "job", *TINY, "--options", f"run.output_dir={folder}", code=0 if stays else 1)
    assert stays or f"run.output_dir: {folder} is not on the pods' volume" in text


def test_what_cannot_run_is_no_manifest() -> None:
    refused = said("--to", "job", "--nodes", "3", "--cfg-path", "projects/gpt2_345m_8gpu.yaml", code=1)
    assert refused.startswith("error: run.global_batch_size: 64 is not a multiple of 96")
    ranks = said("--to", "job", "--nodes", "3", "--cfg-path", "projects/gpt3_175b.yaml", code=1)
    assert "a multiple of 128 ranks, but there are 24" in ranks
    assert "--world-size" not in ranks  # a flag of plan
    assert "did you mean trainjob?" in said("--to", "trainjobs", *TINY, code=1)


def test_a_project_on_cpus_asks_for_no_gpu_and_its_text_survives(workspace: Workspace) -> None:
    workspace.config["model"]["dropout"] = 0.0
    workspace.config["run"]["output_dir"] = "output/tiny"
    workspace.project.write_text("# 'quotes' \"and\" {{ braces }} $(x)\n" + yaml.safe_dump(workspace.config))
    config, jobset = yaml.safe_load_all(said("--to", "jobset", "--cfg-path", str(workspace.project)))
    assert config["data"]["project.yaml"].rstrip() == workspace.project.read_text().rstrip()
    [container] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"].keys() == {"memory"}
    compiled = said("--to", "ray", "--cfg-path", str(workspace.project))
    assert str(workspace.project) in {n.value for n in ast.walk(ast.parse(compiled)) if isinstance(n, ast.Constant)}


@pytest.mark.slow
def test_a_jobsets_restart_ends_as_an_undisturbed_run_does(shared_workspace: Workspace) -> None:
    """The pods' commands in the pods' environment; a pod is killed, and the set does what its policies say."""
    path = shared_workspace.path
    options = ("run.output_dir=output/set", "run.max_iters=60", "run.save_interval=10", *INTERVALS)
    words = ("--to", "jobset", "--nodes", "2", "--cfg-path", str(shared_workspace.project), "--options", *options)
    config, jobset = yaml.safe_load_all(said(*words))
    (path / "mounted").mkdir()
    for name, text in config["data"].items():
        (path / "mounted" / name).write_text(text)
    [job] = [replicated["template"]["spec"] for replicated in jobset["spec"]["replicatedJobs"]]
    [container] = job["template"]["spec"]["containers"]

    def start() -> list[subprocess.Popen[str]]:
        pods = []
        for index in range(job["completions"]):
            own = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"project-node-0-{index}"}
            inherited = {name: ENVIRONMENT[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")}
            flags = [re.sub(r"\$\((\w+)\)", lambda name, own=own: own[name[1]], flag) for flag in container["args"]]
            flags = [flag.replace("/project/", f"{path}/mounted/") for flag in flags]
            flags = [flag.replace("project-node-0-0.project", "127.0.0.1") for flag in flags]  # the set's name service
            pods.append(
                subprocess.Popen(
                    [sys.executable, *container["command"][1:], *flags],
                    cwd=path,
                    text=True,
                    start_new_session=True,
                    env=inherited | own | {"PYTHONPATH": str(ROOT / "platform")},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        return pods

    pods = start()
    wait_until(lambda: logged_step(path / "output" / "set") >= 25, pods[0])
    kill(pods[1])
    # 137 is in no rule, so it counts; the limit of 0 fails the Job, and the failure is no PodFailurePolicy.
    assert "137" not in str(job["podFailurePolicy"])
    assert job["backoffLimit"] == 0
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] >= 1
    os.kill(pods[0].pid, signal.SIGTERM)  # all pods are deleted, and made again
    pods[0].communicate(timeout=job["template"]["spec"]["terminationGracePeriodSeconds"])
    pods = start()
    outs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outs
    assert re.search(r"resum|goes? on", outs[0]), outs[0]
    undisturbed = shared_workspace.train("alone", *options[1:], nproc=2)
    assert numbers(Run(path / "output" / "set")) == numbers(undisturbed)
    assert_same_weights(Run(path / "output" / "set").checkpoint(60), undisturbed.checkpoint(60))


RAY = """
import subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
from conftest import logged_step

script, folder = sys.argv[1], Path(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
machines = [cluster.add_node(num_cpus=4) for _ in range(2)]
job = subprocess.Popen([sys.executable, script], env={**__import__("os").environ, "RAY_ADDRESS": cluster.address})
while logged_step(folder) < 25:
    assert job.poll() is None
    time.sleep(0.05)
cluster.remove_node(machines[1], allow_graceful=False)
cluster.add_node(num_cpus=4)
code = job.wait(timeout=500)
cluster.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(700)  # Ray starts for half a minute, and takes its time to give a machine up
def test_a_ray_cluster_that_loses_a_machine_trains_to_the_end(shared_workspace: Workspace) -> None:
    path = shared_workspace.path
    options = ("run.max_iters=60", "run.save_interval=10", *INTERVALS)
    words = ("--to", "ray", "--nodes", "2", "--cfg-path", str(shared_workspace.project), "--options")
    (path / "job.py").write_text(said(*words, *options, f"run.output_dir={path}/on_ray"))
    (path / "drive.py").write_text(RAY)
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, `unshare` and `ip` to make a network namespace")
    paths = os.pathsep.join(map(str, (ROOT / "platform", ROOT / "tests")))
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]  # where Ray listens for nobody
    done = subprocess.run(
        [*alone, sys.executable, "drive.py", "job.py", f"{path}/on_ray"],
        cwd=path,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a machine was lost" in done.stdout
    undisturbed = shared_workspace.train("beside", *options, nproc=2)
    assert numbers(Run(path / "on_ray")) == numbers(undisturbed)
    assert_same_weights(Run(path / "on_ray").checkpoint(60), undisturbed.checkpoint(60))
