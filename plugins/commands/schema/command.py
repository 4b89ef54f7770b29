"""`crosstrain schema`: a JSON Schema of project files, with which editors complete, explain and check them."""

import argparse
import json

from crosstrain import Command, registry


@registry.register_command("schema")
class SchemaCommand(Command):
    """Print a JSON Schema of project files, for editors."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add none: CROSSTRAIN_PLUGINS names further plugins."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the schema; returns the exit code."""
        from .json_schema import project_schema

        print(json.dumps(project_schema(), indent=1))
        return 0
