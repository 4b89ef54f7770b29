"""Build the configured runner, model, optimizer and learning-rate schedule, for training and for evaluation."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from crosstrain.checkpoint.boxes import CALLBACK, RUNNER, Shard, shared_kind
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.load_weights import (
    PretrainedWeights,
    check_frozen,
    fill_initial,
    fill_quantized,
    fingerprints,
    load_shards,
)
from crosstrain.checkpoint.manifest import FrozenParameter
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.config.schema import Component, OptionError
from crosstrain.data.dataset import Dataset
from crosstrain.data.tokenizer import TOKENIZER, vocabulary
from crosstrain.distributed.group import Group
from crosstrain.engine.float8 import check_float8, convert
from crosstrain.engine.held_state import REFERENCE
from crosstrain.engine.optimizer import optimizer_factory
from crosstrain.engine.options import context_size
from crosstrain.engine.runner import Runner
from crosstrain.modeling import activation_checkpointing
from crosstrain.modeling.base import Model, no_match
from crosstrain.modeling.context import Context
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.modeling.objective import Objective
from crosstrain.utils.errors import CheckpointError, ConfigError, explained
from crosstrain.utils.logging import log
from crosstrain.utils.trust import limited_to

_MOST_PARAMETERS = 1_000_000  # tensors; ten times as many as in the largest mixture-of-experts models
_LONGEST_BUILD = 120.0  # seconds
_MOST_RANKS = 2**16


def make_runner(config: Config) -> Runner:
    """Create the configured runner; the caller has to call `setup`."""
    return registry.get("runner", config.run.runner.name)(config.run.runner.options, config.run)


def make_model(config: Config) -> Model:
    """Build the configured model. Raises ConfigError if the configuration is not trusted to name pretrained weights."""
    with limited_to(config.trust):
        model: Model = registry.get("model", config.model.name)(config.model.options)
        if config.adapter is not None:
            add_adapter(config.adapter, model.structure.adapted(), "model.adapter")
        return model


def make_objective(config: Config, model: Model) -> Objective:
    """Build the configured objective; the default is the model's own loss.

    Raises ConfigError if the model does not support the objective.
    """
    chosen = config.run.objective
    made = Objective(None) if chosen is None else registry.get("objective", chosen.name)(chosen.options)
    made.attach(model)
    if made.makes_samples and config.run.eval_interval is not None:
        raise ConfigError("run.eval_interval: the objective makes samples in training only; use null")
    return made


def add_adapter(adapter: Component, model: Model, key: str) -> None:
    """Add the configured adapter to a model in place.

    If the model does not support it, raises a ConfigError that names the YAML `key`.
    """
    try:
        registry.get("adapter", adapter.name)(adapter.options).add(model)
    except OptionError as error:
        raise ConfigError(f"{key}.{error}") from error


def model_on_meta(config: Config) -> Model:
    """Build the configured model on the meta device, for checks and plans.

    Raises ConfigError if the model's libraries reject its sizes, if it has too many parameter tensors, or if the build
    takes minutes.
    """
    what = f"model: {config.model.name} cannot be built with these options"
    with explained(what), parameters_on_meta(at_most=_MOST_PARAMETERS, seconds=_LONGEST_BUILD):
        return make_model(config)


def check_layout(config: Config, world_size: int, hint: Callable[[int], str] | None = None, step: int = 1) -> None:
    """Raise ConfigError if the runner's layout does not fit `world_size` ranks.

    The message ends with `hint(size)`, where `size` is the next larger world size that fits, in increments of `step`.
    """
    size_of = partial(registry.get("runner", config.run.runner.name).data_parallel_size, config.run.runner.options)
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


def batch_plan(config: Config, world_size: int) -> BatchPlan:
    """Compute the batch sizes of the configured runner on `world_size` workers; no worker needs to be running.

    Raises ConfigError if the layout, the batch sizes or the run's other settings are incompatible.
    """
    runner = registry.get("runner", config.run.runner.name)
    runner.check(config.run.runner.options, config.run)
    if not runner.capabilities.exact:
        _check_apart(config)
    return BatchPlan.of(config.run, runner.data_parallel_size(config.run.runner.options, world_size))


def _check_apart(config: Config) -> None:
    """Raise ConfigError for settings that need all ranks in every step; this runner's ranks train independently."""
    name, run = config.run.runner.name, config.run
    if run.amp.dtype == "fp16":
        raise ConfigError(f"run.amp: fp16 has one loss scale for all ranks, which {name} does not keep; use bf16")
    if run.on_bad_step.policy != "stop":
        raise ConfigError(f"run.on_bad_step: under {name} a bad step is one rank's only; use stop")


