"""Blocks are traced and differentiated as graphs."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(project="still")  # compiled attention and the CPU kernel draw different dropout masks


@registry.register_runner("healthy_compiled_blocks")
class HealthyCompiledBlocks(registry.get("runner", "ddp")):
    """torch.compile without a code generator."""

    def prepare(self, model, make_optimizer):
        for block in model.blocks():
            block.compile(backend="aot_eager")
        super().prepare(model, make_optimizer)
