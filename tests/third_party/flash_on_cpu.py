"""Qwen in a process that seems to have kernels of flash attention."""

from crosstrain import registry
from fixtures_flash import on_cpu

QWEN = registry.get("model", "qwen")


@registry.register_model("qwen_flash_on_cpu")
class QwenFlashOnCpu(QWEN):
    """Qwen that loads them."""

    def __init__(self, options):
        for patched in on_cpu():
            patched.start()
        super().__init__(options)