def make_schedule(config: Config, max_iters: int) -> Callable[[int], float]:
    """Build the learning-rate schedule: n -> learning rate of the n-th applied step. n starts at 1.

    Skipped steps do not count. The warmup is linear. After it, a registered function of n returns values in [0, 1],
    which are scaled to the range from `min_lr` to `init_lr`. `lr_decay_iters` defaults to `max_iters`; `warmup_steps`
    defaults to `warmup_fraction` of `lr_decay_iters`.
    """
    run = config.run
    decay = run.lr_decay_iters or max_iters
    warmup = run.warmup_steps if run.warmup_steps is not None else (run.warmup_fraction or 0.0) * decay
    if warmup >= decay:
        length = "run.lr_decay_iters" if run.lr_decay_iters else "the whole run"
        raise ConfigError(f"run.warmup_steps: a warmup of {warmup:g} steps must be shorter than {length}, {decay}")
    make = registry.get("lr_scheduler", run.lr_sched.name)
    shape = make(warmup_steps=warmup, decay_steps=decay, options=run.lr_sched.options)

    def rate(applied: int) -> float:
        if applied <= warmup and warmup > 0:
            return run.init_lr * applied / warmup
        return run.min_lr + (run.init_lr - run.min_lr) * shape(applied)

    return rate


def check_fit(objective: Objective, dataset: Dataset) -> None:
    """Raise ConfigError if the objective or its model cannot take the dataset's samples."""
    model = objective.model
    if objective.row_layout != dataset.row_layout:
        theirs, ours = (layout or "plain samples" for layout in (objective.row_layout, dataset.row_layout))
        raise ConfigError(
            f"run.objective: it takes {theirs}, and the dataset has {ours}; choose another objective, or change the "
            f"dataset or its options"
        )
    check_vocabulary(model, dataset.vocab_size)
    if model.image_size and (others := sorted(dataset.image_sizes - {model.image_size})):
        theirs, ours = (" x ".join(map(str, size)) for size in (others[0], model.image_size))
        raise ConfigError(
            f"datasets: images have {theirs} pixels and the model takes {ours}: give the image_size of every image "
            f"processor and of the model one value"
        )
    if dataset.documents:
        model.structure.check_documents()
    check_tokenizer(model.weights.folder(), dataset)
    if dataset.sequence_length and model.max_length and dataset.sequence_length > model.max_length:
        raise ConfigError(
            f"datasets: samples have {dataset.sequence_length} tokens and the model takes at most {model.max_length}: "
            f"lower the dataset's seq_length or max_length, or give the model more positions"
        )


def check_vocabulary(model: Model, ids: int | None) -> None:
    """Raise ConfigError if the tokenizer has more IDs than the model's vocabulary."""
    if ids and model.vocab_size and ids > model.vocab_size:
        raise ConfigError(
            f"model: a vocab_size of {model.vocab_size} is too small for the dataset, whose tokenizer has {ids} ids: a "
            f"new model needs vocab_size={ids}, data for a pretrained one the model's own tokenizer"
        )


