"""If a step uses a module twice, the sum over the ranks misses the gradient of one of the uses.

https://github.com/deepspeedai/DeepSpeed/issues/8224
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "gradients", cause=r"tied|twice|embedding|one of", parameter="transformer.wte.weight", project="still"
)


@registry.register_runner("second_use_lost")
class SecondUseLost(registry.get("runner", "ddp")):
    """Loses the gradient of the tied weight as an embedding."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        words = model.lm.get_input_embeddings()
        words.register_forward_hook(lambda _, inputs, output: output.detach() + 0 * output)
