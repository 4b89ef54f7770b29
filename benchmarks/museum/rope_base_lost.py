"""The exported configuration has the base of the rotary positions in the wrong place, so readers use a default.

https://github.com/marin-community/marin/issues/7146
"""

import json

from crosstrain import registry

from . import Expected

EXPECTED = Expected("export", cause=r"rope|position|config", project="qwen")


@registry.register_runner("rope_base_lost")
class RopeBaseLost(registry.get("runner", "ddp")):
    """Saves a configuration without rotary parameters."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        save_config = model.export.save_config

        def save_less(folder):
            save_config(folder)
            config = json.loads((folder / "config.json").read_text())
            del config["rope_parameters"]
            (folder / "config.json").write_text(json.dumps(config))

        model.export.save_config = save_less
