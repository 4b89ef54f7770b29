"""Build the configured runner, model, optimizer and learning-rate schedule, for training and for evaluation."""

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from crosstrain.checkpoint.boxes import CALLBACK, RUNNER, Shard, shared_kind, team_of
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
from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.config.schema import Component, OptionError
from crosstrain.distributed.group import Group
from crosstrain.engine.checks import check_held
from crosstrain.engine.float8 import convert
from crosstrain.engine.optimizer import optimizer_factory
from crosstrain.engine.runner import Runner, runner_class
from crosstrain.modeling import activation_checkpointing
from crosstrain.modeling.base import Model, no_match
from crosstrain.modeling.context import Context
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.modeling.objective import Objective
from crosstrain.utils.errors import CheckpointError, ConfigError, explained
from crosstrain.utils.logging import log
from crosstrain.utils.trust import limited_to

_MOST_PARAMETERS = 1_000_000  # maximum number of parameter tensors; the largest mixture-of-experts models have 100,000
_LONGEST_BUILD = 120.0  # seconds


def make_runner(config: Config) -> Runner:
    """Create the configured runner. The caller has to call `Runner.setup`."""
    return runner_class(config.run)(config.run.runner.options, config.run)


def make_model(config: Config) -> Model:
    """Build the configured model. Raises ConfigError for pretrained weights in an untrusted configuration."""
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
    return made


def add_adapter(adapter: Component, model: Model, key: str) -> None:
    """Add the configured adapter to a model in place.

    Raises a ConfigError that names the YAML `key` if the model does not support the adapter.
    """
    try:
        registry.get("adapter", adapter.name)(adapter.options).add(model)
    except OptionError as error:
        raise ConfigError(f"{key}.{error}") from error


def model_on_meta(config: Config) -> Model:
    """Build the configured model on the meta device, for checks and plans.

    Raises ConfigError if the model's libraries reject its sizes, if it has too many parameter tensors, or if the build
    takes longer than two minutes.
    """
    what = f"model: {config.model.name} cannot be built with these options"
    with explained(what), parameters_on_meta(at_most=_MOST_PARAMETERS, seconds=_LONGEST_BUILD):
        return make_model(config)


