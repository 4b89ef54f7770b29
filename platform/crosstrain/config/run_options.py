"""Options of the section `run` of a configuration."""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Interval, MinLen

from crosstrain.config.bounds import FilePath, NonNegativeFloat, NonNegativeInt, PositiveInt, Text
from crosstrain.config.schema import Component, NoOptions, OptionError
from crosstrain.utils.errors import ConfigError

Steps = Annotated[int, Interval(ge=1, le=10**12)]
Every = Steps | Literal["epoch"] | None  # interval in steps; epoch: the last step of each epoch; None: never
BatchSize = Annotated[int, Interval(ge=1, le=2**24)]  # number of samples or of forward passes
Scale = Annotated[float, Interval(ge=1e-6, le=1e20)]  # loss scale; fp32 must be able to hold the scaled loss
DEFAULT_RUNNER = "ddp"  # with only one process, training is plain torch
DEFAULT_MODEL = "causal_lm"  # the model that opens a plain Hugging Face folder


@dataclass
class AmpOptions:
    """Mixed precision: `amp: bf16` is short for `amp: {dtype: bf16}`. A dynamic loss scale is only for fp16."""

    shorthand: ClassVar = "dtype"
    switches: ClassVar[dict[bool, str]] = {True: "fp16", False: "fp32"}  # `amp: true` means fp16, as in torch and LAVIS

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # autocast dtype; master weights and moments stay fp32
    linear: Literal["float8"] | None = None  # dtype of matmuls in the blocks' linear layers; None: same as dtype
    loss_scale: Scale | None = None  # fixed loss scale, in any precision; None: dynamic for fp16, else 1
    initial_scale: Scale = 2.0**32  # initial value of a dynamic loss scale
    window: PositiveInt = 1000  # steps without overflow before the scale doubles
    hysteresis: PositiveInt = 2  # number of overflows before the scale is first halved
    min_scale: Scale = 1.0  # lower bound of a dynamic scale
    max_skipped: PositiveInt = 50  # consecutive skipped steps after which training ends with an error

    def __post_init__(self) -> None:
        if self.min_scale > self.initial_scale:
            raise OptionError("min_scale", f"{self.min_scale:g} is above initial_scale, {self.initial_scale:g}")


@dataclass
class BitwiseOptions:
    """Training to the same bits under every runner: `bitwise: true` is short for `bitwise: {mode: on}`."""

    shorthand: ClassVar = "mode"
    switches: ClassVar[dict[bool, str]] = {True: "on", False: "off"}

    # on: the same bits under every runner and on every number of ranks; slower. auto: on if `width` or `slices` is set
    mode: Literal["on", "off", "auto"] = "auto"
    # number of products whose sum is the result of a sharded layer: the greatest degree of tensor parallelism; None: 1
    width: Annotated[int, Interval(ge=1, le=1024)] | None = None
    # number of slices of a sequence that are computed on their own: the greatest degree of context parallelism, a power
    # of two; None: 1
    slices: Annotated[int, Interval(ge=1, le=1024)] | None = None

    @property
    def enabled(self) -> bool:
        return self.mode == "on" or (self.mode == "auto" and (self.width or self.slices) is not None)


@dataclass
class BadStepOptions:
    """Handling of bad steps: `on_bad_step: skip` is short for `on_bad_step: {policy: skip}`.

    A step is bad if its loss is not finite; if its gradients are not finite, unless fp16's loss scale is the cause; or,
    with `spike`, if its loss exceeds `spike` times the median loss of the last `spike_window` good steps.
    """

    shorthand: ClassVar = "policy"

    # stop: end the run; skip: continue with the next samples; roll_back: return to the last checkpoint and leave out
    # the bad samples
    policy: Literal["stop", "skip", "roll_back"] = "stop"
    # a step is bad if its loss exceeds this factor times the median loss; None: no spike detection
    spike: Annotated[float, Interval(gt=1, le=1e6)] | None = None
    # window of the median, in good steps; spike detection starts once the window is full
    spike_window: Annotated[int, Interval(ge=1, le=10**6)] = 100
    # training ends after this many consecutive bad steps, or after this many rollbacks to the same checkpoint
    max_in_a_row: PositiveInt = 10


