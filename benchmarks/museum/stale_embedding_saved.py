"""What is trained and what is saved are two tensors of one name, and the saved one keeps its initial value.

https://github.com/SakanaAI/kame_finetune/issues/1
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("state", cause=r"saved|shards|held|checkpoint", parameter="transformer.wte.weight")


@registry.register_runner("stale_embedding_saved")
class StaleEmbeddingSaved(registry.get("runner", "ddp")):
    """Reports a copy of the embedding that no update reaches."""

    stale = None

    def loaded(self):
        super().loaded()
        self.stale = self.model.lm.transformer.wte.weight.detach().clone()

    def held(self, parameter):
        tied = parameter is self.model.lm.transformer.wte.weight
        return self.stale if tied and self.stale is not None else super().held(parameter)
