"""Estimate memory, FLOPs and traffic of a run from its ranks' layouts and a traced micro batch."""

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast, get_args

import torch
import torch.distributed as dist

from crosstrain import (
    Batch,
    Config,
    ConfigError,
    Group,
    Layout,
    MatrixOptimizer,
    Model,
    Objective,
    PlanContext,
    RolloutOptions,
    Sizes,
    UserError,
    create_state,
    explained,
    first_line,
    log,
)
from crosstrain.config.batch import BatchPlan
from crosstrain.engine.build import make_objective
from crosstrain.engine.checks import batch_plan, check_held
from crosstrain.engine.optimizer import optimizer_factory
from crosstrain.engine.precision import DTYPES
from crosstrain.engine.runner import context_size, runner_class
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.modeling.context import Context

from .memory_trace import Trace, cache_bytes, trace

UNKNOWN_SHAPE = "the shape of a sample is unknown until the data is prepared"
MODES: tuple[Mode, ...] = get_args(Mode)
HOST_COPY = "checkpoint on its way"  # host memory for saving in the background
_FP32 = 4


@dataclass
class Memory:
    """Peak bytes of one rank, by purpose."""

    kind: str  # kind of rank, such as a pipeline stage
    parameters_held: int  # elements of parameters that this rank keeps between steps
    # elements of all ranks' parameters, including this layout's padding; None: the same number as on a single rank
    parameters: int | None
    device: dict[str, int]
    host: dict[str, int]
    # device memory that sampling needs in addition to parameters, optimizer state and copies of weights
    sampling: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def on_host(self) -> int:
        return sum(self.host.values())


@dataclass
class Estimate:
    """Costs of one step under one runner."""

    world_size: int
    batch: BatchPlan
    mode: Mode
    memory: Memory  # memory of the rank that needs the most
    others: list[Memory]  # memory of the other kinds of ranks
    sent: int  # maximum number of bytes that a rank sends
    bubble: float  # fraction of the step that pipeline ranks spend waiting


