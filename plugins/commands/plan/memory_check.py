"""Check the memory and disk space of a training run before it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from crosstrain import PreflightCheck, Start, registry

from ..units import read_bytes
from .flags import add_budget, budget, show


@registry.register_preflight("memory_fit")
class MemoryCheck(PreflightCheck):
    """Refuse a training run that needs more memory than its devices have; a dry run prints the plan."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--no-fit-check", dest="fit_check", action="store_false", help="start although the memory is too small"
        )
        add_budget(parser)

    def run(self, start: Start, given: Mapping[str, Any]) -> None:
        """Raise UserError if the model cannot be sharded this way, or (on the first launcher) memory is too small."""
        from .api import alternatives, plan_of
        from .estimate import Project
        from .fit import check_memory, gpu_memory, lack_of_space

        ready, size = start.ready, start.world_size
        if start.dry:
            show(plan_of(start.project, start.options, ready, size, **budget(given)), given)
            return
        limit = None
        if start.first and given["fit_check"]:
            asked = given["device_memory"]
            limit = read_bytes(asked, "--device-memory") if asked else gpu_memory(ready.config)
        cut = ready.runner.capabilities.cuts_models
        planned = Project(ready.config, ready.model, None if limit is None and not cut else ready.sample)
        if cut:
            planned.check_layouts(ready.plan, size)
        if limit is not None:
            check_memory(planned, size, limit, lambda: alternatives(start.project, start.options, planned, size))
        if not start.first:
            return
        assert ready.max_iters is not None, "the data has been opened"
        if lack := lack_of_space(planned, ready.max_iters, start.fresh):
            print(f"note: {lack}", file=sys.stderr)
