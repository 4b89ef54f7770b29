"""Deployment files, as far as they can be checked where there is no cluster: against the schemas of what reads them."""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubeflow.training.models as kubeflow
import kubeflow_trainer_api.models as trainer
import kubernetes.client.models as kubernetes
import kubernetes_validate
import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from conftest import ROOT
from crosstrain.cli.main import parse
from crosstrain.distributed.launch.rendezvous import Nodes

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def job_specs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The specifications of Jobs in a Job, a JobSet or a runtime that is a JobSet's template."""
    spec = document.get("spec", {})
    spec = spec["template"]["spec"] if document["kind"] == "TrainingRuntime" else spec
    if "replicatedJobs" in spec:
        return [job["template"]["spec"] for job in spec["replicatedJobs"]]
    return [spec] if document["kind"] == "Job" else []


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {})
    replicas = spec.get("pytorchReplicaSpecs", {}).values()
    own = [spec["template"]] if document["kind"] == "Deployment" else []
    return [r["template"] for r in replicas] or [job["template"] for job in job_specs(document)] or own


def everything(kind: str | None = None) -> list[Any]:
    found = [(path.name, d) for path in MANIFESTS for d in documents(path) if kind in (None, d["kind"])]
    return [pytest.param(d, id=f"{name}-{d['kind']}") for name, d in found]


@pytest.mark.parametrize("document", everything())
def test_manifests_follow_their_schemas(document: dict[str, Any]) -> None:
    check_schema(document)


def check_schema(document: dict[str, Any]) -> None:
    """Kubernetes' own strictly, where an unknown key is an error; those of the operators by their clients' models."""
    if document["apiVersion"].startswith("kubeflow.org/"):
        _check_model(document, f"KubeflowOrgV1{document['kind']}", document["kind"])
    elif group := {"trainer.kubeflow.org": "TrainerV1alpha1", "jobset.x-k8s.io": "JobsetV1alpha2"}.get(
        document["apiVersion"].partition("/")[0]
    ):
        model = getattr(trainer, group + document["kind"])
        bare = json.loads(json.dumps(document))
        for job in job_specs(bare):
            job["template"] = {}  # which Kubernetes' own schema describes better
        read = model.model_validate(bare)  # which drops what it does not know
        assert read.model_dump(by_alias=True, exclude_unset=True) == bare
    else:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    for template in pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def _check_model(value: Any, kind: str, where: str) -> None:
    """That `value` is of an OpenAPI type, as the generated clients of Kubernetes and Kubeflow spell them."""
    if found := re.fullmatch(r"dict\(str, (.+)\)", kind):
        assert isinstance(value, dict), where
        for key, item in value.items():
            _check_model(item, found[1], f"{where}.{key}")
    elif found := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), where
        for i, item in enumerate(value):
            _check_model(item, found[1], f"{where}[{i}]")
    elif kind in ("str", "int", "bool", "object", "float"):
        assert kind == "object" or type(value).__name__ == kind, f"{where}: {value!r} is not {kind}"
    elif kind != "V1PodTemplateSpec":  # which Kubernetes' own schema describes better
        model = getattr(kubeflow, kind, None) or getattr(kubernetes, kind)
        known = {model.attribute_map[name]: t for name, t in model.openapi_types.items()}
        assert isinstance(value, dict), where
        for key, item in value.items():
            assert key in known, f"{where}.{key}: unknown; known: {', '.join(known)}"
            _check_model(item, known[key], f"{where}.{key}")
        model(
            **{n: value.get(key) for n, key in model.attribute_map.items()}
        )  # which refuses what lacks a required key


def only(name: str, kind: str) -> dict[str, Any]:
    [document] = [d for d in documents(DEPLOY / "kubernetes" / name) if d["kind"] == kind]
    return document


def test_a_key_that_does_not_exist_is_noticed() -> None:
    job = only("pytorchjob.yaml", "PyTorchJob")
    job["spec"]["runPolicy"]["backOffLimit"] = 3
    with pytest.raises(AssertionError, match="backOffLimit: unknown"):
        check_schema(job)
    service = only("job.yaml", "Service")
    service["spec"]["publishNotReadyAdresses"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(service)
    jobset = only("jobset.yaml", "JobSet")
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError):
        check_schema(jobset)
    runtime = only("trainjob.yaml", "TrainingRuntime")
    runtime["spec"]["mlPolicy"]["numNodes"] = "2"
    with pytest.raises(ValueError, match="integer"):
        check_schema(runtime)


JOBS = [*everything("Job"), *everything("JobSet"), *everything("TrainingRuntime"), *everything("PyTorchJob")]


