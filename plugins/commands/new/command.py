"""`crosstrain new`: write working starter files from the templates in configs/new/."""

import argparse
import re
from pathlib import Path

from crosstrain import Command, UserError, registry
from crosstrain.utils import paths
from crosstrain.utils.program import command

_SCHEMA = "crosstrain.schema.json"
_NEXT = {
    "project": "{1} --cfg-path {0}.yaml",
    "package": "pip install -e './{0}[test]' && python -m pytest {0}",
} | dict.fromkeys(("runner", "model", "dataset", "processor", "callback"), "python -m pytest test_{0}.py")


@registry.register_command("new")
class NewCommand(Command):
    """Create a component, project or package from a template."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", choices=_NEXT, metavar="KIND", help=", ".join(_NEXT))
        parser.add_argument(
            "new_name", metavar="NAME", help="name of the component, project or package, and of its files"
        )

    def run(self, arguments: argparse.Namespace) -> None:
        """Write the files into the working directory. Existing files are never overwritten."""
        kind, name = arguments.kind, arguments.new_name
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise UserError(f"new: {name!r} cannot name a Python module: use lower-case letters, digits and _")
        if name in registry.names(kind):
            raise UserError(f"new: a {kind} named {name} already exists: choose a different name")
        template = paths.home() / "configs" / "new" / kind
        stem = name.removesuffix(f"_{kind}").title().replace("_", "")  # MyModel, not MyModelModel, for my_model
        files = {}
        for source in sorted(path for path in template.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            text = source.read_text(encoding="utf-8").replace("Example", stem)
            files[Path(str(source.relative_to(template)).replace("example", name))] = text.replace("example", name)
        if there := [file for file in files if file.exists()]:
            raise UserError(f"new: {there[0]} already exists, so nothing was written")
        if kind == "project" and not Path(_SCHEMA).exists():
            files[Path(_SCHEMA)] = (paths.home() / "projects" / _SCHEMA).read_text(encoding="utf-8")
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
        print(f"next: {_NEXT[kind].format(name, command('train'))}")
