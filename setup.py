"""Copy the folders plugins/, configs/ and projects/ of the checkout into the package of a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithPlugins(build_py):
    """Copy the folders into the wheel's package; an editable install uses the checkout's folders."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in ("plugins", "configs", "projects"):
            shutil.copytree(
                ROOT / name,
                Path(self.build_lib, "crosstrain", name),
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(cmdclass={"build_py": BuildWithPlugins})
