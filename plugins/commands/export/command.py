"""`crosstrain export`: write a checkpoint as a plain Hugging Face model folder."""

import argparse

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import CHECKPOINT, WEIGHTS, add_flags, add_options, positive

from ..units import read_bytes

_FLAGS = {
    "--output": {"required": True, "metavar": "DIR", "help": "folder to write; it must be empty or not exist"},
    "--dtype": {"choices": ("fp32", "bf16", "fp16"), "help": "dtype of the exported weights (default: as stored)"},
    "--part": {
        "metavar": "NAME",
        "help": "part to export: adapter, or a submodel such as language_model (default: the whole model)",
    },
    "--max-shard-size": {
        "default": "5GB",
        "metavar": "SIZE",
        "help": "maximum size of a file of weights (default: 5GB)",
    },
    "--average": {
        "type": positive,
        "default": 1,
        "metavar": "N",
        "help": "write the mean of the run's last N checkpoints up to this one (default: 1)",
    },
    "--cfg-path": {"metavar": "FILE", "help": "project file to use in place of the checkpoint's configuration"},
}


@registry.register_command("export")
class ExportCommand(Command):
    """Write a checkpoint as a plain Hugging Face model folder."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_flags(parser, CHECKPOINT | WEIGHTS | _FLAGS)
        add_options(parser, "options to override in the configuration, such as the source of frozen parameters")

    def run(self, arguments: argparse.Namespace) -> None:
        """Write the checkpoint to the output folder."""
        from crosstrain import find_checkpoint
        from crosstrain.checkpoint.checkpointer import load_state
        from crosstrain.checkpoint.files import Reader
        from crosstrain.data.tokenizer import warn_if_rebuilt
        from crosstrain.engine.precision import DTYPES
        from crosstrain.inference.open_checkpoint import open_config, outline
        from crosstrain.modeling.weights import Part

        from .folder import export, export_adapter

        limit, output = read_bytes(arguments.max_shard_size, "--max-shard-size"), arguments.output
        dtype = DTYPES[arguments.dtype] if arguments.dtype else None
        checkpoint = find_checkpoint(arguments.checkpoint)
        model = None  # None: the checkpoint does not describe its model and has no frozen parameters
        part: Part = (("",), None)
        described = arguments.cfg_path or arguments.part or isinstance(load_state(checkpoint).get("config"), dict)
        if described or Reader.open(checkpoint).frozen:
            # Build the model without weights, to find the sources of frozen parameters and the parameters to merge.
            config = open_config(checkpoint, arguments.cfg_path, arguments.options, arguments.trust_data)
            model = outline(config, checkpoint)
            if arguments.part == "adapter":
                if arguments.average > 1:
                    raise UserError("--average: an adapter is not averaged; export the whole model, which merges it")
                export_adapter(checkpoint, output, dtype, model, print, arguments.weights)
                print(f"{output}: the adapter; open it with peft's PeftModel.from_pretrained(model, {str(output)!r})")
                return
            if arguments.part:
                if arguments.part not in (parts := model.export.parts()):
                    raise UserError(
                        f"--part: {config.model.name} has no part {arguments.part!r} to export; known: "
                        f"{', '.join(['adapter', *parts])}"
                    )
                part = parts[arguments.part]
        exported = export(
            checkpoint,
            output,
            dtype,
            limit,
            lambda line: print(line, flush=True),
            model,
            part,
            arguments.weights,
            arguments.average,
        )
        warn_if_rebuilt(output)
        use = ""
        if (opens := exported.architecture) is not None:
            use = f"; open it with transformers' {opens}.from_pretrained({arguments.output!r})"
        elif model is not None and hasattr(model.options, "pretrained"):
            key = f"model.{arguments.part}" if arguments.part else "model"
            use = f"; {key}.pretrained={arguments.output} starts a run from it"
        print(
            f"{arguments.output}: {exported.parameters:,} parameters of {checkpoint}, {exported.bytes / 1e6:,.1f} MB "
            f"in {exported.files} file(s){use}"
        )