class Project:
    """A configuration and its model, for estimates under any number of runners; traces are cached.

    model: the model on the meta device. sample: one sample as a batch on the meta device; None: the shape of a
    sample is unknown, and estimates exclude activations. absent: weight folders that are missing on this machine.
    inputs: `sample`, or the completions of this prompt, as the model learns from them.
    """

    def __init__(self, config: Config, model: Model, sample: Batch | None, absent: list[str] | None = None) -> None:
        self.config, self.model, self.sample, self.inputs, self.absent = config, model, sample, sample, absent or []
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = auto if config.run.device == "auto" else config.run.device
        self.sizes, self.objective = Sizes.of(model), make_objective(config, model)
        self.copies, options = len(self.objective.keeps), config.run.objective and config.run.objective.options
        self.rollouts = options if isinstance(options, RolloutOptions) and sample is not None else None
        if self.rollouts is not None and sample is not None:
            self.prompt, self.objective = sample["input_ids"].shape[1], Objective(None)  # cross-entropy is traced
            length = -(-(self.prompt + self.rollouts.max_new_tokens * self.rollouts.turns - 1) // 8) * 8  # padded
            ids = torch.zeros(self.rollouts.completions, min(length, model.max_length or length), dtype=torch.int64)
            self.inputs = {"input_ids": ids.to("meta"), "labels": ids.to("meta")}
        self.dtype = DTYPES[config.run.amp.dtype]
        self.problem: str | None = None  # the reason why activations are unknown
        self._traces: dict[Hashable, Trace] = {}
        self._state_bytes: dict[tuple[bool, int], float] = {}

    def estimate(self, config: Config, world_size: int) -> Estimate:
        """Estimate a step of `config`, a variant of the project. Raises ConfigError if the runner rejects the model."""
        batch, mode = batch_plan(config, world_size), config.run.gradient_checkpointing
        runner = runner_class(config.run)
        check_held(self.model, runner, config)
        runner.check_model(config.run.runner.options, config.run, self.model)
        with fake_world(world_size):
            layouts = self.layouts(config, world_size, batch)
            traced = [(layout, self.trace_of(layout, batch.micro_batch, mode)) for layout in layouts]
            memories = sorted((self._memory(*each, mode) for each in traced), key=lambda memory: -memory.total)
        sent = max(layout.sent + each.exchanged * batch.accumulation for layout, each in traced)
        bubble = max(layout.bubble for layout in layouts)
        return Estimate(world_size, batch, mode, memories[0], memories[1:], sent, bubble)

    def check_layouts(self, batch: BatchPlan, world_size: int) -> None:
        """Raise ConfigError if the whole model's forward works, but the sharded model's forward fails."""
        with explained("this runner cannot split the model across ranks"), fake_world(world_size):
            for layout in self.layouts(self.config, world_size, batch):
                if layout.model is not None:
                    self.trace_of(layout, batch.micro_batch, "none")
        if self.problem is not None:
            log.warning("%s cannot be checked before it runs: %s", self.config.model.name, self.problem)

    def layouts(self, config: Config, world_size: int, batch: BatchPlan) -> list[Layout]:
        """Return the runner's layout of each kind of rank. Call this method within `fake_world`."""
        runner, options = runner_class(config.run), config.run.runner.options
        model, sharing = self.model, context_size(options)
        if sharing > 1:
            model = copy.deepcopy(model)
            model.context = Context(cast(dist.ProcessGroup, dist.new_group([*range(sharing)])))
        inputs, replicas = self.batch_of(batch.micro_batch), batch.dp_size * sharing
        found = runner.layouts(
            options, PlanContext(model, inputs, config.run, world_size, batch, self.device, replicas)
        )
        for layout in found if sharing > 1 else []:
            layout.model, layout.computes = layout.model or model, f"{layout.computes} {sharing}"
        return found

    def batch_of(self, rows: int) -> Batch:
        """Return a batch of `rows` samples on the meta device."""
        return {k: v.repeat(rows, *[1] * (v.ndim - 1)) for k, v in (self.inputs or {}).items()}

    def trace_of(self, layout: Layout, rows: int, mode: Mode) -> Trace:
        """Return the trace of a micro batch. If the forward cannot be traced, return an empty trace and set `problem`.

        Raises ConfigError if the forward of the layout's model fails although the whole model's forward works.
        """
        key = layout.computes, rows, "full" if mode == "offload" else mode  # offload is traced like full
        if self.inputs is None:
            self.problem = self.problem or UNKNOWN_SHAPE
        if self.problem is None and key not in self._traces:
            try:
                model, dtype = layout.model or self.model, self.dtype if layout.autocast else torch.float32
                self._traces[key] = traced = trace(
                    model, self.batch_of(rows), dtype, mode, self.device, layout.head, self.objective
                )
                if self.rollouts is not None:
                    traced.cache = rows * cache_bytes(model, layout.head, dtype, self.prompt, self.rollouts)
            except Exception as error:  # a model that reads tensor values can raise any error
                reason = first_line(error)[:120]
                if layout.model is not None:
                    self.trace_of(Layout(0, 0, 0), rows, mode)
                    if self.problem is None:
                        raise ConfigError(
                            f"run.runner: the forward fails when the model is split across ranks ({reason}); is "
                            f"something missing in run.runner.plan?"
                        ) from error
                self.problem = f"the model's forward cannot be traced without tensor values ({reason})"
        return self._traces.get(key, Trace())

    def _memory(self, layout: Layout, traced: Trace, mode: Mode) -> Memory:
        retained, outside = layout.retained_grad_fraction, layout.retained_grad_fraction_outside
        outside = retained if outside is None else outside
        compute, made, exchanged = traced.peak(retained, outside, layout.gradient_buffers)
        all_kept = int(traced.kept * layout.in_flight)
        compute += all_kept - traced.kept
        # At the peak, the backward may already have freed some of the activations.
        kept = min(all_kept, compute - made - exchanged)
        inputs = int(traced.inputs * layout.in_flight) if mode == "offload" else 0
        update = int(layout.updated * self.state_bytes(layout.model or self.model))
        state = layout.masters + update
        buffers = sum(
            buffer.nbytes for buffer in (layout.model or self.model).buffers()
        )  # such as scales of 4-bit weights
        always = {
            "parameters": layout.parameters + buffers,
            "optimizer": state if layout.optimizer == "device" else 0,
            "copies of weights": self.copies * layout.updated * _FP32,
        }
        computing = always | {
            "gathered parameters": layout.gathered,
            "gradients": layout.gradients + made,
            "activations": kept - inputs,
            "temporary": compute - made - exchanged - kept,  # such as the logits
            "communication": layout.buffers + exchanged,
        }
        trained = max(traced.backward, default=(0, layout.updated * _FP32))[1]
        stepping = always | {
            "gradients": max(layout.gradients, int(retained * trained)),
            "communication": layout.step_buffers,
        }
        sampling = {"key/value cache": traced.cache, "gathered parameters": layout.gathered} if self.rollouts else {}
        most = max(computing, stepping, always | sampling, key=lambda parts: sum(parts.values()))
        host = layout.host | ({"optimizer": state} if layout.optimizer == "host" else {})
        host |= {"activations": inputs} if inputs else {}
        if self.config.run.save_in_background:
            host[HOST_COPY] = layout.updated * _FP32 + update
        return Memory(layout.kind, layout.held, layout.whole, {k: v for k, v in most.items() if v}, host, sampling)

    # ---- independent of the runner

    def state_bytes(self, model: Model) -> float:
        """Return the mean bytes of optimizer state per trained element of `model`, measured on small parameters."""
        make, hidden, total = optimizer_factory(self.config, model), model.weights.matrices(), 0.0
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, p in trained:
            kind = name in hidden, p.ndim
            if kind not in self._state_bytes:
                trial = torch.nn.Parameter(torch.zeros([8] * p.ndim))
                optimizer = make([(name, trial)])
                if isinstance(optimizer, MatrixOptimizer):
                    optimizer.bind(list, Group(), trial.device)
                create_state(optimizer)
                held = [v.nbytes for v in optimizer.state[trial].values() if isinstance(v, torch.Tensor) and v.ndim]
                self._state_bytes[kind] = sum(held) / trial.numel()
            total += self._state_bytes[kind] * p.numel()
        return total / max(1, sum(p.numel() for _, p in trained))

    def flops(self, batch: BatchPlan, mode: Mode) -> int:
        """Return the FLOPs of a step on all ranks, with recomputation; like torch, count only matmuls and attention."""
        return self.trace_of(Layout(0, 0, 0), batch.micro_batch, mode).flops * batch.accumulation * batch.dp_size

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of parameters and optimizer state, excluding frozen parameters from pretrained folders."""
        sources, state = self.model.weights.sources(), self.state_bytes(self.model)
        size = 0
        for name, p in self.model.weights.parameters().items():
            if p.requires_grad:
                size += int(p.numel() * (_FP32 + state))
            elif not self.absent and next((s.of_model for s in sources if s.covers(name)), True):
                size += p.numel() * p.element_size()
        return size


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Create a fake process group of `world_size` ranks, with this process as rank 0; collectives do nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # cached meshes would compare equal to meshes of the next world


def with_options(
    config: Config, micro_batch: int | None = None, mode: Mode | None = None, global_batch: int | None = None
) -> Config:
    """Return the configuration with new batch sizes or a new checkpointing mode; new sizes reset the accumulation."""
    run = replace(config.run, gradient_checkpointing=mode or config.run.gradient_checkpointing)
    if micro_batch is not None:
        run = replace(
            run,
            micro_batch_size=micro_batch,
            accum_grad_iters=None,
            global_batch_size=global_batch or run.global_batch_size,
        )
    return replace(config, run=run)


def with_same_samples(config: Config, batch: BatchPlan, world_size: int) -> Config:
    """Return the configuration with the global batch size of `batch`, or unchanged if ranks cannot share it equally.

    The micro batch size is the largest one possible, at most `batch.micro_batch`.
    """
    runner = runner_class(config.run)
    try:
        each, rest = divmod(batch.global_batch, runner.data_parallel_size(config.run.runner.options, world_size))
    except UserError:
        return config  # `estimate` raises the same error
    if rest or not each:
        return config
    micro = max(size for size in range(1, min(batch.micro_batch, each) + 1) if each % size == 0)
    return with_options(config, micro, global_batch=batch.global_batch)