@pytest.mark.parametrize("document", JOBS)
def test_pods_run_the_program_with_flags_that_it_takes(document: dict[str, Any]) -> None:
    given = {"JOB_COMPLETION_INDEX": "0", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    name = document["metadata"]["name"]
    for template in pod_templates(document):
        [container] = template["spec"]["containers"]
        assert container["command"] == ["python", "-m", "crosstrain", "train"]
        flags = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], flag) for flag in container["args"]]
        a = parse(["train", *flags])
        host, _, port = a.rdzv_endpoint.partition(":")
        # A Job's pod of index 0 is reached as JOB-0.SERVICE, a JobSet's as SET-JOB-0-0.SET.
        assert host in (f"{name}-0.{name}", f"{name}-node-0-0.{name}", "127.0.0.1")
        nodes = Nodes.of(a.nnodes, a.node_rank, f"127.0.0.1:{port}", a.local_addr, a.rdzv_conf)
        assert nodes is not None
        assert nodes.max_nodes == 2
        assert a.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        [storage] = documents(DEPLOY / "kubernetes" / "storage.yaml")
        assert volumes["storage"]["persistentVolumeClaim"]["claimName"] == storage["metadata"]["name"]
        assert storage["spec"]["accessModes"] == ["ReadWriteMany"]
        assert set(volumes) == {mount["name"] for mount in container["volumeMounts"]}
        assert volumes["project"]["configMap"]["name"] == name


def test_the_jobs_pods_find_each_other() -> None:
    service, job = only("job.yaml", "Service"), only("job.yaml", "Job")
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize("document", [d for d in JOBS if d.values[0]["kind"] != "PyTorchJob"])
def test_every_machine_has_a_pod(document: dict[str, Any]) -> None:
    [job] = job_specs(document)
    assert job["completions"] == job["parallelism"] == 2
    assert job["completionMode"] == "Indexed"


@pytest.mark.parametrize("document", [*JOBS, *everything("Deployment")])
def test_pods_ask_for_the_memory_that_they_may_use(document: dict[str, Any]) -> None:
    for template in pod_templates(document):
        [container] = template["spec"]["containers"]
        asked, limits = (container["resources"][kind] for kind in ("requests", "limits"))
        assert {"cpu", "memory"} <= asked.keys()
        shared = [v["emptyDir"]["sizeLimit"] for v in template["spec"]["volumes"] if "emptyDir" in v]
        assert all(parse_quantity(limits["memory"]) > parse_quantity(size) for size in shared)  # which counts
        assert parse_quantity(limits["memory"]) >= parse_quantity(asked["memory"])


def action(job: dict[str, Any], code: int, disrupted: bool = False) -> str:
    """The action of a Job's rules, the first that matches, for a pod that ended so."""
    [container] = job["template"]["spec"]["containers"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # without which a policy is refused
    for rule in job["podFailurePolicy"]["rules"]:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        assert codes is None or (codes["operator"], codes["containerName"]) == ("In", container["name"])
        if (disrupted and {"type": "DisruptionTarget"} in conditions) or (codes and code in codes["values"]):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("document", [d for d in JOBS if d.values[0]["kind"] != "PyTorchJob"])
def test_only_errors_that_a_new_pod_cannot_mend_end_the_job(document: dict[str, Any]) -> None:
    """The codes are those of docs/launching.md."""
    [job] = job_specs(document)
    assert [action(job, code) for code in (1, 138, 143, 137)] == ["FailJob", "Ignore", "Ignore", "Count"]
    assert action(job, 1, disrupted=True) == action(job, 137, disrupted=True) == "Ignore"


def test_the_dockerfile(tmp_path: Path) -> None:
    """Linted by hadolint, which parses it; it installs as the README does, and starts what the README starts."""
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists() and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("hadolint is not packaged for this machine")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
    text = re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text())
    install = re.search(r"RUN (python3 -m venv .*)", text)
    assert install is not None
    start = re.search(r"`{3}sh\n(python3 -m venv .venv && .* train.py .*)\n", (ROOT / "README.md").read_text())
    assert start is not None
    assert re.sub(r"-e \S+", "-e .", install[1]) == start[1].rpartition(" && ")[0]
    command = [part for kind in ("ENTRYPOINT", "CMD") for part in yaml.safe_load(re.findall(rf"{kind} (.*)", text)[0])]
    assert shlex.split(start[1].rpartition(" && ")[2].replace(".venv/bin/", "")) == command


def test_the_batch_file_is_a_script() -> None:
    script = DEPLOY / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0
    if checker := shutil.which("shellcheck"):
        done = subprocess.run([checker, script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout
