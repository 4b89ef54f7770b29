"""Manifests that start a project on a cluster, rendered from the templates in configs/launch/."""

import math
import re
import shlex
from typing import Any

from crosstrain import UserError, load_config, require
from crosstrain.utils import paths
from crosstrain.utils.storage import is_url

from ..plan.api import plan
from ..plan.fit import USABLE, needs
from ..units import show_bytes

_HOST = 8  # GiB of host memory per rank, for libraries, the device's context and samples in flight
_SHARED = 16  # GiB of shared memory, for NCCL and data loading
_SAVED = 5e8  # minimum number of bytes that a machine saves per second
_RESTARTS = 20
_VOLUME = "/crosstrain"  # mount path of the volume in the pods' templates
_GIB = 2**30


def manifest(
    project: str, options: list[str], to: str, nodes: int, nproc_per_node: int | None, gpus: dict[str, int],
    made_by: str, **given: Any,
) -> str:  # fmt: skip
    """Return the manifest that starts a project on `nodes` machines of the target `to`.

    gpus: name -> GiB of device memory. made_by: the command, shown in the manifest. given: values of the flags `name`,
    `image`, `claim`, `gpu`, `queue`, `account`, `time`, `grace`, `spot`, `secret`, and the mappings `env` and
    `node_selector`; None: not given.

    Raises UserError for a flag that the target does not use, and for a project that `crosstrain plan` refuses.
    """
    template, wanted = _template(to)
    if unused := [flag for flag, value in given.items() if value is not None and flag not in wanted]:
        raise UserError(f"--{unused[0].replace('_', '-')}: --to {to} has no use for it; leave it out")
    config = load_config(project, options)
    output = config.run.output_dir
    if "claim" in wanted and not is_url(output) and not re.match(rf"({_VOLUME}/)?(output|data)/", f"{output}/"):
        raise UserError(
            f"run.output_dir: {output} is on no volume of the pods, and would be gone with them; name a folder below "
            f"output/, which is one, or a bucket"
        )
    on_gpu = config.run.device != "cpu"
    nproc = nproc_per_node or (8 if on_gpu else 1)
    device = ["run.device=cuda"] if on_gpu else []
    made = plan(project, [*options, *device], world_size=nodes * nproc, presets=False)
    on_device = needs(made.chosen, made.project.device)
    fitting = [name for name, size in gpus.items() if on_device <= USABLE * size * _GIB]
    if on_gpu and "gpus" in wanted and not (given.get("gpu") or fitting):
        raise UserError(f"a rank needs {show_bytes(on_device)}, more than any device has: see `crosstrain plan`")
    host = nproc * (_HOST + made.chosen.memory.on_host / _GIB) + _SHARED
    file = paths.find(project)
    restarts = config.run.max_restarts or _RESTARTS
    facts: dict[str, Any] = {
        "name": re.sub("[^a-z0-9]+", "-", file.stem.lower()).strip("-"), "image": "crosstrain", "claim": "crosstrain",
        "queue": None, "account": None, "time": "24:00:00", "spot": False, "env": {}, "secret": None,
        "node_selector": {}, "gpu": None,
        "grace": max(300, math.ceil(60 + made.project.checkpoint_bytes / nodes / _SAVED)),
    }  # fmt: skip
    facts |= {flag: value for flag, value in given.items() if value is not None}
    return template.render(
        facts, project=project, made_by=made_by, output=output, file=re.sub("[^-._a-zA-Z0-9]", "_", file.name),
        text=file.read_text(encoding="utf-8").rstrip(),
        options=[*options, *([] if config.run.max_restarts else [f"run.max_restarts={restarts}"])],
        restarts=restarts, nodes=nodes, nproc=nproc, nproc_per_node=nproc_per_node,
        gpus_per_node=nproc if on_gpu else 0, gpus=[given["gpu"]] if given.get("gpu") else fitting,
        device_memory=show_bytes(on_device), cpus=nproc * (2 + max(config.run.num_workers, 2)),
        memory=8 * math.ceil(host / 8), shared_memory=_SHARED,
    )  # fmt: skip


def _template(to: str) -> tuple[Any, set[str]]:
    """Return the template of a target, and the names of the values that it uses."""
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
