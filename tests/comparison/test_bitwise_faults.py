"""Exhibits of the museum under `run.bitwise`: `compare` finds each by unequal hashes, with tensor and step."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from test_museum import MUSEUM, _write_projects

from conftest import ENVIRONMENT, ROOT
from fixtures_ranks import run_ranks

# exhibit -> step that the answer names; None: it names none
FAULTS: dict[str, int | None] = {
    "clipped_on_one_rank": 1,
    "decay_lost": 1,
    "dropout_alike": 1,
    "last_micro_batch_lost": 1,
    "moments_in_bf16": 1,
    "moments_not_loaded": None,
    "norm_reduced_again": 1,
    "norms_decay": 1,
    "norms_in_bf16": 1,
    "rate_per_process": 1,
    "same_samples": 1,
}
PLUGIN = '''
@registry.register_runner("bits_{0}")
class Chosen_{0}(registry.get("runner", "{0}")):
    """The exhibit, with a variant for run.bitwise."""

    capabilities = replace(BitwiseDDP.capabilities, bitwise=f"{{__name__}}:Variant_{0}")


class Variant_{0}(Chosen_{0}, BitwiseDDP):
    """The exhibit's fault in bitwise DDP."""
'''
HEAD = """
from dataclasses import replace

from crosstrain_plugins.builtin.runners.bitwise.ddp import BitwiseDDP

from crosstrain import registry
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of one call of `compare`, by exhibit, and the exhibits' expected answers."""
    folder = tmp_path_factory.mktemp("bits")
    written = run_ranks(1, _write_projects, str(folder))[0]
    plugins = folder / "plugins"
    plugins.mkdir()
    (plugins / "faults.py").write_text(HEAD + "".join(map(PLUGIN.format, FAULTS)))
    options = [
        f"run.plugins={json.dumps([str(MUSEUM), str(plugins)])}", "run.bitwise=true", "run.amp.loss_scale=null",
        "run.micro_batch_size=1",
    ]  # fmt: skip
    output = folder / "answers.json"
    command = [
        sys.executable, "-m", "crosstrain", "compare", "--cfg-path", written["gpt2"], "--deep", "--output", str(output),
        "--runners", "ddp@1", "zero2@2", "fsdp@2", *(f"bits_{name}@2" for name in FAULTS), "--options", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads(output.read_text()) | {"expected": written}


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["zero2@2", "fsdp@2"])
def test_healthy_runners_are_equal(answers: dict[str, Any], runner: str) -> None:
    assert answers[runner]["finding"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_hashes_with_its_step_and_tensor(answers: dict[str, Any], name: str) -> None:
    found, expected = answers[f"bits_{name}@2"]["finding"], answers["expected"][name]
    assert found["phase"] == expected["phase"]
    assert re.search(expected["cause"], f"{found['cause']} {found['sentence']}", re.IGNORECASE)
    if expected["parameter"]:
        assert found["parameters"]
        assert all(fnmatch.fnmatch(parameter, expected["parameter"]) for parameter in found["parameters"])
    if FAULTS[name] is not None:
        assert f"step {FAULTS[name]}" in found["sentence"]
