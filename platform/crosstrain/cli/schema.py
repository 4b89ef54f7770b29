"""`crosstrain schema`: a JSON Schema of project files, with which editors complete, explain and check them."""

from __future__ import annotations

import argparse
import json
import sys

from crosstrain.cli.flags import add_plugins
from crosstrain.config.registry import registry
from crosstrain.utils import paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plugins(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the schema; returns the exit code."""
    from crosstrain.config.json_schema import project_schema

    for folder in arguments.plugins:
        registry.add_folder(paths.find(folder))
    json.dump(project_schema(), sys.stdout, indent=1)
    print()
    return 0