@dataclass
class ProfileOptions:
    """Steps to record with torch's profiler, and the level of detail."""

    steps: tuple[Steps, Steps]  # first and last attempted step to record
    ranks: Annotated[list[NonNegativeInt], MinLen(1)] = field(default_factory=lambda: [0])  # ranks to profile
    record_shapes: bool = False  # record input shapes of operators, and group the table by input shape
    with_stack: bool = False  # record the source lines of calls; makes traces large and steps slow
    profile_memory: bool = True  # record allocations and the memory use over time
    top: Annotated[int, Interval(ge=1, le=10_000)] = 30  # rows in the table of operators

    def __post_init__(self) -> None:
        first, last = self.steps
        if last < first:
            raise OptionError("steps", f"expected [first, last], such as [2, 4], got [{first}, {last}]")

    def check(self, max_iters: int, world_size: int) -> None:
        """Raise ConfigError if the run does not have all the steps and ranks to profile."""
        first, last = self.steps
        if last > max_iters:
            raise ConfigError(
                f"run.profile.steps: the window {first} to {last} extends beyond the last step of the run, {max_iters}"
            )
        if (rank := max(self.ranks)) >= world_size:
            raise ConfigError(f"run.profile.ranks: there is no rank {rank}; the last rank is {world_size - 1}")


@dataclass
class LogOptions:
    """Format of the log lines of a step: `log: megatron` is short for `log: {format: megatron}`."""

    shorthand: ClassVar = "format"

    # plain: one readable line per logged step; megatron: lines in Megatron-LM's format, for tools that parse them
    format: Literal["plain", "megatron"] = "plain"
    timers: bool = False  # add a line with the time of each phase of the step; megatron always has this line


@dataclass
class CurriculumOptions:
    """Short sequences first: the sample length is a function of the step.

    The lengths do not depend on the runner, the batch layout or resumes.
    """

    start: PositiveInt  # tokens per sample in the first step
    steps: PositiveInt  # first step in which samples have their full length
    multiple_of: PositiveInt = 8  # lengths are rounded down to a multiple of this
    # the length grows like step ** (1 / degree); 1: linearly, 2: like the square root of the step
    degree: Annotated[float, Interval(ge=1, le=100)] = 1.0

    def __post_init__(self) -> None:
        if self.start % self.multiple_of:
            raise OptionError("start", f"{self.start} is not a multiple of {self.multiple_of} (multiple_of)")

    def check(self, full: int | None) -> int:
        """Return `full`, the dataset's sequence length. Raises ConfigError if `full` is None or below `start`."""
        if full is None:
            raise ConfigError("run.curriculum: the dataset's samples have no fixed length that can be scheduled")
        if self.start > full:
            raise ConfigError(f"run.curriculum.start: {self.start} is more than the dataset's seq_length, {full}")
        return full

    def length(self, step: int, full: int) -> int:
        """Return the number of tokens per sample in step `step`. The first step is 1.

        The formula is from `fixed_linear` and `fixed_root` in DeepSpeed's curriculum_scheduler.py. After the schedule,
        samples have their full length.
        """
        if step >= self.steps:
            return full
        grown = math.floor((step / self.steps) ** (1 / self.degree) * (full - self.start) + self.start)
        return min(max(grown - grown % self.multiple_of, self.start), full)


@dataclass
class BatchWarmupOptions:
    """A schedule of global batch sizes, as Megatron-LM's `--rampup-batch-size`.

    The size of a step depends only on the number of samples before it, not on the runner or resumes.
    """

    start: PositiveInt  # global batch size of the first step
    samples: PositiveInt  # number of samples after which steps have the full global batch size
    increment: PositiveInt | None = None  # the size grows by this number of samples; None: start

    def sizes(self, full: int) -> range:
        """Return the sizes before the full one. Raises ConfigError if `full` is not a whole number of increments."""
        increment = self.increment or self.start
        if self.start >= full or (full - self.start) % increment:
            raise ConfigError(
                f"run.batch_warmup: the global batch size, {full}, is not {self.start} plus a multiple of {increment}"
            )
        return range(self.start, full, increment)

    def size(self, before: int, full: int) -> int:
        """Return the global batch size of a step after `before` samples."""
        sizes = self.sizes(full)
        number = before * len(sizes) // self.samples
        return sizes[number] if number < len(sizes) else full