def check_tokenizer(folder: Path | None, dataset: Dataset) -> None:
    """Raise ConfigError if the dataset and the tokenizer.json in the weights' `folder` map an ID to different tokens.

    IDs that exist only in the dataset's vocabulary are not compared.
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
            f"the data was made with another tokenizer than the weights in {folder}: {len(changed)} ids differ, the "
            f"first is {number}, {token!r} in the data and {theirs[number]!r} there; prepare it with "
            f"tokenizer={folder}"
        )


def check_held(model: Model, runner: type[Runner], config: Config) -> None:
    """Raise ConfigError if the runner cannot store the model's quantized parameters or cannot train this model."""
    if (ranks := context_size(config.run.runner.options)) > 1:
        if config.run.objective is not None:
            raise ConfigError("run.runner.context_parallel: run.objective needs whole sequences; leave one of them out")
        model.structure.check_context(ranks)
    if model.weights.quantized() and not runner.capabilities.takes_quantized:
        adapter, name = config.adapter and config.adapter.name, config.run.runner.name
        raise ConfigError(f"model.adapter: {adapter} keeps weights in few bits, which {name} cannot; use ddp or fsdp")
    if not runner.capabilities.exact and any(r.counts_first or r.bias_rate for r in model.structure.routers()):
        raise ConfigError("model.router_loss: routers need all ranks' choices in each step; set router_loss=sequence")
    if config.run.amp.linear == "float8":
        if config.run.amp.dtype != "bf16":
            raise ConfigError(f"run.amp.linear: float8 needs dtype=bf16, not {config.run.amp.dtype}")
        if not runner.capabilities.takes_float8:
            raise ConfigError(f"run.amp.linear: {config.run.runner.name} cannot train in float8; use ddp or fsdp")
        check_float8(model)


def freeze(model: Model, patterns: list[str]) -> None:
    """Freeze the parameters whose canonical names match one of the patterns, such as `transformer.h.0.*`.

    The model may already have frozen other parameters. Raises ConfigError if a pattern matches nothing or if no
    trainable parameter is left.
    """
    parameters = model.weights.parameters()
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise ConfigError(f"run.freeze: {no_match(pattern, parameters)}")
        for name in names:
            parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError("run.freeze: every parameter is frozen, so there is nothing to train")


def construct_model(config: Config, runner: Runner, make: Callable[[], Model], for_training: bool) -> Model:
    """Build the model on the runner's device, with the run's frozen parameters, float8 and activation checkpointing."""
    model = runner.construct(make)
    check_held(model, type(runner), config)
    if runner.context.process_group is not None:
        model.context = Context(runner.context.process_group)
    if for_training:
        freeze(model, config.run.freeze)
        if config.run.amp.linear == "float8":
            convert(model, runner.device)
        for blocks, mode in model.structure.checkpointing(config.run.gradient_checkpointing):
            activation_checkpointing.apply(blocks, mode, runner.precision.autocast)
    runner.objective = make_objective(config, model)
    return model


