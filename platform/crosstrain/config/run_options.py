"""Options of the section `run` of a configuration."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Interval, MinLen

from crosstrain.config.bounds import FilePath, NonNegativeFloat, NonNegativeInt, PositiveInt, Text
from crosstrain.config.schema import Component, NoOptions, OptionError
from crosstrain.utils.errors import ConfigError

Steps = Annotated[int, Interval(ge=1, le=10**12)]
Every = Steps | Literal["epoch"] | None  # steps between two, or the last step of each epoch; None: none
BatchSize = Annotated[int, Interval(ge=1, le=2**24)]  # samples, or forwards
Scale = Annotated[float, Interval(ge=1e-6, le=1e20)]  # of a loss; fp32 holds it times such
DEFAULT_RUNNER = "ddp"  # with one process, plain torch
DEFAULT_MODEL = "causal_lm"  # of a Hugging Face folder


@dataclass
class AmpOptions:
    """Mixed precision: `amp: bf16` is short for `amp: {dtype: bf16}`. The rest concerns fp16 alone."""

    shorthand: ClassVar = "dtype"
    switches: ClassVar[dict[bool, str]] = {True: "fp16", False: "fp32"}  # `amp: true` is torch's and LAVIS's fp16

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # of the forward under autocast; masters and moments stay fp32
    linear: Literal["float8"] | None = None  # products of the blocks' linear layers in training; None: as dtype
    loss_scale: Scale | None = None  # a fixed scale, in any precision; None: dynamic for fp16, else 1
    initial_scale: Scale = 2.0**32  # where a dynamic scale starts
    window: PositiveInt = 1000  # steps without overflow before the scale doubles
    hysteresis: PositiveInt = 2  # overflows before the scale halves
    min_scale: Scale = 1.0  # a dynamic scale falls no lower
    max_skipped: PositiveInt = 50  # consecutive skipped steps after which training gives up

    def __post_init__(self) -> None:
        if self.min_scale > self.initial_scale:
            raise OptionError("min_scale", f"{self.min_scale:g} is above initial_scale, {self.initial_scale:g}")


@dataclass
class BadStepOptions:
    """Handling of bad steps: `on_bad_step: skip` is short for `on_bad_step: {policy: skip}`.

    A step is bad if its loss is not finite; if its gradients are not, unless fp16's loss scale explains it; or, with
    `spike`, if its loss exceeds `spike` times the median loss of the last `spike_window` good steps.
    """

    shorthand: ClassVar = "policy"

    # stop: end the run; skip: go on with the next samples; roll_back: go back to the last checkpoint without these
    policy: Literal["stop", "skip", "roll_back"] = "stop"
    # factor on the median loss above which a step is bad; None: a loss may jump as it likes
    spike: Annotated[float, Interval(gt=1, le=1e6)] | None = None
    # good steps that the median is of; nothing is a spike before there are so many
    spike_window: Annotated[int, Interval(ge=1, le=10**6)] = 100
    # bad steps without a good one, or roll backs to one checkpoint, after which training ends
    max_in_a_row: PositiveInt = 10


@dataclass
class ProfileOptions:
    """Steps that torch's profiler records, and the details that it records."""

    steps: list[int] | list[list[int]]  # [first, last], or several such windows; attempted steps
    ranks: Annotated[list[NonNegativeInt], MinLen(1)] = field(default_factory=lambda: [0])  # which ranks are profiled
    record_shapes: bool = False  # shapes of what operators are given; the table tells them apart then
    with_stack: bool = False  # lines of the source that called them: large traces, slow steps
    profile_memory: bool = True  # allocations, and memory over time
    top: Annotated[int, Interval(ge=1, le=10_000)] = 30  # rows of the table of operators

    def __post_init__(self) -> None:
        if not all(len(w) == 2 and 1 <= w[0] <= w[1] for w in self.windows):
            raise OptionError("steps", "expected [first, last], such as [2, 4], or several such windows")
        for (first, last), (start, end) in pairwise(self.windows):
            if start <= last:
                raise OptionError("steps", f"the windows {first} to {last} and {start} to {end} overlap")

    @property
    def windows(self) -> list[tuple[int, ...]]:
        """The windows [(first, last), ...] in order."""
        several = [tuple(window) for window in self.steps if isinstance(window, list)]
        one = tuple(bound for bound in self.steps if isinstance(bound, int))
        return sorted(several or [one])

    def check(self, max_iters: int, world_size: int) -> None:
        """Raise ConfigError for a window or a rank that the run does not have."""
        for first, last in self.windows:
            if last > max_iters:
                steps = f"the window {first} to {last} does not end before the run, whose last step is {max_iters}"
                raise ConfigError(f"run.profile.steps: {steps}")
        if (last := max(self.ranks)) >= world_size:
            raise ConfigError(f"run.profile.ranks: there is no rank {last}; the last one is {world_size - 1}")


