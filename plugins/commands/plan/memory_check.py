"""Check the memory of a training run before it starts."""

import argparse
from collections.abc import Mapping
from typing import Any

from crosstrain import PreflightCheck, Start, UserError, registry
from crosstrain.utils.program import command

from ..units import read_bytes, show_bytes


@registry.register_preflight("memory_fit")
class MemoryCheck(PreflightCheck):
    """Refuse a training run that needs more memory than its devices have; a dry run prints the plan."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--no-fit-check",
            dest="fit_check",
            action="store_false",
            help="start even if the device memory is too small",
        )
        parser.add_argument(
            "--device-memory", metavar="SIZE", help="device memory per rank (default: the memory of this machine's GPU)"
        )

    def run(self, start: Start, given: Mapping[str, Any]) -> None:
        """Raise UserError if the runner cannot shard the model, or (on the first launcher) if memory is too small."""
        from .estimate import Project
        from .fit import gpu_memory, nearest, needs
        from .plan import Budget, alternatives, make_plan

        ready, size = start.ready, start.world_size
        asked = given["device_memory"]
        limit = read_bytes(asked, "--device-memory") if asked else gpu_memory(ready.config)
        if start.dry:
            planned = Project(ready.config, ready.model, ready.sample, ready.absent)
            others = alternatives(start.project, start.options, planned, size, presets=False)
            print(make_plan(planned, Budget(limit), size, others))
            return
        if not (start.first and given["fit_check"]):
            limit = None
        cut = ready.runner.capabilities.cuts_models
        planned = Project(ready.config, ready.model, None if limit is None and not cut else ready.sample)
        if cut:
            planned.check_layouts(ready.plan, size)
        if limit is not None:
            needed = needs(planned.estimate(planned.config, size), planned.device)
            if needed > limit:
                others = alternatives(start.project, start.options, planned, size)
                advice = nearest(planned, others, size, limit)
                raise UserError(
                    f"a rank needs {show_bytes(needed)} of memory, but its device has {show_bytes(limit)}"
                    f"{f'; {advice}' if advice else ''}; `{command('plan')}` shows other layouts, and --no-fit-check "
                    f"starts the run anyway"
                )
