"""`crosstrain schema`: a JSON Schema of project files, with which editors complete, explain and check them."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add none: CROSSTRAIN_PLUGINS names further plugins."""


def run(arguments: argparse.Namespace) -> int:
    """Print the schema; returns the exit code."""
    from crosstrain.config.json_schema import project_schema

    print(json.dumps(project_schema(), indent=1))
    return 0
