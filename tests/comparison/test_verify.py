"""`crosstrain verify` accepts healthy runners, and says on its page what is wrong with others."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from crosstrain_plugins.builtin.commands.verify.verify import page

from conftest import ENVIRONMENT, ROOT, Workspace
from crosstrain.cli.main import main
from crosstrain.config.load import preset_files

PLUGINS = ROOT / "tests" / "third_party"
NOT_TRIED = {"the rest"}


def verify(workspace: Workspace, runner: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The command's end, and the result of each check."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "crosstrain",
            "verify",
            "--cfg-path",
            str(workspace.project),
            "--runners",
            runner,
            "--output",
            "verified.md",
            "--options",
            f"run.plugins=[{PLUGINS}]",
            "run.micro_batch_size=2",
            *options,
        ],
        cwd=workspace.path,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")},
        capture_output=True,
        text=True,
        timeout=290,
    )
    (rows,) = json.loads((workspace.path / "verified.json").read_text()).values()
    return done, {name: result for name, result, _ in rows}


@pytest.mark.slow
def test_a_healthy_runner_is_accepted(workspace: Workspace) -> None:
    done, results = verify(workspace, "wrong@2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name for name, result in results.items() if result != "yes"} == NOT_TRIED
    shown = (workspace.path / "verified.md").read_text()
    assert shown.count("\n## wrong@2: verified\n") == 1
    assert shown.count("\n| ") == len(results) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "failed"),
    [
        ("forgets_at_resume", {"resumes itself", "resumes ddp@1", "resumes on 4 ranks"}),
        ("exports", {"saves its state", "exports correctly"}),  # its configuration lies beside the tensors
        ("trains_in_evaluation", {"evaluates alike", "exports correctly"}),  # the export has the right loss
        ("sum", {"trains alike"}),
    ],
)
def test_a_wrong_runner_is_told(workspace: Workspace, bug: str, failed: set[str]) -> None:
    runner = f"{{name: wrong, bug: {bug}}}@2"
    done, results = verify(workspace, runner)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"error: 1 of 1 not verified: {runner}"
    assert {name for name, result in results.items() if result == "no"} == failed
    assert f"## {runner}: **not verified**" in (workspace.path / "verified.md").read_text()


def test_a_page_is_a_table_for_each_runner() -> None:
    rows = [("trains alike", "yes", "a | b"), ("exports correctly", "no", "c")]
    assert page({"one@2": rows[:1], "two@2": rows}, "crosstrain verify").splitlines()[4:] == [
        "## one@2: verified",
        "",
        "| check | result | found |",
        "|---|---|---|",
        "| trains alike | yes | a &#124; b |",
        "",
        "## two@2: **not verified**",
        "",
        "| check | result | found |",
        "|---|---|---|",
        "| trains alike | yes | a &#124; b |",
        "| exports correctly | **no** | c |",
    ]


@pytest.mark.parametrize(
    ("runner", "sentence"), [("zero9@2", "there is no runner called 'zero9'"), ("ddp@3", "is not a multiple of")]
)
def test_a_mistake_is_one_sentence(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], runner: str, sentence: str
) -> None:
    assert main(["verify", "--cfg-path", str(workspace.project), "--runners", runner]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert sentence in error


def test_the_built_in_runners_are_verified() -> None:
    """All but the one that needs an NVMe device."""
    shown = "".join(page.read_text() for page in ROOT.glob("docs/verified*.md"))
    assert "**no" not in shown
    found = set(re.findall(r"(?m)^## (\w+)@\d: verified$", shown))
    assert {*preset_files("runner")} - found == {"zero3_nvme"}
