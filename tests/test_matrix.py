"""The script that runs the tests in other environments finds what it needs in pyproject.toml, README and tests/."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

from conftest import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("matrix", str(ROOT / ".ci" / "matrix"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("matrix", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_every_requirement_has_a_lower_bound_which_the_lowest_environment_takes(
    script: ModuleType, tmp_path: Path
) -> None:
    lowest = script.Matrix(tmp_path, False, [])._constraints("lowest", tmp_path)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in chain(declared["dependencies"], *declared["optional-dependencies"].values()):
        if requirement.startswith("crosstrain["):
            continue
        found = re.match(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)(?:,<[\d.]+)?(?:; |$)", requirement)
        assert found, requirement
        assert f"{found[1]}=={found[2]}\n" in lowest


def test_readme_says_what_to_install_and_run(script: ModuleType, tmp_path: Path) -> None:
    matrix = script.Matrix(tmp_path, False, [])
    assert matrix.requirement.startswith(".[test,")
    assert matrix.options.startswith("-m pytest")


def test_variants_run_tests_that_exist(script: ModuleType) -> None:
    for beginning in script.NUMERIC:
        assert list((ROOT / "tests").rglob(f"test_{beginning}*.py")), beginning
