"""Deployment files, as far as they can be checked where there is no cluster: against the schemas of what reads them."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubeflow.training.models as kubeflow
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


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    replicas = spec.get("pytorchReplicaSpecs", {}).values()
    return [r["template"] for r in replicas] or ([spec["template"]] if "template" in spec else [])


def everything(kind: str | None = None) -> list[Any]:
    found = [(path.name, d) for path in MANIFESTS for d in documents(path) if kind in (None, d["kind"])]
    return [pytest.param(d, id=f"{name}-{d['kind']}") for name, d in found]


@pytest.mark.parametrize("document", everything())
def test_manifests_follow_their_schemas(document: dict[str, Any]) -> None:
    """Kubernetes' own strictly, where an unknown key is an error; Kubeflow's by its own client's models."""
    if document["apiVersion"].startswith("kubeflow.org/"):
        _check_model(document, f"KubeflowOrgV1{document['kind']}", document["kind"])
        for template in pod_templates(document):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
            kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    else:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


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


def test_a_key_that_does_not_exist_is_noticed() -> None:
    [job] = [d for d in documents(DEPLOY / "kubernetes" / "pytorchjob.yaml") if d["kind"] == "PyTorchJob"]
    job["spec"]["runPolicy"]["backOffLimit"] = 3
    with pytest.raises(AssertionError, match="backOffLimit: unknown"):
        _check_model(job, "KubeflowOrgV1PyTorchJob", "PyTorchJob")
    [service] = [d for d in documents(DEPLOY / "kubernetes" / "job.yaml") if d["kind"] == "Service"]
    service["spec"]["publishNotReadyAdresses"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("document", [*everything("Job"), *everything("PyTorchJob")])
def test_pods_run_the_program_with_flags_that_it_takes(document: dict[str, Any]) -> None:
    given = {"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    for template in pod_templates(document):
        [container] = template["spec"]["containers"]
        flags = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], flag) for flag in container["args"]]
        a = parse(["train", *flags])
        host = a.rdzv_endpoint.replace("crosstrain-0.crosstrain", "127.0.0.1")
        nodes = Nodes.of(a.nnodes, a.node_rank, host, a.local_addr, a.rdzv_conf)
        assert nodes is not None
        assert nodes.max_nodes == 2
        assert (ROOT / a.cfg_path).is_file()
        claims = [v["persistentVolumeClaim"]["claimName"] for v in template["spec"]["volumes"] if len(v) == 2 and
                  "persistentVolumeClaim" in v]  # fmt: skip
        [storage] = documents(DEPLOY / "kubernetes" / "storage.yaml")
        assert claims == [storage["metadata"]["name"]]
        assert storage["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_jobs_pods_find_each_other() -> None:
    service, job = documents(DEPLOY / "kubernetes" / "job.yaml")
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    flags = pod["spec"]["containers"][0]["args"]
    # The pod of index 0 is reached as JOB-0.SERVICE.
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:29400" in flags
    assert f"--nnodes={job['spec']['completions']}" in flags
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["completionMode"] == "Indexed"


@pytest.mark.parametrize("document", [*everything("Job"), *everything("PyTorchJob"), *everything("Deployment")])
def test_pods_ask_for_the_memory_that_they_may_use(document: dict[str, Any]) -> None:
    for template in pod_templates(document):
        [container] = template["spec"]["containers"]
        asked, limits = (container["resources"][kind] for kind in ("requests", "limits"))
        assert {"cpu", "memory"} <= asked.keys()
        shared = [v["emptyDir"]["sizeLimit"] for v in template["spec"]["volumes"] if "emptyDir" in v]
        assert all(parse_quantity(limits["memory"]) > parse_quantity(size) for size in shared)  # which counts
        assert parse_quantity(limits["memory"]) >= parse_quantity(asked["memory"])


def test_only_errors_that_a_new_pod_cannot_mend_end_the_job() -> None:
    """The rules in Kubernetes' order, the first that matches; the codes are those of docs/launching.md."""
    [_, job] = documents(DEPLOY / "kubernetes" / "job.yaml")
    spec = job["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # without which a policy is refused

    def action(code: int, disrupted: bool = False) -> str:
        for rule in spec["podFailurePolicy"]["rules"]:
            codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
            assert codes is None or (codes["operator"], codes["containerName"]) == ("In", container["name"])
            if (disrupted and {"type": "DisruptionTarget"} in conditions) or (codes and code in codes["values"]):
                return rule["action"]
        return "Count"

    assert [action(code) for code in (1, 138, 143, 137)] == ["FailJob", "Ignore", "Ignore", "Count"]
    assert action(1, disrupted=True) == action(137, disrupted=True) == "Ignore"


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
