"""`crosstrain schema`: print a JSON Schema of project files, for completion, help and checks in editors."""

import argparse
import json

from crosstrain import Command, registry


@registry.register_command("schema")
class SchemaCommand(Command):
    """Print a JSON Schema of project files, for editors."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add no arguments; the schema includes the plugins in CROSSTRAIN_PLUGINS."""

    def run(self, arguments: argparse.Namespace) -> None:
        """Print the schema."""
        from .json_schema import project_schema

        print(json.dumps(project_schema(), indent=1))
