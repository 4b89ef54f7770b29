"""Parameters that received a gradient."""

from torch import nn

from crosstrain import Model, TrainingError


class UsedParameters(set[nn.Parameter]):
    """The trainable parameters of a model that received a gradient since the last `clear`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.add)

    def check(self, problem: str) -> None:
        """Raise TrainingError if a trainable parameter received no gradient; the message ends with `problem`."""
        if unused := [n for n, p in self._model.weights.parameters().items() if p.requires_grad and p not in self]:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise TrainingError(f"{', '.join(unused[:5])}{more} took no part in the loss of a micro batch, {problem}")
