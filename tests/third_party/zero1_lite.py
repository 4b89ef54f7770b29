"""ZeRO-1 by whole parameters, on torch.distributed alone."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from crosstrain import ConfigError, Runner, create_state, registry


@registry.register_runner("zero1_lite")
class Zero1Lite(Runner):
    """Data parallel with own bucketed reduce-scatter; each rank optimizes its share of the parameters."""

    @dataclass
    class Options:
        bucket_mb: float = 25

    def prepare(self, model, make_optimizer):
        if self.options.bucket_mb <= 0:
            raise ConfigError("run.runner.bucket_mb must be positive; set it to 25, for example")
        self.model = self.module = model
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # Largest first, each to the rank that holds least so far: the same on every rank.
        shares = [[] for _ in range(self.dp.size)]
        load = [0] * self.dp.size
        for name, p in sorted(named, key=lambda item: -item[1].numel()):
            rank = load.index(min(load))
            shares[rank].append((name, p))
            load[rank] += p.numel()
        if not all(shares):
            raise ConfigError("zero1_lite needs at least one parameter per rank; start fewer workers")
        self.length = max(load)
        self.owned = [[p for _, p in share] for share in shares]
        self.foreign = [p for r, ps in enumerate(self.owned) if r != self.dp.rank for p in ps]
        if make_optimizer is not None:
            self.optimizer = make_optimizer(shares[self.dp.rank])
            create_state(self.optimizer)

    def buckets(self):
        """(buffer of one row per rank, [(row, parameter, its range, offset in the row)])"""
        sample = self.owned[0][0]
        width = max(1, int(self.options.bucket_mb * 2**20) // sample.element_size() // self.dp.size)
        for start in range(0, self.length, width):
            stop = min(start + width, self.length)
            layout = []
            for row, params in enumerate(self.owned):
                at = 0
                for p in params:
                    low, high = max(start, at), min(stop, at + p.numel())
                    if low < high:
                        layout.append((row, p, slice(low - at, high - at), slice(low - start, high - start)))
                    at += p.numel()
            yield torch.zeros(self.dp.size, stop - start, dtype=sample.dtype, device=sample.device), layout

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        if self.dp.size > 1:
            with self.timers("reduce-scatter"), torch.no_grad():
                for p in self.owned[self.dp.rank]:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                for buffer, layout in self.buckets():
                    for row, p, source, target in layout:
                        if p.grad is not None:
                            buffer[row, target] = p.grad.view(-1)[source]
                    mine = torch.empty_like(buffer[0])
                    dist.reduce_scatter_single(mine, buffer.view(-1), group=self.dp.process_group)
                    mine /= self.dp.size
                    for row, p, source, target in layout:
                        if row == self.dp.rank:
                            p.grad.view(-1)[source] = mine[target]
                for p in self.foreign:  # this rank's optimizer does not know them and would never zero them
                    p.grad = None
        return loss

    def gradient_norm(self, gradients):
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in gradients:
            square += gradient.norm().double() ** 2
        if self.dp.size > 1:
            dist.all_reduce(square, group=self.dp.process_group)
        return square.sqrt().item()

    def optimizer_step(self, apply=True):
        result = super().optimizer_step(apply)
        if result.applied and self.dp.size > 1:
            with self.timers("all-gather"), torch.no_grad():
                for buffer, layout in self.buckets():
                    mine = buffer[self.dp.rank].clone()
                    for row, p, source, target in layout:
                        if row == self.dp.rank:
                            mine[target] = p.detach().view(-1)[source]
                    dist.all_gather_single(buffer.view(-1), mine, group=self.dp.process_group)
                    for row, p, source, target in layout:
                        if row != self.dp.rank:
                            p.detach().view(-1)[source] = buffer[row, target]
        return result
