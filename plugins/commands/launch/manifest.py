"""Manifests that start a project on a cluster, rendered from the templates in configs/launch/."""

import argparse
import math
import re
import shlex
from typing import Any

from crosstrain import UserError, load_config, require
from crosstrain.utils import paths
from crosstrain.utils.storage import is_url

from ..plan.fit import USABLE, needs
from ..plan.plan import plan
from ..units import show_bytes
from .command import FLAGS

_HOST = 8  # GiB of host memory per rank, for libraries, the device's context and samples in flight
_SHARED = 16  # GiB of shared memory, for NCCL and data loading
_SAVED = 5e8  # assumed minimum speed of saving a checkpoint, in bytes per second per machine
_RESTARTS = 20
_VOLUME = "/crosstrain"  # mount path of the volume in the pods' templates
_GIB = 2**30


def manifest(arguments: argparse.Namespace, gpus: dict[str, int]) -> str:
    """Return the manifest that starts a project on a cluster.

    arguments: flags of `crosstrain launch`. gpus: name -> GiB of device memory. Raises UserError for a flag that the
    target does not use, and for a project that `crosstrain plan` refuses.
    """
    project, options, nodes = arguments.cfg_path, arguments.options, arguments.nodes
    template, wanted = _template(arguments.to)
    defaults = {flags.split()[0][2:].replace("-", "_"): default for flags, (default, _) in FLAGS.items()}
    given = {flag: value for flag in defaults if (value := getattr(arguments, flag)) is not None}
    if unused := [flag for flag in given if flag not in wanted]:
        raise UserError(f"--{unused[0].replace('_', '-')}: --to {arguments.to} does not use it; leave it out")
    config = load_config(project, options)
    output = config.run.output_dir
    if "claim" in wanted and not is_url(output) and not re.match(rf"({_VOLUME}/)?(output|data)/", f"{output}/"):
        raise UserError(
            f"run.output_dir: {output} is not on the pods' volume, and would be lost with the pods; use a folder below "
            f"output/, which is on the volume, or a bucket"
        )
    on_gpu = config.run.device != "cpu"
    nproc = arguments.nproc_per_node or (8 if on_gpu else 1)
    made = plan(project, [*options, "run.device=cuda"] if on_gpu else options, world_size=nodes * nproc, presets=False)
    on_device = needs(made.chosen, made.project.device)
    fitting = [name for name, size in gpus.items() if on_device <= USABLE * size * _GIB]
    if on_gpu and "gpus" in wanted and not ("gpu" in given or fitting):
        raise UserError(
            f"a rank needs {show_bytes(on_device)} of memory, more than any known GPU has; see `crosstrain plan`"
        )
    host = nproc * (_HOST + made.chosen.memory.on_host / _GIB) + _SHARED
    file = paths.find(project)
    restarts = config.run.max_restarts or _RESTARTS
    facts = defaults | {
        "name": re.sub("[^a-z0-9]+", "-", file.stem.lower()).strip("-"),
        "grace": max(300, math.ceil(60 + made.project.checkpoint_bytes / nodes / _SAVED)),
    }
    facts |= given | {flag: dict(given[flag]) for flag in ("env", "node_selector") if flag in given}
    return template.render(
        facts, project=project, made_by=shlex.join(["crosstrain", *arguments.words]), output=output,
        file=re.sub("[^-._a-zA-Z0-9]", "_", file.name),
        text=file.read_text(encoding="utf-8").rstrip(),
        options=[*options, *([] if config.run.max_restarts else [f"run.max_restarts={restarts}"])],
        restarts=restarts, nodes=nodes, nproc=nproc, nproc_per_node=arguments.nproc_per_node,
        gpus_per_node=nproc if on_gpu else 0, gpus=[given["gpu"]] if "gpu" in given else fitting,
        device_memory=show_bytes(on_device), cpus=nproc * (2 + max(config.run.num_workers, 2)),
        memory=8 * math.ceil(host / 8), shared_memory=_SHARED,
    )  # fmt: skip


def _template(to: str) -> tuple[Any, set[str]]:
    """Return the template of a target, and the names of the values that the template uses."""
    jinja2, meta = (require(module, "crosstrain launch") for module in ("jinja2", "jinja2.meta"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.home() / "configs" / "launch"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    wanted, sources = set[str](), [f"{to}.jinja"]
    for source in sources:
        tree = environment.parse(environment.loader.get_source(environment, source)[0])
        wanted |= meta.find_undeclared_variables(tree)
        sources += filter(None, meta.find_referenced_templates(tree))
    return environment.get_template(sources[0]), wanted | ({"gpu"} if "gpus" in wanted else set())
