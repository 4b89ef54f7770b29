"""The hook that shows the digests of a bitwise run."""

from crosstrain import Callback, find_checkpoint, log, registry
from crosstrain.checkpoint.digests import conditions, recorded


@registry.register_callback("digests")
class Digests(Callback):
    """Shows the SHA-256 digests of the last checkpoint under `run.bitwise`; every run has this hook."""

    def on_start(self) -> None:
        trainer = self.trainer
        if trainer.run.bitwise.enabled and trainer.start is not None and trainer.is_main:
            before = recorded(trainer.start).get("conditions", {})
            for name, now in conditions(trainer.runner.device).items():
                if (then := before.get(name, now)) != now:
                    log.warning(
                        "run.bitwise: %s was trained with %s: %s, but this machine uses %s, so later bits may differ",
                        trainer.start.name,
                        name,
                        then,
                        now,
                    )

    def places(self) -> list[tuple[str, str]]:
        if not self.trainer.run.bitwise.enabled or not self.trainer.is_main:
            return []
        found = recorded(find_checkpoint(self.trainer.folder.path))
        return [(f"{name} are", f"sha256:{found[name]}") for name in ("weights", "moments")]
