"""Under expert tensor parallelism, the output of an adapter on experts is detached, so the adapter does not learn.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "gradients", cause=r"zero|no gradient|detach|left out|lost", parameter="*.mlp.*.lora_*", project="adapter"
)


@registry.register_runner("expert_adapter_detached")
class ExpertAdapterDetached(registry.get("runner", "ddp")):
    """Detaches the adapters of MLPs."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for name, module in model.named_modules():
            if ".mlp." in name and name.endswith(".lora_B.default"):
                module.register_forward_hook(lambda _, inputs, output: output.detach() + 0 * output)
