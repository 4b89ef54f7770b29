"""`crosstrain export`: write a checkpoint as a plain Hugging Face model folder."""

import argparse

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import add_checkpoint, add_options, add_weights

from ..units import read_bytes


@registry.register_command("export")
class ExportCommand(Command):
    """Write a checkpoint as a plain Hugging Face model folder."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_checkpoint(parser)
        add_weights(parser)
        parser.add_argument("--output", required=True, metavar="DIR", help="a folder that is empty or does not exist")
        parser.add_argument(
            "--dtype", choices=("fp32", "bf16", "fp16"), help="convert to it (default: as it is stored)"
        )
        parser.add_argument(
            "--part", metavar="NAME", help="write only the adapter, or a part that is a model, such as language_model"
        )
        parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="begin another file beyond this")
        parser.add_argument(
            "--cfg-path", metavar="FILE", help="a project file, in place of the checkpoint's configuration"
        )
        add_options(parser, "change the configuration that names the source of frozen parameters")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the checkpoint to the output folder; return the exit code."""
        from crosstrain.checkpoint.checkpointer import load_state
        from crosstrain.checkpoint.files import Reader
        from crosstrain.checkpoint.folders import find_checkpoint
        from crosstrain.checkpoint.load_weights import PretrainedWeights
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
            # Build the model without weights, to find the sources of frozen parameters and the merged parameters.
            config = open_config(checkpoint, arguments.cfg_path, arguments.options, arguments.trust_data)
            model = outline(config, checkpoint)
            if arguments.part == "adapter":
                export_adapter(checkpoint, output, dtype, model, print, arguments.weights)
                print(f"{output}: the adapter; peft's PeftModel.from_pretrained(model, {str(output)!r}) adds it")
                return 0
            if arguments.part:
                if arguments.part not in (parts := model.export.parts()):
                    known = ", ".join(["adapter", *parts])
                    raise UserError(
                        f"--part: {config.model.name} has no part {arguments.part!r} to export; known: {known}"
                    )
                part = parts[arguments.part]
        exported = export(
            checkpoint,
            output,
            dtype,
            limit,
            lambda line: print(line, flush=True),
            None if model is None else PretrainedWeights.of(model),
            None if model is None else model.export.merges(),
            part,
            arguments.weights,
        )
        warn_if_rebuilt(output)
        use = ""
        if (opens := exported.architecture) is not None:
            use = f"; open it with transformers' {opens}.from_pretrained({arguments.output!r})"
        elif model is not None and hasattr(model.options, "pretrained"):
            key = f"model.{arguments.part}" if arguments.part else "model"
            use = f"; {key}.pretrained={arguments.output} begins a run with it"
        print(
            f"{arguments.output}: {exported.parameters:,} parameters of {checkpoint}, {exported.bytes / 1e6:,.1f} MB "
            f"in {exported.files} file(s){use}"
        )
        return 0