def make_schedule(config: Config, max_iters: int) -> Callable[[int], float]:
    """Build the learning-rate schedule: n -> learning rate of the n-th applied step. n starts at 1.

    Skipped steps do not count. The warmup is linear. After the warmup, a registered function maps n to a value in
    [0, 1], to be scaled to the range from `min_lr` to `init_lr`. `lr_decay_iters` defaults to `max_iters`.
    `warmup_steps` defaults to `warmup_fraction` times `lr_decay_iters`.
    """
    run = config.run
    decay = run.lr_decay_iters or max_iters
    warmup = run.warmup_steps if run.warmup_steps is not None else (run.warmup_fraction or 0.0) * decay
    if warmup >= decay:
        length = "run.lr_decay_iters" if run.lr_decay_iters else "the whole run"
        raise ConfigError(f"run.warmup_steps: a warmup of {warmup:g} steps must be shorter than {length}, {decay}")
    shape = registry.get("lr_scheduler", run.lr_sched.name)(
        warmup_steps=warmup, decay_steps=decay, options=run.lr_sched.options
    )

    def rate(applied: int) -> float:
        if applied <= warmup and warmup > 0:
            return run.init_lr * applied / warmup
        return run.min_lr + (run.init_lr - run.min_lr) * shape(applied)

    return rate


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
    """Build the model on the runner's device; for training, apply freezing, float8 and activation checkpointing."""
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

    Weights are loaded from `checkpoint` if it is given, or else from the model's pretrained folders. The remaining
    weights are initialized. Training also loads the optimizer state of `checkpoint` unless `moments` is False.
    `weights` is passed to `Reader.open`. Returns the frozen parameters that were loaded from pretrained folders;
    checkpoints need not store them.
    """
    model = construct_model(config, runner, lambda: make_model(config), for_training)
    if config.run.compile != "none":
        for module in model.blocks() if config.run.compile == "blocks" else [model]:
            module.compile()  # in place, so that names of parameters do not change
    whole, buffers = model.weights.parameters(), model.weights.buffers()  # before sharding
    names = {*whole, *buffers}
    frozen = {name for name, p in whole.items() if not p.requires_grad}
    runner.prepare(model, optimizer_factory(config, model) if for_training else None)
    kept = runner.objective.keeps if for_training else ()
    for kind in kept:
        runner.held.keep(kind)

    shards = runner.held.shards()
    parameters = [s for s in shards if s.kind == "param"]
    reader = Reader.open(checkpoint, weights) if checkpoint is not None else None
    pretrained = PretrainedWeights.of(model)
    if reader is not None:
        wanted = _wanted_shards(reader, shards, runner.world, config, kept, moments=for_training and moments)
        borrowed = load_shards(reader, wanted, pretrained, names)
        runner.held.stored = {shard.kind for shard in wanted}
    else:
        for line in pretrained.summary(names | model.weights.quantized().keys()):
            log.info("%s", line)
        published = pretrained.fill(parameters)
        fill_initial(model, [s for s in parameters if s.name not in {*published, *buffers}], config.run.seed)
        borrowed = {name for name, source in published.items() if name in frozen and not source.of_model}
    # For frozen parameters from pretrained folders, checkpoints record hashes instead of values.
    hashes = fingerprints(pretrained.as_published([s for s in parameters if s.name in borrowed]), runner.world)
    hashes |= fill_quantized(model, pretrained)
    trained_with = [earlier for source, earlier in pretrained.parts if source.of_model] if reader is None else [reader]
    for earlier in trained_with:
        check_frozen(earlier, hashes)
    runner.loaded()
    for kind in kept:
        if reader is None or RUNNER + kind not in reader.kinds():
            runner.held.keep(kind)  # the weights at the start of training
    return {name: recorded for name, recorded in hashes.items() if name in frozen}


def _wanted_shards(
    reader: Reader, shards: list[Shard], world: Group, config: Config, kept: Collection[str], *, moments: bool
) -> list[Shard]:
    """Select the shards to load from a checkpoint: all stored shards, or only parameters if `moments` is False.

    kept: the objective's copies of the weights, which are always loaded. The optimizer state of a team may be loaded
    from a shared state, and otherwise from the first team's. The checkpoint may lack the runner's own tensors; tensors
    of other runners are ignored. With `moments`, raises CheckpointError unless the checkpoint holds exactly the kinds
    of state that the configured optimizer keeps. Collective if `moments` is True.
    """
    found = reader.kinds()
    if not moments:
        copies = [s for s in shards if s.kind in {RUNNER + kind for kind in kept}]
        return [s for s in shards if s.kind == "param"] + as_stored(found, copies)
    kinds = set[str]().union(*world.all_gather({s.kind for s in shards}))  # a rank may have no trainable parameter
    there, here = (  # kinds of optimizer state
        {kind for kind in map(shared_kind, of) if not kind.startswith((CALLBACK, RUNNER))} - {"param"}
        for of in (found, kinds)
    )
    if there != here:
        raise CheckpointError(
            f"{reader.folder}: has the optimizer state {_list(there)}, but {config.run.optimizer.name} keeps "
            f"{_list(here)}; resume with the optimizer that was used, or reset the optimizer state with "
            f"run.resume_optimizer=false"
        )
    if any(shared_kind(kind) in here and not {kind, shared_kind(kind)} & found for kind in kinds):
        log.info("%s has an optimizer state for each team of ranks; the first one is used", reader.folder)
    if left := {kind for kind in found if kind.startswith(RUNNER)} - kinds:
        log.info("not loaded from %s: %s", reader.folder, _list(left))
    return as_stored(found, shards)


def as_stored(kinds: set[str], shards: list[Shard]) -> list[Shard]:
    """Select the shards that can be filled from tensors of these `kinds`, and give them the names of these kinds.

    The n-th team takes the own tensors of the n-th team among `kinds`. Further teams take the first one's, but no
    tensors of its runner.
    """
    out, own = [], defaultdict[str, list[str]](list)  # own: kind without its team -> kinds of the teams, in order
    for kind in sorted(kinds, key=team_of):
        if team_of(kind) >= 0:
            own[shared_kind(kind)].append(kind)
    for shard in shards:
        shared, team = shared_kind(shard.kind), team_of(shard.kind)
        names = [shared] if shared.startswith(RUNNER) else [shared, *own[shared]]
        if team >= 0:
            names = [*own[shared][team : team + 1], *names]
        out += [replace(shard, kind=name) for name in names if name in kinds][:1]
    return out


def _list(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds)) or "no state"
