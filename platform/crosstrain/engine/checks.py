"""Check that the parts of a run fit together, before and while the parts are built."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.data.dataset import Dataset
from crosstrain.data.tokenizer import TOKENIZER, vocabulary
from crosstrain.distributed.launch.launch import Launch
from crosstrain.engine.float8 import MULTIPLE, fits
from crosstrain.engine.runner import Runner, context_size, runner_class
from crosstrain.modeling.base import Model
from crosstrain.modeling.objective import Objective
from crosstrain.utils.errors import ConfigError

_MOST_RANKS = 2**16


def check_layout(config: Config, world_size: int, hint: Callable[[int], str] | None = None, step: int = 1) -> None:
    """Raise ConfigError if the runner's layout does not fit `world_size` ranks.

    The message ends with `hint(size)`. `size` is the next larger world size that fits, in increments of `step`.
    """
    size_of = partial(runner_class(config.run).data_parallel_size, config.run.runner.options)
    try:
        size_of(world_size)
    except ConfigError as error:
        for size in range(world_size + step, _MOST_RANKS, step):
            if hint and not _is_refused(size_of, size):
                raise ConfigError(f"{error}; {hint(size)}") from error
        raise


def _is_refused(size_of: Callable[[int], int], world_size: int) -> bool:
    try:
        return not size_of(world_size)
    except ConfigError:
        return True


def check_continues(config: Config, how: Launch) -> None:
    """Raise ConfigError if the run cannot go on in the same processes when a worker is lost."""
    if how.joined:
        raise ConfigError(
            "run.on_lost_rank: continue needs workers that this program starts itself (not torchrun, srun or mpirun); "
            "use --nnodes, or restart"
        )
    if not runner_class(config.run).capabilities.rejoins:
        raise ConfigError(
            f"run.on_lost_rank: {config.run.runner.name} cannot leave its process groups and form new ones "
            f"(`Capabilities.rejoins`); use restart"
        )


def possible_sizes(config: Config, largest: int) -> list[int]:
    """Numbers of workers up to `largest` that suit the runner and the batch sizes."""
    return [size for size in range(1, largest + 1) if not _is_refused(lambda n: batch_plan(config, n).dp_size, size)]


def batch_plan(config: Config, world_size: int) -> BatchPlan:
    """Compute the batch sizes of the configured runner on `world_size` workers, before the workers start.

    Raises ConfigError if the layout, the batch sizes or the run's other settings are incompatible.
    """
    name, run = config.run.runner.name, config.run
    runner = runner_class(run)
    runner.check(run.runner.options, run)
    if not runner.capabilities.exact and run.amp.dtype == "fp16":
        raise ConfigError(f"run.amp: fp16 needs one loss scale for all ranks, which {name} does not support; use bf16")
    if not runner.capabilities.exact and run.on_bad_step.policy != "stop":
        raise ConfigError(f"run.on_bad_step: with {name}, a bad step affects only one rank; use stop")
    return BatchPlan.of(run, runner.data_parallel_size(run.runner.options, world_size))


def check_fit(objective: Objective, dataset: Dataset) -> None:
    """Raise ConfigError if the objective or its model cannot take the dataset's samples."""
    model = objective.model
    if objective.row_layout != dataset.row_layout:
        theirs, ours = (layout or "plain samples" for layout in (objective.row_layout, dataset.row_layout))
        raise ConfigError(
            f"run.objective: the objective takes {theirs}, but the dataset has {ours}; choose a different objective, "
            f"or change the dataset or its options"
        )
    check_vocabulary(model, dataset.vocab_size)
    model.check_dataset(dataset)
    if dataset.documents:
        model.structure.check_documents()
    check_tokenizer(model.weights.folder(), dataset)
    if dataset.sequence_length and model.max_length and dataset.sequence_length > model.max_length:
        raise ConfigError(
            f"datasets: samples have {dataset.sequence_length} tokens, but the model takes at most {model.max_length}: "
            f"lower the dataset's seq_length or max_length, or give the model more positions"
        )


def check_vocabulary(model: Model, ids: int | None) -> None:
    """Raise ConfigError if the tokenizer has more IDs than the model's vocabulary."""
    if ids and model.vocab_size and ids > model.vocab_size:
        raise ConfigError(
            f"model: a vocab_size of {model.vocab_size} is too small for the {ids} IDs of the dataset's tokenizer: set "
            f"vocab_size={ids} for a new model, or prepare the data with the tokenizer of the pretrained model"
        )


def check_tokenizer(folder: Path | None, dataset: Dataset) -> None:
    """Raise ConfigError if the dataset and the tokenizer.json in the weights' `folder` map an ID to different tokens.

    IDs that exist only in the dataset's vocabulary are ignored.
    """
    ours = dataset.tokenizer_path
    if folder is None or ours is None or not all((f / TOKENIZER).is_file() for f in (folder, ours)):
        return
    if (folder / TOKENIZER).read_bytes() == (ours / TOKENIZER).read_bytes():
        return
    theirs = {number: token for token, number in vocabulary(folder / TOKENIZER).items()}
    found = sorted((number, token) for token, number in vocabulary(ours / TOKENIZER).items())
    if changed := [(number, token) for number, token in found if theirs.get(number, token) != token]:
        number, token = changed[0]
        raise ConfigError(
            f"the data was prepared with a different tokenizer than the weights in {folder}: {len(changed)} IDs "
            f"differ, the first is {number}, {token!r} in the data and {theirs[number]!r} there; prepare the data with "
            f"tokenizer={folder}"
        )


def check_held(model: Model, runner: type[Runner], config: Config) -> None:
    """Raise ConfigError if the runner cannot train this model with the configured options."""
    if (ranks := context_size(config.run.runner.options)) > 1:
        if config.run.objective is not None:
            raise ConfigError("run.runner.context_parallel: run.objective needs whole sequences; remove one of the two")
        if config.run.amp.linear == "float8":
            raise ConfigError(
                "run.runner.context_parallel: float8 needs the scales of whole sequences; remove one of the two"
            )
        model.structure.check_context(ranks)
    if model.weights.quantized() and not runner.capabilities.takes_quantized:
        adapter, name = config.adapter and config.adapter.name, config.run.runner.name
        raise ConfigError(f"model.adapter: {adapter} quantizes weights, which {name} cannot train; use ddp or fsdp")
    if not runner.capabilities.exact and any(r.bias_rate for r in model.structure.routers()):
        raise ConfigError("model.router_bias_rate: the routers need the choices of all ranks in each step; set it to 0")
    if config.run.amp.linear == "float8":
        if config.run.amp.dtype != "bf16":
            raise ConfigError(f"run.amp.linear: float8 needs dtype=bf16, not {config.run.amp.dtype}")
        if not any(fits(module) for block in model.blocks() for module in block.modules()):
            raise ConfigError(
                f"run.amp.linear: the model's blocks have no linear layer (torch.nn.Linear) whose sizes are multiples "
                f"of {MULTIPLE}; remove the option, or choose a different model"
            )