@dataclass
class LogOptions:
    """Lines of a logged step: `log: megatron` is short for `log: {format: megatron}`."""

    shorthand: ClassVar = "format"

    # plain: one line for people; megatron: the lines of Megatron-LM's log, for programs that read those
    format: Literal["plain", "megatron"] = "plain"
    timers: bool = False  # a second line with the time of each phase of the step; megatron always has it


@dataclass
class CurriculumOptions:
    """Short sequences first: the length of the samples as a function of the step.

    The lengths are the same under every runner, batch layout and after any resume.
    """

    start: PositiveInt  # tokens of a sample in the first steps
    steps: PositiveInt  # from this step on samples are whole
    multiple_of: PositiveInt = 8  # lengths are rounded down to it
    # 1: the length grows linearly; 2: with the square root of the step, and so on
    degree: Annotated[float, Interval(ge=1, le=100)] = 1.0

    def __post_init__(self) -> None:
        if self.start % self.multiple_of:
            raise OptionError("start", f"{self.start} is not a multiple of {self.multiple_of} (multiple_of)")

    def check(self, full: int | None) -> int:
        """Return the dataset's whole length. Raises ConfigError where there is none or it is below `start`."""
        if full is None:
            raise ConfigError("run.curriculum: the dataset's samples have no common length, so none can be scheduled")
        if self.start > full:
            raise ConfigError(f"run.curriculum.start: {self.start} is more than the dataset's seq_length, {full}")
        return full

    def length(self, step: int, full: int) -> int:
        """Return the tokens of a sample in a step, counted from 1.

        As `fixed_linear` and `fixed_root` of DeepSpeed's curriculum_scheduler.py, at whose end samples are whole.
        """
        if step >= self.steps:
            return full
        grown = math.floor((step / self.steps) ** (1 / self.degree) * (full - self.start) + self.start)
        return min(max(grown - grown % self.multiple_of, self.start), full)


# Keys of `run` of which one is given, and what both say.
EXCLUSIVE = (("warmup_fraction", "warmup_steps", "long the warmup is"), ("max_epoch", "max_iters", "long to train"))


