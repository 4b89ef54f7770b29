"""The trained tensor and the saved tensor have the same name, but the saved one keeps its initial value.

https://github.com/SakanaAI/kame_finetune/issues/1
"""

from functools import cached_property

from crosstrain import HeldState, registry

from . import Expected

EXPECTED = Expected("state", cause=r"saved|shards|held|checkpoint", parameter="transformer.wte.weight")


@registry.register_runner("stale_embedding_saved")
class StaleEmbeddingSaved(registry.get("runner", "ddp")):
    """Reports a copy of the embedding that no update reaches."""

    stale = None

    def loaded(self):
        super().loaded()
        self.stale = self.model.lm.transformer.wte.weight.detach().clone()

    @cached_property
    def held(self):
        return _Stale(self)


class _Stale(HeldState):
    def weight(self, parameter):
        stale = self.runner.stale
        tied = parameter is self.runner.model.lm.transformer.wte.weight
        return stale if tied and stale is not None else super().weight(parameter)
