"""Recognize weights of other programs, and adapters without a base model, to reject them with advice."""

import json
from pathlib import Path

from crosstrain.utils.errors import explained
from crosstrain.utils.files import read_regular

_PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_CONSOLIDATE = (
    "run `python zero_to_fp32.py . OUT --safe_serialization` in the folder that has this program, and put the model's "
    "config.json in OUT, to make a folder for model.pretrained"
)
_SHARDED = (
    "a checkpoint of torch.distributed.checkpoint, as FSDP saves it; convert it to a Hugging Face folder for "
    "model.pretrained with the program that wrote it, for example by `accelerate merge-weights FOLDER OUT` and the "
    "model's config.json next to the result"
)
_FOLDERS = {  # pattern of a file's path that identifies the program -> description and advice
    "latest_checkpointed_iteration.txt": "a checkpoint of Megatron-LM; convert it to a Hugging Face folder, as "
    "Megatron Bridge does, for model.pretrained",
    "zero_to_fp32.py": f"a checkpoint of DeepSpeed; {_CONSOLIDATE}",
    "*_model_states.pt": f"a checkpoint of DeepSpeed; {_CONSOLIDATE}",
    "global_step*/*_model_states.pt": f"a checkpoint of DeepSpeed; {_CONSOLIDATE}",
    ".metadata": _SHARDED,
    "*.distcp": _SHARDED,
    "pytorch_model_fsdp_*/.metadata": _SHARDED,
    "pytorch_model_fsdp.bin": "a checkpoint of FSDP in one pickle file of torch; save it with "
    "`fsdp_state_dict_type: SHARDED_STATE_DICT` or as a Hugging Face folder with safetensors, for model.pretrained",
}


_PICKLED = (
    "a pickle file of torch, which can run code when it is read; use a folder with config.json and safetensors, as "
    "save_pretrained of transformers writes it"
)


def foreign_weights(path: Path) -> str | None:
    """Return a description of another program's weights at `path`, with advice; None for any other path.

    The path may not exist.
    """
    if path.suffix in _PICKLES and not path.is_dir():
        return _PICKLED
    places = [path, path.parent] if path.is_dir() else []  # the identifying file may be next to a step's folder
    known = (said for place in places for name, said in _FOLDERS.items() if any(place.glob(name)))
    pickles = (
        f"contains {file.name}, {_PICKLED}"
        for file in path.glob("*")
        if file.suffix in _PICKLES and not file.with_suffix(".idx").exists()  # tokens of a dataset have an index
    )
    return next(known, None) or next(pickles, None)


def lone_adapter(path: Path, source: str | Path) -> str | None:
    """Return a description of a peft folder without its base model, with advice; None for any other folder.

    The advice names the folder as `source`.
    """
    file = path / "adapter_config.json"
    if not file.is_file() or any(path.glob("model*.safetensors")):
        return None
    with explained(f"{file}: cannot be read"):
        config = json.loads(read_regular(file, 1 << 24))
        kind, base = config["peft_type"].lower(), config.get("base_model_name_or_path") or "BASE"
    return (
        f"contains an adapter without its base model; load both with model.pretrained: {base} and "
        f"model.adapter: {{name: {kind}, pretrained: {source}}}"
    )
