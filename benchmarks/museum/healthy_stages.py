"""Blocks are on two pipeline stages with a tied weight."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(base="megatron", options={"pipeline_parallel": 2})


@registry.register_runner("healthy_stages")
class HealthyStages(registry.get("runner", "megatron")):
    """megatron as it is."""

    pass
