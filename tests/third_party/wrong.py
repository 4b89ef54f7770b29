"""Runners with a bug each, for `compare` to find."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist

from crosstrain import HeldState, Runner, registry


@registry.register_runner("wrong")
class Wrong(Runner):
    """Data parallel by hand, with a chosen mistake."""

    @dataclass
    class Options:
        bug: Literal[
            "none",
            "dropout",
            "tied",
            "missing",
            "partly_missing",
            "schedule",
            "sum",
            "clipping",
            "decay",
            "forgets",
            "says",
            "stale",
            "averages",
            "last",
            "late",
            "forgets_at_resume",
            "bf16_masters",
            "evaluates",
            "exports",
            "trains_in_evaluation",
        ] = "none"

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        if self.options.bug == "exports":  # a configuration with which the same weights compute something else
            save = model.export.save_config

            def save_config(folder):
                save(folder)
                path = folder / "config.json"
                path.write_text(path.read_text().replace('"n_head": 2', '"n_head": 1'))

            model.export.save_config = save_config

    def forward_backward(self, micro_batches, num_targets):
        self.calls = getattr(self, "calls", 0) + 1
        if self.options.bug == "averages":  # each micro batch by its own targets
            self.weights = iter(num_targets / (8 // 2) / m.num_targets for m in micro_batches)
        if self.options.bug == "last":
            self.weights = iter([1.0] * (len(micro_batches) - 1) + [0.0])
        if self.options.bug == "schedule":
            self.ticks = getattr(self, "ticks", 0) + len(micro_batches)
            self.set_learning_rate(self.run.init_lr * (1 - self.ticks / 100))
        loss = super().forward_backward(micro_batches, num_targets)
        names = self.model.weights.parameters()
        for name, p in names.items():
            if self.options.bug == "missing" or (self.options.bug == "partly_missing" and "h.1.mlp" in name):
                continue
            dist.all_reduce(p.grad)
            if self.options.bug != "sum":
                p.grad /= self.dp.size
            if self.options.bug == "late" and self.calls == 4 and "h.0.ln_2.weight" in name:
                p.grad *= 1.01
            if self.options.bug == "tied" and name == "transformer.wte.weight":
                p.grad *= 2
        return loss * 2 if self.options.bug == "says" else loss

    def backward(self, loss):
        super().backward(loss * next(self.weights) if self.options.bug in ("averages", "last") else loss)

    @cached_property
    def held(self):
        return _WrongState(self)

    def evaluate(self, batch, *mode):
        if self.options.bug == "trains_in_evaluation" or (self.options.bug == "evaluates" and hasattr(self, "calls")):
            self.model.train()
        return super().evaluate(batch, *mode)

    def compute_loss(self, batch):
        if self.options.bug == "dropout":
            import torch

            torch.manual_seed(self.world.rank)
        return super().compute_loss(batch)

    def optimizer_step(self, apply=True):
        if self.options.bug == "clipping":
            self.run.grad_norm_clip = 0.1
        if self.options.bug == "decay":
            self.optimizer.param_groups[0]["weight_decay"] = 0.0
        before = self.model.lm.transformer.ln_f.weight.detach().clone()
        result = super().optimizer_step(apply)
        if self.options.bug == "bf16_masters":
            for p in self.model.parameters():
                p.data.copy_(p.data.bfloat16())
        if self.options.bug == "stale" and self.world.rank == 1:
            self.model.lm.transformer.ln_f.weight.data.copy_(before)
        return result


class _WrongState(HeldState):
    def state(self, parameter):
        if self.runner.options.bug == "forgets_at_resume":  # what is loaded goes nowhere
            return {key: value.clone() for key, value in super().state(parameter).items()}
        forgotten = self.runner.options.bug == "forgets" and parameter.ndim == 1
        return {} if forgotten else super().state(parameter)


@registry.register_runner("unbalanced")
class Unbalanced(Runner):
    """Data parallel by hand, or a balance of experts in each micro batch, as transformers has it."""

    @dataclass
    class Options:
        micro_batches: bool = False

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for routers in model.structure.routers() if self.options.micro_batches else []:
            routers.scope = "micro_batch"

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.dp.size
        return loss


@registry.register_runner("tied")
class Tied(Runner):
    """Plain torch with routers that cannot tell the first two experts apart, but for a rounding."""

    @dataclass
    class Options:
        rounded: bool = False

    def forward_backward(self, micro_batches, num_targets):
        for routers in self.model.structure.routers():
            for module in routers.modules:
                first, second = module.weight.data[:2]
                second.copy_(first.nextafter(first.new_tensor(torch.inf)) if self.options.rounded else first)
        return super().forward_backward(micro_batches, num_targets)
