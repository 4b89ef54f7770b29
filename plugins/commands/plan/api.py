"""Plan a project: estimate its costs under each runner before anything starts."""

from crosstrain import Config, ProjectLike, UserError, load_config
from crosstrain.config.load import preset_files
from crosstrain.config.sources import Overrides, pairs
from crosstrain.distributed.launch.launcher import Launch
from crosstrain.engine.checks import check_layout
from crosstrain.engine.runner import runner_class
from crosstrain.training.preflight import dry_run

from ..units import read_bytes, read_number
from .estimate import Project
from .fit import Alternatives
from .plan import Budget, Plan, make_plan


def plan(
    project: ProjectLike,
    options: Overrides = (),
    *,
    world_size: int | None = None,
    presets: bool = True,
    device_memory: str | None = None,
    throughput: str | None = None,
    tokens_per_second: str | None = None,
    tokens: str | None = None,
) -> Plan:
    """Estimate memory, FLOPs and traffic of a project on `world_size` ranks, without starting any rank.

    The ranks do not have to exist. The last four arguments are strings in the command line's format, such as "24GiB".
    `print` shows the plan, and `Plan.as_json` returns it as JSON values. Raises UserError if no plan is possible.
    """
    budget = Budget(
        device_memory=read_bytes(device_memory, "--device-memory") if device_memory else None,
        throughput=read_number(throughput, "--throughput") if throughput else None,
        tokens_per_second=read_number(tokens_per_second, "--tokens-per-second") if tokens_per_second else None,
        tokens=read_number(tokens, "--tokens") if tokens else None,
    )
    config = load_config(project, options)
    size = world_size or Launch.detect(None, config.run.device).world_size
    check_layout(config, size, lambda n: f"{n} ranks fit" if world_size else f"--world-size {n} plans for {n} ranks")
    ready = dry_run(config, size)
    planned = Project(ready.config, ready.model, ready.sample, ready.absent)
    return make_plan(planned, budget, size, alternatives(project, options, planned, size, presets))


def alternatives(
    project: ProjectLike, options: Overrides, planned: Project, size: int, presets: bool = True
) -> Alternatives:
    """Return one configuration per runner in configs/, and a function that rebuilds the project with more settings."""

    def rebuild(settings: list[str]) -> Project:
        config = load_config(project, [*pairs(options), *settings])
        ready = dry_run(config, size)
        return Project(config, ready.model, planned.sample, ready.absent)

    found: dict[str, Config | str] = {}
    for name in preset_files("runner") if presets else ():
        try:
            found[name] = config = load_config(project, [*pairs(options), ("run.runner", name)])
            for option in runner_class(config.run).capabilities.saves_memory:
                found[f"{name} {option}"] = load_config(
                    project, [*pairs(options), f"run.runner={name}", f"run.runner.{option}"]
                )
        except UserError as error:
            found[name] = str(error)
    return Alternatives(found, rebuild)