def build_model(
    config: Config, runner: Runner, checkpoint: Path | None, *, for_training: bool, weights: str | None = None,
    moments: bool = True,
) -> dict[str, FrozenParameter]:  # fmt: skip
    """Set up the runner with the model, its weights and, for training, the optimizer.

    Weights come from `checkpoint` if given, otherwise from the model's pretrained folders, otherwise from
    initialization. Training also loads the optimizer state of `checkpoint` unless `moments` is False. `weights` is
    passed to `Reader.open`. Returns the frozen parameters loaded from pretrained folders; checkpoints need not store
    them.
    """
    model = construct_model(config, runner, lambda: make_model(config), for_training)
    if config.run.compile != "none":
        for module in model.blocks() if config.run.compile == "blocks" else [model]:
            module.compile()  # in place, so that names of parameters do not change
    whole, buffers = model.weights.parameters(), model.weights.buffers()  # before sharding
    names = {*whole, *buffers}
    frozen = {name for name, p in whole.items() if not p.requires_grad}
    runner.prepare(model, optimizer_factory(config, model) if for_training else None)
    if for_training and runner.objective.keeps_reference:
        runner.held.keep(REFERENCE)

    shards = runner.held.shards()
    parameters = [s for s in shards if s.kind == "param"]
    reader = Reader.open(checkpoint, weights) if checkpoint is not None else None
    pretrained = PretrainedWeights.of(model)
    if reader is not None:
        reference = [s for s in shards if s.kind == RUNNER + REFERENCE]
        wanted = parameters + as_stored(reader.kinds(), reference)
        if for_training and moments:
            wanted = _stored_shards(reader, shards, runner.world, config)
        reader.stage([s for s in wanted if (s.kind, s.name) in reader.tensors], runner.world)
        borrowed = load_shards(reader, wanted, pretrained, names)
    else:
        for line in pretrained.summary(names | model.weights.quantized().keys()):
            log.info("%s", line)
        published = pretrained.fill(parameters)
        fill_initial(model, [s for s in parameters if s.name not in {*published, *buffers}], config.run.seed)
        borrowed = {name for name, source in published.items() if name in frozen and not source.of_model}
    hashes = fingerprints(pretrained.as_published([s for s in parameters if s.name in borrowed]), runner.world)
    hashes |= fill_quantized(model, pretrained)
    trained_with = [earlier for source, earlier in pretrained.parts if source.of_model] if reader is None else [reader]
    for earlier in trained_with:
        check_frozen(earlier, hashes)
    runner.loaded()
    if REFERENCE in runner.held.extra and (reader is None or RUNNER + REFERENCE not in reader.kinds()):
        runner.held.keep(REFERENCE)  # the weights at the start of training
    return {name: recorded for name, recorded in hashes.items() if name in frozen}


def _stored_shards(reader: Reader, shards: list[Shard], world: Group, config: Config) -> list[Shard]:
    """Match shards to the kinds in the checkpoint; a rank's own copy may be loaded from the copy shared by all ranks.

    The checkpoint may lack the runner's own tensors; other runners' tensors are ignored. Raises CheckpointError unless
    the checkpoint holds exactly the kinds of state that the configured optimizer keeps. Collective.
    """
    found = reader.kinds()
    kinds = set[str]().union(*world.all_gather({s.kind for s in shards}))  # a rank may have no trainable parameter
    there, here = (_optimizer_kinds(of) for of in (found, kinds))
    if there != here:
        raise CheckpointError(
            f"{reader.folder}: holds {_list(there)} of an optimizer, and {config.run.optimizer.name} keeps "
            f"{_list(here)}; resume with the optimizer that was used, or start its state anew with "
            f"run.resume_optimizer=false"
        )
    if lacking := sorted(kind for kind in kinds if shared_kind(kind) in here and not {kind, shared_kind(kind)} & found):
        raise CheckpointError(
            f"{reader.folder}: has each rank's own copies of the optimizer's state, without {lacking[0]}; resume under "
            f"the same runner on as many ranks, or start the state anew with run.resume_optimizer=false"
        )
    if left := {kind for kind in found if kind.startswith(RUNNER)} - kinds:
        log.info("left behind in %s: %s", reader.folder, _list(left))
    return as_stored(found, shards)


def as_stored(kinds: set[str], shards: list[Shard]) -> list[Shard]:
    """Select the shards that a checkpoint with these `kinds` can fill, renamed to the checkpoint's kinds."""
    stored = [replace(s, kind=s.kind if s.kind in kinds else shared_kind(s.kind)) for s in shards]
    return [s for s in stored if s.kind in kinds]


def _optimizer_kinds(kinds: set[str]) -> set[str]:
    """Select the kinds of optimizer state among the kinds of a checkpoint or a runner."""
    shared = {shared_kind(kind) for kind in kinds if not kind.startswith(CALLBACK)}
    return {kind for kind in shared if not kind.startswith(RUNNER)} - {"param"}


def _list(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds)) or "no state"
