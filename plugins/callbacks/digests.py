"""The hook that shows the digests of a bitwise run."""

from crosstrain import Callback, find_checkpoint, registry
from crosstrain.checkpoint.digests import digests
from crosstrain.checkpoint.files import Reader


@registry.register_callback("digests")
class Digests(Callback):
    """Shows the SHA-256 digests of the last checkpoint under `run.bitwise`; every run has this hook."""

    def places(self) -> list[tuple[str, str]]:
        if not self.trainer.run.bitwise or not self.trainer.is_main:
            return []
        reader = Reader.open(find_checkpoint(self.trainer.folder.path))
        return [(f"{name} are", f"sha256:{digest}") for name, digest in digests(reader).items()]
