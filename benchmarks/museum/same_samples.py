"""Without a distributed sampler all ranks read the same samples.

https://github.com/openspeech-team/openspeech/issues/149
"""

from copy import copy

from crosstrain import registry

from . import Expected

EXPECTED = Expected("samples", cause=r"sample")


@registry.register_runner("same_samples")
class SameSamples(registry.get("runner", "ddp")):
    """Reads the first rank's samples on every rank."""

    def setup(self):
        super().setup()
        self.dp = copy(self.dp)
        self.dp.rank = 0
