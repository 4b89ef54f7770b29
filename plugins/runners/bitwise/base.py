"""The parts of a bitwise runner that do not depend on the engine."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosstrain import (
    PLAIN,
    Batch,
    ConfigError,
    ForwardMode,
    Group,
    Layout,
    MakeOptimizer,
    MicroBatch,
    Model,
    NamedParameters,
    PlanContext,
    Runner,
    RunOptions,
    log,
)
from crosstrain.engine.runner import context_size

from ..megatron.tensor_parallel import TensorParallel
from ..used_parameters import UsedParameters
from .backend import rounds
from .experts import all_experts
from .gradients import WholeGradients
from .norm import exact_norm
from .partial_sums import nodes_of
from .slices import SlicedHead, Slices, check_slices
from .units import Units, check_units, plan_of_units


class Bitwise(Runner):
    """A runner that trains to the same bits on every number of ranks.

    Gradients are summed in a fixed tree over the micro batches of a step, and are never divided by the number of ranks.
    The gradient norm does not depend on how the gradients are sharded. Optimizers run without fused kernels, because
    the results of fused kernels depend on the sizes of shards. Losses are fp32 numbers summed in fp64, which is exact
    as long as they differ by less than a factor of 2**29.
    """

    tensor: TensorParallel | None = None  # None: this rank has whole matrices
    slices: Slices | None = None  # None: modules compute whole sequences
    gradients: WholeGradients | None = None  # sums of this rank's gradients; None: the engine sums them

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        super().check(options, run)
        if run.micro_batch_size is None:
            raise ConfigError("run.bitwise: set run.micro_batch_size; without it, the number of ranks determines it")
        if run.amp.dtype == "fp16" or run.amp.linear is not None:
            raise ConfigError("run.bitwise: fp16 and float8 are not supported; use run.amp=bf16 or fp32")
        slices, ranks = run.bitwise.slices or 1, context_size(options)
        if slices % ranks or slices.bit_count() > 1:
            raise ConfigError(
                f"run.bitwise.slices: {slices} is not a power of two that is a multiple of context_parallel={ranks}; "
                f"set it to one in every run that is compared"
            )
        if (run.bitwise.width or ranks) % ranks:
            raise ConfigError(f"run.bitwise.width: {run.bitwise.width} is not a multiple of context_parallel={ranks}")
        if run.bitwise.slices is not None and (run.objective is not None or run.compile != "none"):
            raise ConfigError("run.bitwise.slices: remove run.objective, which needs whole sequences, and run.compile")

    @classmethod
    def check_model(cls, options: Any, run: RunOptions, model: Model) -> None:
        super().check_model(options, run, model)
        if run.bitwise.width is not None:
            check_units(model, cls.over(options), run.bitwise.width)
        if run.bitwise.slices is not None:
            check_slices(model, run.bitwise.slices)

    @classmethod
    def over(cls, options: Any) -> dict[str, str]:
        """Return the user's sharding plan, which is merged over the model's own."""
        return {}

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        """Add gradients in fp32: partial sums between micro batches, and the gradients of a parameter's slices."""
        found = super().layouts(options, at)
        leaves = cls.leaves_of_round(at)
        kept = max(len(nodes_of(0, leaves * rounds)) for rounds in range(at.batch.accumulation))
        slices = (at.run.bitwise.slices or 1) // context_size(options)
        largest = max(p.numel() for p in at.model.parameters() if p.requires_grad)
        for layout in found:
            layout.gradients += 4 * (kept * layout.updated + (slices - 1) * largest)
        return found

    @classmethod
    def leaves_of_round(cls, at: PlanContext) -> int:
        """Return the number of micro batches whose sum a rank computes at a time."""
        return 1

    def construct(self, make_model: Callable[[], Model]) -> Model:
        model = super().construct(make_model)
        if (width := self.run.bitwise.width) is not None and self.tensor is None:
            Units(width, self.context).compute(model, plan_of_units(model, self.over(self.options)))
        for experts in model.structure.experts().values():
            experts.forward = partial(all_experts, experts)
        for module in model.modules():
            module.register_forward_pre_hook(_apart, with_kwargs=True)
        return model

    def setup(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when a GPU is first used
        super().setup()
        if self.run.bitwise.slices is not None:
            self.slices = Slices(self.run.bitwise.slices // self.context.size, self.context)
        if self.run.threads is None:
            torch.set_num_threads(1)  # the same for every number of ranks
        if self.device.type == "cuda":
            # Make torch choose kernels whose results do not change between runs; an operation without one raises an
            # error. See https://docs.pytorch.org/docs/stable/notes/randomness.html.
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False  # the fastest kernel could differ between ranks
            log.warning(
                "run.bitwise was not tried on GPUs yet; compare the digests of your layouts (crosstrain compare)"
            )

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        super().prepare(model, make_optimizer)
        self.slice(model)

    def slice(self, model: Model) -> None:
        """Make a model that is sharded or wrapped compute slices of sequences, if the run's options say so."""
        if self.slices is not None:
            self.slices.compute(model, draws_heads=self.run.bitwise.width is None)

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        if self.gradients is not None:
            self.gradients.begin_step(len(micro_batches))
        return super().forward_backward(micro_batches, num_targets)

    def compute_loss(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        return super().compute_loss(batch, self._sliced(mode))

    def evaluate(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        return super().evaluate(batch, self._sliced(mode))

    def _sliced(self, mode: ForwardMode) -> ForwardMode:
        return mode if self.slices is None else replace(mode, head=SlicedHead(self.slices, mode.head))

    @property
    def gradient_scale(self) -> float:
        return self.precision.scaler.scale

    @property
    def shards_of_gradients(self) -> Group:
        """The ranks that hold different elements of the gradients."""
        return Group()

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        return exact_norm(gradients, self.shards_of_gradients)


class Rounded(Bitwise):
    """A bitwise runner for engines that reduce every micro batch's gradients to shards; each reduction is a round."""

    _round, _last = 0, True

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        return super().layouts(_exact(options, at.run, at.model), at)

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        self.options = _exact(self.options, self.run, model)
        super().prepare(model, unfused(make_optimizer))
        self._reduced = UsedParameters(model)  # parameters with a gradient from this round

    @classmethod
    def leaves_of_round(cls, at: PlanContext) -> int:
        return at.replicas

    @property
    def shards_of_gradients(self) -> Group:
        return self.world

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self._last = last
        with super().gradient_sync(last):
            yield
        self._round = 0 if last else self._round + 1

    def backward(self, loss: Tensor) -> None:
        self._reduced.clear()
        with rounds(self._round, self._last):
            super().backward(loss)
        self._reduced.check("so its rounds of accumulation cannot be matched; use ddp, or train without run.bitwise")


def _exact(options: Any, run: RunOptions, model: Model) -> Any:
    """Return options that keep weights in fp32 if the model has adapters or computes slices.

    The library peft converts the input of an adapter to the dtype of its weights, before dropout. The gradients of a
    parameter's slices are added in the dtype of the parameter.
    """
    adapted = any(hasattr(module, "base_layer") for module in model.modules())
    return replace(options, param_dtype="fp32") if adapted or run.bitwise.slices is not None else options


def _apart(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook that makes a view of each input, so that gradients of its uses in the module are summed on their own.

    ZeRO-3 does this with hooks of its own. Without them, autograd would add the uses outside of the module in between.
    """

    def view(value: Any) -> Any:
        return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value

    return tuple(map(view, inputs)), {name: view(value) for name, value in named.items()}


def unfused(make_optimizer: MakeOptimizer | None) -> MakeOptimizer | None:
    """Return `make_optimizer` without fused kernels: they treat the last elements of a shard differently."""
    if make_optimizer is None:
        return None

    def make(parameters: NamedParameters, *shape_of: Any) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters, *shape_of)
        for group in optimizer.param_groups:
            if group.get("fused"):
                group.update(fused=False, foreach=True)
        return optimizer

    return make
