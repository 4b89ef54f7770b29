"""The exported configuration says that the head is tied, so readers replace the trained head by the embedding.

https://github.com/Lightning-AI/litgpt/issues/1727
"""

import json

from crosstrain import registry

from . import Expected

EXPECTED = Expected("export", cause=r"tie|config", project="qwen")


@registry.register_runner("head_tied_in_export")
class HeadTiedInExport(registry.get("runner", "ddp")):
    """Saves a configuration with a tied head."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        save_config = model.export.save_config

        def save_tied(folder):
            save_config(folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))

        model.export.save_config = save_tied
