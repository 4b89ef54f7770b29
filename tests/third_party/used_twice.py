"""GPT-2 that uses modules twice: the layers of the first block's MLP."""

from crosstrain import registry

GPT2 = registry.get("model", "gpt2")


@registry.register_model("used_twice")
class UsedTwice(GPT2):
    def __init__(self, options):
        super().__init__(options)
        mlp = self.blocks()[0].mlp
        once = mlp.forward
        mlp.forward = lambda x: once(once(x))
