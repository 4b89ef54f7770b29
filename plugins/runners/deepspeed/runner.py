"""DeepSpeed's ZeRO: shard optimizer state, gradients and parameters over the ranks, depending on the stage."""

import dataclasses
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor, nn

from crosstrain import (
    PLAIN,
    Batch,
    Capabilities,
    ConfigError,
    ForwardMode,
    HeldState,
    Layout,
    MakeOptimizer,
    MatrixOptimizer,
    MicroBatch,
    Model,
    PlanContext,
    Runner,
    RunOptions,
    StepResult,
    create_state,
    parameters_on_meta,
    registry,
)
from crosstrain.config.batch import BatchPlan

from ..sharding import check_elementwise
from ..used_parameters import UsedParameters
from .footprint import half_weights, layout
from .nvme import SwappedStage3, fitted, swap_folder
from .options import Options
from .partition import Partition, Stage3, Stage12


@registry.register_runner("deepspeed")
class DeepSpeedRunner(Runner):
    """DeepSpeed's engine, ZeRO stages 0 to 3, with offloading to host memory and NVMe.

    As under every other runner, the optimizer's parameters stay fp32, and the forward runs under the platform's
    autocast and loss scale. DeepSpeed's schedules and batch arithmetic are not used. DeepSpeed's bf16 mode is used
    only with param_dtype bf16.
    """

    Options = Options

    capabilities: ClassVar = Capabilities(
        bitwise="crosstrain_plugins.builtin.runners.bitwise.zero:BitwiseZeRO",
        needs_process_group=True,
        takes_quantized=False,
    )
    engine: Any = None  # None in evaluation below stage 3, where parameters are not sharded
    partition: Partition | None = None  # this rank's part of the state; None: nothing is sharded
    _used: UsedParameters | None = None  # None: unused parameters are not detected
    half = False  # True: some parameters are bf16 or are gathered in bf16

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        if options.param_dtype == "bf16" and run.amp.dtype != "bf16":
            raise ConfigError("run.runner.param_dtype: bf16 needs run.amp=bf16")
        if options.stage == 3 and run.gradient_checkpointing == "selective":
            raise ConfigError(
                "run.gradient_checkpointing: selective and ZeRO stage 3 exclude each other, because recomputation "
                "gathers parameters that the first forward already had; use full or offload"
            )

    @classmethod
    def check_model(cls, options: Any, run: RunOptions, model: Model) -> None:
        if options.nvme_paths and not AsyncIOBuilder().is_compatible():
            raise ConfigError(
                "run.runner: offloading to nvme needs libaio, which is not installed: run `apt-get install libaio-dev`"
                ", or choose device: cpu"
            )
        if options.stage == 3 and model.structure.reads_across:
            raise ConfigError(
                "run.runner.stage: parts of the model (dora, adapters or four bits of experts) need whole weights; use "
                "stage 2 or fsdp"
            )
        if options.param_dtype == "bf16" and not all(p.requires_grad for p in model.parameters()):
            raise ConfigError("run.runner.param_dtype: bf16 would round frozen parameters permanently; use amp")

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        return [layout(options, at)]

    def setup(self) -> None:
        super().setup()
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads LOCAL_RANK even without a launcher
        if get_accelerator().device_name() != self.device.type:
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            assert self.device.type == "cpu"  # DeepSpeed detects GPUs itself
            set_accelerator(CPU_Accelerator())
        # On a CPU, DeepSpeed would spend half a minute compiling a collective that only its inference engine calls.
        with patch("deepspeed.comm.torch.build_shm_op", lambda: None):
            deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
        for device in self.options.nvme_paths:
            shutil.rmtree(swap_folder(device, self.run.output_dir), ignore_errors=True)
        super().close()

    # ---- building

    def construct(self, make_model: Callable[[], Model]) -> Model:
        if self.options.stage < 3:
            return super().construct(make_model)
        if self.options.nvme_paths:
            with parameters_on_meta():
                self.options = fitted(self.options, make_model(), self.world.size)
        # The configuration sets the dtype; on a CPU, Init turns any `dtype` argument into bf16.
        with deepspeed.zero.Init(config_dict_or_path=self._config(1, 1)):
            model = make_model()
        for parameter in model.parameters():  # the model may use a different dtype for some parameters
            parameter.ds_tensor.data = parameter.ds_tensor.data.to(parameter.dtype)
        return model

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        self.model = self.module = model
        plan = None
        if self.options.stage == 3:
            self.partition = SwappedStage3(self) if self.options.nvme_paths else Stage3(self)
            for module in model.structure.by_document():
                module.register_forward_pre_hook(_refuse_documents, with_kwargs=True)
        elif self.options.stage > 0 and make_optimizer is not None:
            self.partition = Stage12(self)
        if make_optimizer is not None:
            if self.options.stage > 0:
                check_elementwise(make_optimizer)
            self._lower(model)
            self.optimizer = self.held.bound(make_optimizer(model.named_parameters(), self.held.full_shape))
            plan = BatchPlan.of(self.run, self.dp.size)
            if self.options.nvme_paths and isinstance(self.optimizer, MatrixOptimizer):
                raise ConfigError(
                    f"run.optimizer: {self.run.optimizer.name} needs whole matrices, but NVMe holds only parts of "
                    f"them; use zero3_offload"
                )
        elif self.options.stage < 3:
            return
        self._autocast_inside(model)
        config = self._config(plan.micro_batch, plan.accumulation) if plan else self._config(1, 1)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)
        self.module = self.engine
        zero = self.engine.optimizer
        if self.options.stage > 0 and self.optimizer is not None and zero.optimizer is not self.optimizer:
            raise ConfigError("run.optimizer: DeepSpeed replaces it with a different optimizer; use adamw or sgd")
        if self.options.stage in (1, 2) and self.half:
            # With amp, sum gradients in fp32 over micro batches and ranks. Check bf16 gradients for overflow too.
            zero.use_grad_accum_attribute = self.options.param_dtype == "amp"
            zero.check_grad_overflow |= zero.dtype == torch.bfloat16
        if self.optimizer is not None:
            self.partition.create_state() if self.partition else create_state(self.optimizer)
        if self.options.offloads_optimizer and self.optimizer is not None:
            self._used = UsedParameters(model)

    def _lower(self, model: Model) -> None:
        """Set the dtypes in which ZeRO gathers parameters; the optimizer's copies stay fp32."""
        lowered = half_weights(self.options, self.run, model)
        if self.options.param_dtype == "bf16":
            lowered, self.precision.in_parameters = list(model.parameters()), True
        for parameter in lowered:
            if self.options.stage == 3 and self.options.param_dtype == "amp":
                parameter.comm_dtype = torch.bfloat16  # DeepSpeed's own attribute
                continue
            parameter.data = parameter.data.bfloat16()
            if self.options.stage == 3:
                parameter.ds_tensor.data = parameter.ds_tensor.data.bfloat16()
        self.half = bool(lowered)

    def _autocast_inside(self, model: Model) -> None:
        """Enter autocast inside the forward, because the engine's forward disables an autocast context around it."""
        forward = model.forward

        def autocast_forward(**batch: Any) -> Any:
            with self.precision.autocast():
                return forward(**batch)

        model.forward = autocast_forward  # type: ignore[method-assign]

    def _config(self, micro_batch: int, accumulation: int) -> dict[str, Any]:
        """Return DeepSpeed's configuration, made from the options of the run and of this runner."""
        section = self.options.zero(lambda device: swap_folder(device, self.run.output_dir))
        if self.half and self.options.stage < 3:  # the multi-rank all-reduce would send twice as many bytes
            section["use_multi_rank_bucket_allreduce"] = False
        return {
            "bf16": {"enabled": self.half and self.options.param_dtype == "bf16"},
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            # At stage 0, `optimizer_step` clips.
            "gradient_clipping": (self.run.grad_norm_clip or 0.0) if self.options.stage > 0 else 0.0,
            "zero_optimization": section,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            "aio": dataclasses.asdict(self.options.aio),
        }

    # ---- training

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        if self.partition is not None:
            self.partition.begin_step()
            self.engine.optimizer.override_loss_scale(self.gradient_scale)
        return super().forward_backward(micro_batches, num_targets)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def compute_loss(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        return self.module(**self.objective.inputs(batch, mode))

    def backward(self, loss: Tensor) -> None:
        if self.partition is not None:
            loss = loss / self.gradient_scale  # ZeRO multiplies the loss by this scale
        if self._used is not None:
            self._used.clear()
        with self.timers("backward"):
            self.engine.backward(loss, scale_wrt_gas=False)
        if self._used is not None:
            self._used.check(
                "and DeepSpeed would use an old gradient; add unused outputs to the loss with a factor of zero, or "
                "train without offload_optimizer"
            )

    def optimizer_step(self, apply: bool = True) -> StepResult:
        if self.partition is None:
            return super().optimizer_step(apply)
        if apply:
            self.engine.step()
            result = StepResult(float(self.engine.get_global_grad_norm()), self.engine.was_step_applied())
        else:
            with self._refusal() as norm:
                self.engine.step()
            # DeepSpeed returns -1 for a norm that is not finite, or skips the computation.
            result = StepResult(norm[0] / self.gradient_scale if norm and norm[0] >= 0 else math.inf, False)
        if not result.applied:
            self.partition.refused()
        self.precision.update_scale(apply, result.applied)
        return result

    def update(self) -> None:
        self.engine.step()

    @contextmanager
    def _refusal(self) -> Iterator[list[float]]:
        """Inside this block, make DeepSpeed discard the gradients as if they had overflowed.

        Yields a list that receives the real gradient norm. DeepSpeed gets -1, its value for a norm that is not finite.
        """
        zero, norm = self.engine.optimizer, list[float]()
        name = "_get_norm_groups" if self.options.stage == 3 else "scaled_global_norm"
        compute = getattr(zero, name)

        def refuse() -> Any:
            value = compute()
            if not isinstance(value, list):
                norm.append(float(value))
                return torch.full_like(value, -1.0)
            norm.append(float(combine_grad_norm_groups(value)))
            return [torch.full_like(group, -1.0) for group in value]

        with patch.object(zero, name, refuse):
            yield norm

    # ---- state of this rank

    @cached_property
    def held(self) -> HeldState:
        return self.partition or HeldState(self)

    def loaded(self) -> None:
        if self.partition is not None:
            self.partition.loaded()


def _refuse_documents(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError if the module would compute documents one by one, so that ranks gather different weights."""
    if kwargs.get("documents") is not None:
        raise ConfigError(
            f"run.runner.stage: 3 cannot gather the weights of {type(module).__name__} once per document; use stage 2 "
            f"or fsdp, or train without packing, document_mask and context_parallel"
        )