# Pairs of mutually exclusive keys of `run`, with the quantity that both set, as named in an error.
EXCLUSIVE = (
    ("warmup_fraction", "warmup_steps", "length of the warmup"),
    ("max_epoch", "max_iters", "length of training"),
)


@dataclass
class RunOptions:
    """Options of a training run. Steps are attempted optimizer steps; a sample is one row of a batch.

    Raises OptionError, a ConfigError, for values that cannot be combined.
    """

    output_dir: FilePath  # path or URL of the run's folder: config.yaml, log.txt, metrics.jsonl, checkpoints/ ...
    # runner or preset that executes the steps and shards the model over the ranks
    runner: Annotated[Component, "runner"] = field(default_factory=lambda: Component(DEFAULT_RUNNER))
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available
    seed: NonNegativeInt = 1234  # seed for weight initialization, sample order, dropout and augmentation
    plugins: list[FilePath] = field(default_factory=list)  # additional folders and .py files with plugins
    # maximum number of restarts; if a worker dies, all workers restart from the newest checkpoint
    max_restarts: NonNegativeInt = 0
    # if a worker dies; restart: all workers restart, at most max_restarts times; continue: the other workers go on with
    # the state in their memory, and at most max_restarts new workers join them
    on_lost_rank: Literal["restart", "continue"] = "restart"
    # train to the same bits under every runner and on every number of ranks
    bitwise: BitwiseOptions = field(default_factory=BitwiseOptions)
    # compute threads of each rank; None: OMP_NUM_THREADS, or the machine's cores divided by its ranks
    threads: PositiveInt | None = None

    # Length of the run: set exactly one of these two.
    max_iters: Steps | None = None  # attempted steps
    max_epoch: Annotated[int, Interval(ge=1, le=10**6)] | None = None  # passes over the training data

    # Batch: global = micro x accumulation x data-parallel ranks. Omitted sizes are derived, or default to 1.
    global_batch_size: BatchSize | None = None  # samples per step
    micro_batch_size: BatchSize | None = None  # samples per forward pass on one rank
    accum_grad_iters: BatchSize | None = None  # forward passes per step on one rank

    # Optimization

    # loss to minimize; None: cross-entropy of the targets
    objective: Annotated[Component, "objective"] | None = None
    # optimizer and its options
    optimizer: Annotated[Component, "optimizer"] = field(default_factory=lambda: Component("adamw"))
    # peak learning rate, reached at the end of the warmup
    init_lr: Annotated[float, Gt(0), Interval(ge=1e-12, le=10_000)] = 1e-4
    min_lr: NonNegativeFloat = 0.0  # final learning rate of the schedule
    # weight decay of parameters with two or more dimensions
    weight_decay: Annotated[float, Interval(ge=0, le=10_000)] = 0.01
    grad_norm_clip: NonNegativeFloat | None = 1.0  # maximum global gradient norm; 0 or None: no clipping
    # learning rate schedule after the warmup
    lr_sched: Annotated[Component, "lr_scheduler"] = field(default_factory=lambda: Component("cosine"))
    warmup_steps: NonNegativeInt | None = None  # steps of linear warmup; skipped steps do not count
    # length of the linear warmup as a fraction of lr_decay_iters; without this and warmup_steps: no warmup
    warmup_fraction: Annotated[float, Interval(ge=0, lt=1)] | None = None
    # step at which the schedule ends; skipped steps do not count; None: the run's number of steps
    lr_decay_iters: Steps | None = None

    freeze: list[Text] = field(default_factory=list)  # name patterns of parameters that are not trained

    # Precision and memory

    amp: AmpOptions = field(default_factory=AmpOptions)
    # none: save all activations of a block; full: save only its input; selective: also the outputs of matmuls and
    # attention; offload: save its input in host memory
    gradient_checkpointing: Literal["none", "full", "selective", "offload"] = "none"
    compile: Literal["none", "blocks", "model"] = "none"  # scope of torch.compile: nothing, each block, or the model

    # Reporting
    log_interval: Steps = 10  # steps between two log lines
    log: LogOptions = field(default_factory=LogOptions)
    # validation interval in steps, with one more validation at the end; epoch: after each epoch; None: no validation
    eval_interval: Every = None
    eval_iters: Steps = 10  # global batches per evaluation
    # task metrics to compute in validation and evaluation, in addition to the loss
    metrics: list[Annotated[Component, "metric"]] = field(default_factory=list)
    # prompts to complete at each validation and at the end of training
    sample_prompts: list[Text] = field(default_factory=list)
    sample_tokens: Annotated[int, Interval(ge=1, le=2**20)] = 64  # tokens generated per sample prompt

    # callbacks to run at steps, validations and saves
    callbacks: list[Annotated[Component, "callback"]] = field(default_factory=list)

    # destinations of metrics; jsonl is always included
    trackers: list[Annotated[Component, "tracker"]] = field(
        default_factory=lambda: [Component("jsonl"), Component("tensorboard")]
    )

    profile: ProfileOptions | None = None  # steps to profile; None: no profiling

    # Checkpoints. A checkpoint is always saved after the last step.
    save_interval: Every = None  # interval in steps; epoch: after each epoch; None: only after the last step
    save_in_background: bool = True  # continue training during a save; needs host memory for a copy of the shards
    keep_last: PositiveInt | None = 3  # number of newest checkpoints to keep; None: keep all
    keep_every: Steps | None = None  # checkpoints at multiples of this many steps are never deleted
    save_best: bool = True  # also keep the checkpoint with the lowest validation loss
    resume_from: FilePath | None = None  # path or URL of a checkpoint or a run; None: this run's latest checkpoint
    # False: reset the optimizer state once, with resume_from or after a change of model, optimizer or freeze; later
    # restarts keep the state
    resume_optimizer: bool = True
    on_bad_step: BadStepOptions = field(default_factory=BadStepOptions)

    curriculum: CurriculumOptions | None = None  # schedule of sequence lengths; None: full length in every step
    # schedule of global batch sizes, which then grow to global_batch_size; None: the full size in every step
    batch_warmup: BatchWarmupOptions | None = None
    # data-loading processes per rank; 0: the rank loads its own data
    num_workers: Annotated[int, Interval(ge=0, le=256)] = 0
    # seconds that a rank may be late for a collective; None: no watchdog
    collective_timeout: Annotated[float, Interval(ge=0.1, le=10**7)] | None = 600.0

    def __post_init__(self) -> None:
        if "jsonl" not in (tracker.name for tracker in self.trackers):
            self.trackers = [Component("jsonl", NoOptions()), *self.trackers]
        for key in ("callbacks", "metrics", "trackers"):
            names = [component.name for component in getattr(self, key)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise OptionError(key, f"{twice[0]} is listed twice")
        if self.on_bad_step.policy == "roll_back":
            if self.save_interval is None:
                raise OptionError("on_bad_step", "roll_back needs checkpoints: set save_interval, or use skip")
            if not self.resume_optimizer:
                raise OptionError("resume_optimizer", "roll_back needs the optimizer state: use on_bad_step=skip")
        if 0 < (self.grad_norm_clip or 0) < 1e-9:
            raise OptionError(
                "grad_norm_clip", f"{self.grad_norm_clip:g} reduces gradients to almost 0; use 0 for no limit"
            )
        if self.min_lr > self.init_lr:
            raise OptionError("min_lr", f"{self.min_lr} is above init_lr, {self.init_lr}")
        for key, other, length in EXCLUSIVE:
            if getattr(self, key) is not None and getattr(self, other) is not None:
                raise OptionError(key, f"{other} already sets the {length}; give only one of the two")
        if self.max_iters is None and self.max_epoch is None:
            raise OptionError("max_iters", "the length of training is required: set max_iters or max_epoch")
        if self.global_batch_size is self.micro_batch_size is self.accum_grad_iters is None:
            raise OptionError("global_batch_size", "required, unless micro_batch_size or accum_grad_iters is set")
