"""Two ways to run the same training: through the platform, and in a bare loop that calls the engine directly.

A rank of a `turns.Contestant` runs `platform` or `direct`. An order asks for a number of steps, and for saves.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import Result
from torch import Tensor
from turns import Line

from crosstrain.checkpoint.boxes import Shard, whole_pieces
from crosstrain.checkpoint.load_weights import fill_initial
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config, load_config
from crosstrain.data.loader import training_steps
from crosstrain.data.splits import open_split
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.distributed.watchdog import watchdog
from crosstrain.engine.build import make_model, make_runner
from crosstrain.engine.optimizer import parameter_groups
from crosstrain.engine.precision import DTYPES
from crosstrain.modeling.base import Model
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.training.callback import Callback
from crosstrain.training.trainer import Trainer
from crosstrain.training.worker import build_trainer
from crosstrain.utils.types import Batch


@dataclass(frozen=True)
class Order:
    """An order to take `steps` steps, and to save after every multiple of `every`; the time includes the last save.

    Data that is still in memory when the clock stops is written to disk before the next turn, and this time does not
    count.
    """

    steps: int
    every: int | None = None
    bare: bool = False  # True: use the bare loop that the platform's processes also hold


class Clock:
    """A clock for a turn: from a barrier of all ranks until this rank's device has finished."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if dist.is_initialized():  # a single process may have no process group
            dist.barrier()
        self.started = time.perf_counter()

    def stop(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self.started


# -------------------------------------------------------------------------------------------------------- the platform


class Gate(StopRequest):
    """Makes `Trainer.fit` take the ordered steps; the trainer checks this stop request between steps."""

    trainer: Trainer
    clock: Clock | None = None
    rival: Bare | None = None
    ended = False  # True: there are no more orders

    def __init__(self, line: Line) -> None:
        self.received, self.under_launcher, self.members = None, False, None
        self.line = line
        self.left = 0
        self.result: Result = {}

    def watch(self, trainer: Trainer) -> None:
        """Record the losses of `trainer`, and the time that its loop waits for saves."""
        self.trainer = trainer
        race, paused = self, trainer.throughput.paused

        class Noted(Callback):
            def after_step(self, metrics: StepMetrics) -> None:
                race.result["loss"] = metrics.loss

        @contextmanager
        def timed() -> Iterator[None]:
            started = time.perf_counter()
            with paused():
                yield
            self.result["stalled"] += time.perf_counter() - started

        trainer.hooks.callbacks["noted"] = Noted(None, trainer)
        trainer.throughput.paused = timed  # type: ignore[method-assign]

    def __bool__(self) -> bool:
        if self.ended or self.left:
            self.left -= 1
            return self.ended
        if self.clock is not None:
            self.trainer.checkpointer.wait()
            self.result["seconds"] = self.clock.stop()
            if self.trainer.run.save_interval:
                os.sync()
        self.line.report(self.result)
        while (order := self.line.order()) is not None and order.bare:
            assert self.rival is not None
            watchdog.remove()
            result = self.rival.turn(order)
            watchdog.install(self.trainer.run.collective_timeout)
            self.line.report(result)
        if order is None:
            self.ended = True
            return True
        self.trainer.run.save_interval = order.every
        self.left = order.steps - 1
        self.result = {"stalled": 0.0}
        self.clock = Clock(self.trainer.runner.device)
        return False


def platform(line: Line, project: str, options: list[str], beside: bool = False) -> None:
    """Run `crosstrain train`, from the tokens on disk to the log, TensorBoard and the watchdog.

    With `beside`, the same processes also hold the bare loop, with a separate model, for orders with `bare`.
    """
    config = load_config(project, options)
    runner = make_runner(config)
    runner.setup()
    gate = Gate(line)
    trainer = build_trainer(config, runner, gate)
    gate.rival = Bare(config, runner.device) if beside else None
    gate.watch(trainer)
    trainer.fit()
    runner.close()


# ---------------------------------------------------------------------------------------------------------- the engines


class Bare:
    """A bare loop around the engine, in an existing process group; it logs and counts nothing.

    The batches of eight steps are kept in memory and repeated.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        engines: dict[str, type[ZeRO] | type[FSDP]] = {"deepspeed": ZeRO, "fsdp": FSDP}
        self.engine, self.device = engines[config.run.runner.name](config, device), device
        plan = BatchPlan.of(config.run, dist.get_world_size())
        stream = training_steps(
            open_split(config, "train"), plan, seed=config.run.seed, start=0, dp_rank=dist.get_rank()
        )
        self.batches = itertools.cycle([[micro_batch.data for micro_batch in next(stream)] for _ in range(8)])
        self.folder = Path(config.run.output_dir)
        self.taken = 0

    def turn(self, order: Order) -> Result:
        stalled = 0.0
        clock = Clock(self.device)
        for _ in range(order.steps):
            batches = [{k: v.to(self.device, non_blocking=True) for k, v in b.items()} for b in next(self.batches)]
            loss = self.engine.step(batches)
            self.taken += 1
            if order.every and self.taken % order.every == 0:
                assert isinstance(self.engine, ZeRO)
                before = time.perf_counter()
                self.engine.save(self.folder, self.taken)
                stalled += time.perf_counter() - before
        seconds = clock.stop()
        dist.all_reduce(loss)
        if order.every:
            os.sync()
            dist.barrier()
            shutil.rmtree(self.folder, ignore_errors=True)
        return {"seconds": seconds, "loss": loss.item() / dist.get_world_size(), "stalled": stalled}


def direct(line: Line, project: str, options: list[str]) -> None:
    """Run the bare loop in separate processes."""
    config = load_config(project, options)
    device = torch.device(config.run.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    bare = Bare(config, device)
    line.report({})
    while (order := line.order()) is not None:
        line.report(bare.turn(order))
    dist.barrier()
    dist.destroy_process_group()


class ZeRO:
    """A bare loop with DeepSpeed: its engine's forward, backward, step and save_checkpoint."""

    def __init__(self, config: Config, device: torch.device) -> None:
        import deepspeed

        # DeepSpeed would spend half a minute compiling a collective that only its inference engine calls.
        with patch("deepspeed.comm.torch.build_shm_op", lambda: None):
            deepspeed.init_distributed(dist.get_backend(), verbose=False)
        plan = BatchPlan.of(config.run, dist.get_world_size())
        zero = config.run.runner.options.zero()
        settings = {
            "train_micro_batch_size_per_gpu": plan.micro_batch,
            "gradient_accumulation_steps": plan.accumulation,
            "gradient_clipping": config.run.grad_norm_clip,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        sharded = zero["stage"] == 3
        with deepspeed.zero.Init(config_dict_or_path=settings, enabled=sharded):
            model = make_model(config)
        for name, parameter in model.weights.parameters().items():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded):
                _fill(model, name, parameter, config.run.seed)
        _autocast_forward(model, config, device)
        optimizer = _optimizer(model, config)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.engine.device)
        for batch in batches:
            loss = self.engine(**batch) / batch["labels"].numel()
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        return total / len(batches)

    def save(self, folder: Path, step: int) -> None:
        self.engine.save_checkpoint(str(folder), tag=str(step))


