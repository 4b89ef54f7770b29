"""The size of a model's activations before training and after a few steps, for several widths.

With the right parametrization, the sizes do not depend on the width (Yang et al., "Tensor Programs V", 2022, appendix
D.1, calls this a coordinate check).
"""

import math
from collections.abc import Sequence
from itertools import islice
from tempfile import TemporaryDirectory

from crosstrain import load_config
from crosstrain.data.splits import prepare_data
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.build import make_runner
from crosstrain.training.worker import build_trainer

from ..compare.forward import Activations

Sizes = dict[str, float]  # module -> root mean square of its output
_SHOWN = 12  # modules in the table


def measure(project: str, options: Sequence[str], steps: int) -> tuple[Sizes, Sizes]:
    """Train one width in this process; return the sizes in the first step, and those after `steps` steps."""
    with TemporaryDirectory(prefix="coordinates-") as folder:
        own = [f"run.output_dir={folder}", "run.max_epoch=null", f"run.max_iters={steps + 1}", "run.save_interval=null"]
        config = load_config(project, [*options, *own])
        prepare_data(config)
        runner = make_runner(config)
        runner.setup()
        trainer = build_trainer(config, runner, StopRequest(True), quiet=True, hooks_before={}, hooks_after={})
        batches = trainer.batches()
        first = next(batches)
        activations = Activations(runner.model, runner.world)
        found = list[Sizes]()
        for step in [first, *islice(batches, steps - 1), first]:
            activations.clear()
            trainer.train_step(iter([step]))
            found.append({module: math.sqrt(output) for module, (_, output, _) in activations.means().items()})
        trainer.folder.release()
        runner.close()
    return found[0], found[-1]


def table(widths: Sequence[tuple[Sizes, Sizes]]) -> str:
    """Return the sizes of the modules whose size after training changes most over the widths, as text."""

    def change(module: str) -> float:
        sizes = [after.get(module, 0.0) for _, after in widths]
        return max(sizes) / min(sizes) if min(sizes) > 0 else math.inf

    modules = sorted(widths[0][1], key=change, reverse=True)
    length = max(map(len, modules[:_SHOWN]))
    lines = ["root mean square of outputs in the first step -> after training; a column for each width"]
    for module in modules[:_SHOWN]:
        pairs = [f"{before.get(module, 0.0):8.3g} -> {after.get(module, 0.0):<8.3g}" for before, after in widths]
        lines.append(f"{module:<{length}}  {'  '.join(pairs)}  {change(module):.1f} times")
    return "\n".join([*lines, f"the other {max(0, len(modules) - _SHOWN)} modules change less"])
