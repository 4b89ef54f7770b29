"""Gradients are exchanged in many small buckets."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_small_buckets")
class HealthySmallBuckets(registry.get("runner", "ddp")):
    """DDP with buckets of ten kilobytes."""

    def setup(self):
        super().setup()
        self.options.bucket_cap_mb = 0.01