class FSDP:
    """A bare loop with FSDP2: `fully_shard` of every block and of the model, `clip_grad_norm_` and AdamW."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from torch.distributed.fsdp import fully_shard

        model = make_model(config)
        for name, parameter in model.weights.parameters().items():
            _fill(model, name, parameter, config.run.seed)
        model.to(device)
        _autocast_forward(model, config, device)
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model: Any = model
        self.optimizer = _optimizer(model, config)
        self.clip, self.device = config.run.grad_norm_clip or torch.inf, device

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches, 1):
            self.model.set_requires_gradient_sync(i == len(batches))
            self.model.set_is_last_backward(i == len(batches))
            loss = self.model(**batch) / batch["labels"].numel() / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def _fill(model: Model, name: str, parameter: Tensor, seed: int) -> None:
    """Fill a full parameter with the platform's initial value."""
    parameter.data.zero_()
    shape = tuple(model.weights.logical_shape(name, parameter.shape))
    fill_initial(model, [Shard("param", name, shape, whole_pieces(parameter.data, shape))], seed)


def _optimizer(model: Model, config: Config) -> torch.optim.Optimizer:
    groups = parameter_groups(
        model.named_parameters(), config.run.weight_decay, lambda p: getattr(p, "ds_shape", p.shape)
    )
    return torch.optim.AdamW(groups, lr=config.run.init_lr, fused=True)


def _autocast_forward(model: Model, config: Config, device: torch.device) -> None:
    """Run the forward under autocast, as the platform does, because DeepSpeed's own modes lower more than that."""
    dtype = DTYPES[config.run.amp.dtype]
    if dtype != torch.float32:
        model.forward = torch.autocast(device.type, dtype)(model.forward)  # type: ignore[method-assign]
