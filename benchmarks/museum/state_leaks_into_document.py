"""A recurrent layer does not reset its state between packed documents, so the start of a document sees the last one.

https://github.com/NVIDIA-NeMo/Automodel/pull/2147
"""

from torch.nn.functional import pad

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"document|leak|state|packed|forward", project="packed")


@registry.register_runner("state_leaks_into_document")
class StateLeaksIntoDocument(registry.get("runner", "ddp")):
    """Adds a part of a document's last hidden state to the next document's first."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        model.lm.base_model.register_forward_pre_hook(self.watch, with_kwargs=True)
        model.blocks()[0].register_forward_pre_hook(self.leak)

    def watch(self, _, args, kwargs):
        self.starts = kwargs["position_ids"] == 0

    def leak(self, _, args):
        hidden, *others = args
        before = pad(hidden, (0, 0, 1, -1))  # the state of the token before
        return (hidden + 0.1 * before * self.starts[..., None], *others)