# Keys of other programs, and ours.
@dataclass
class RunOptions:
    """Options of a training run. Steps are attempted optimizer steps; a sample is one row of a batch.

    Raises OptionError, a ConfigError, for values that cannot go together.
    """

    output_dir: FilePath  # path or URL of the run's folder: config.yaml, log.txt, metrics.jsonl, checkpoints/ ...
    # where a step is computed and what each rank holds: a runner or a preset
    runner: Annotated[Component, "runner"] = field(default_factory=lambda: Component(DEFAULT_RUNNER))
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    seed: NonNegativeInt = 1234  # of initial values, sample order, dropout and augmentation
    plugins: list[FilePath] = field(default_factory=list)  # further folders and .py files of plugins
    # how often all workers start again, from the newest checkpoint, after one has died
    max_restarts: NonNegativeInt = 0

    # Length: exactly one of the two.
    max_iters: Steps | None = None  # attempted steps
    max_epoch: Annotated[int, Interval(ge=1, le=10**6)] | None = None  # passes over the training data

    # Batch: global = micro x accumulation x data-parallel ranks; what is not given follows, or is 1.
    global_batch_size: BatchSize | None = None  # samples per step
    micro_batch_size: BatchSize | None = None  # samples per forward on one rank
    accum_grad_iters: BatchSize | None = None  # forwards per step on one rank

    # Optimization

    # what is minimised, in place of the targets' cross-entropy
    objective: Annotated[Component, "objective"] | None = None
    # rule of the update
    optimizer: Annotated[Component, "optimizer"] = field(default_factory=lambda: Component("adamw"))
    # highest learning rate, reached when warmup ends
    init_lr: Annotated[float, Gt(0), Interval(ge=1e-12, le=10_000)] = 1e-4
    min_lr: NonNegativeFloat = 0.0  # where the schedule ends
    # of parameters with two or more dimensions
    weight_decay: Annotated[float, Interval(ge=0, le=10_000)] = 0.01
    grad_norm_clip: NonNegativeFloat | None = 1.0  # largest global gradient norm; 0 or None: off
    # shape of the learning rate after the warmup
    lr_sched: Annotated[Component, "lr_scheduler"] = field(default_factory=lambda: Component("cosine"))
    warmup_steps: NonNegativeInt | None = None  # applied steps of linear warmup
    # the same as a fraction of lr_decay_iters; neither: no warmup
    warmup_fraction: Annotated[float, Interval(ge=0, lt=1)] | None = None
    lr_decay_iters: Steps | None = None  # step at which the schedule reaches min_lr; None: the last one

    freeze: list[Text] = field(default_factory=list)  # patterns of parameter names that are not trained

    # Precision and memory

    amp: AmpOptions = field(default_factory=AmpOptions)
    # what a block keeps for its backward: everything, its input, also products and attention, its input in host memory
    gradient_checkpointing: Literal["none", "full", "selective", "offload"] = "none"
    compile: Literal["none", "blocks", "model"] = "none"  # what torch.compile gets

    # Reporting
    log_interval: Steps = 10  # steps between two log lines
    log: LogOptions = field(default_factory=LogOptions)
    # steps between two evaluations of val, and one at the end; epoch: at the end of each; None: no validation
    eval_interval: Every = None
    eval_iters: Steps = 10  # global batches per evaluation
    # numbers of a task that validation and evaluation give besides the loss
    metrics: list[Annotated[Component, "metric"]] = field(default_factory=list)
    sample_prompts: list[Text] = field(default_factory=list)  # continued and shown when training ends
    sample_tokens: Annotated[int, Interval(ge=1, le=2**20)] = 64  # length of those continuations

    # what is called at steps, validations and saves
    callbacks: list[Annotated[Component, "callback"]] = field(default_factory=list)

    # where the numbers go; jsonl is always among them
    trackers: list[Annotated[Component, "tracker"]] = field(
        default_factory=lambda: [Component("jsonl"), Component("tensorboard")]
    )

    profile: ProfileOptions | None = None  # None: no step is profiled

    # Checkpoints: one is always saved after the last step.
    save_interval: Every = None  # steps between two; epoch: at the end of each; None: only after the last step
    save_in_background: bool = True  # training goes on meanwhile, beside a copy of each rank's share in host memory
    keep_last: PositiveInt | None = 3  # checkpoints; older ones are deleted; None: keep all
    keep_every: Steps | None = None  # checkpoints at multiples of this many steps are never deleted
    save_best: bool = True  # also keep the checkpoint with the lowest validation loss
    resume_from: FilePath | None = None  # path or URL of a checkpoint or a run; None: this run's own latest, if any
    # False: moments start at zero, once: after resume_from, or another model, optimizer or freeze; restarts keep them
    resume_optimizer: bool = True
    on_bad_step: BadStepOptions = field(default_factory=BadStepOptions)

    curriculum: CurriculumOptions | None = None  # short sequences first; None: whole ones from the first step on
    # processes per rank that load data; 0: the rank itself does
    num_workers: Annotated[int, Interval(ge=0, le=256)] = 0
    # seconds by which a rank may enter a collective late; None: no watchdog
    collective_timeout: Annotated[float, Interval(ge=0.1, le=10**7)] | None = 600.0

    def __post_init__(self) -> None:
        if "jsonl" not in (tracker.name for tracker in self.trackers):
            self.trackers = [Component("jsonl", NoOptions()), *self.trackers]
        for key in ("callbacks", "metrics", "trackers"):
            names = [component.name for component in getattr(self, key)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise OptionError(key, f"{twice[0]} is named twice")
        if self.on_bad_step.policy == "roll_back":
            if self.save_interval is None:
                raise OptionError("on_bad_step", "roll_back needs checkpoints: set save_interval, or use skip")
            if not self.resume_optimizer:
                raise OptionError("resume_optimizer", "roll_back needs the optimizer's moments: use on_bad_step=skip")
        if 0 < (self.grad_norm_clip or 0) < 1e-9:
            raise OptionError("grad_norm_clip", f"{self.grad_norm_clip:g} leaves nothing of a gradient; 0 is no limit")
        if self.min_lr > self.init_lr:
            raise OptionError("min_lr", f"{self.min_lr} is above init_lr, {self.init_lr}")
        for key, other, length in EXCLUSIVE:
            if getattr(self, key) is not None and getattr(self, other) is not None:
                raise OptionError(key, f"{other} already says how {length}; give one of the two")
        if self.max_iters is None and self.max_epoch is None:
            raise OptionError("max_iters", "how long to train is required: give max_iters or max_epoch")
        if self.global_batch_size is self.micro_batch_size is self.accum_grad_iters is None:
            raise OptionError("global_batch_size", "required, unless micro_batch_size or accum_grad_iters is given")
