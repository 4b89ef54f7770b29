"""Attention separates packed documents, but the positions of a document continue from the previous one.

https://github.com/hiyouga/LlamaFactory/pull/7318
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"position|forward", parameter="transformer.wpe.weight", project="packed")


@registry.register_runner("positions_go_on")
class PositionsGoOn(registry.get("runner", "ddp")):
    """Numbers positions through a row."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        model.lm.base_model.register_forward_pre_hook(self.number, with_kwargs=True)

    @staticmethod
    def number(_, args, kwargs):
        given = kwargs["position_ids"]
        return args, kwargs | {"position_ids": torch.arange(given.shape[1]).expand_as(given)}
