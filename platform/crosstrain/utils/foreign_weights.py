"""Weights of other programs, which are recognised and not read."""

from pathlib import Path

_PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_FOLDERS = {  # a file that tells whose folder it is: what it is, and what to do
    "latest_checkpointed_iteration.txt": "a checkpoint of Megatron-LM; convert it to a Hugging Face folder, as "
    "Megatron Bridge does, for model.pretrained",
    "zero_to_fp32.py": "a checkpoint of DeepSpeed; `python zero_to_fp32.py . OUT --safe_serialization` there, with the "
    "model's config.json beside it, makes a folder for model.pretrained",
    ".metadata": "a checkpoint of torch.distributed.checkpoint; convert it to a Hugging Face folder for "
    "model.pretrained with the program that wrote it",
}


_PICKLED = (
    "a file of torch's pickles, which can run code when read; weights come from a folder with config.json and "
    "safetensors, as save_pretrained of transformers writes"
)


def foreign_weights(path: Path) -> str | None:
    """Return what another program's weights at `path`, there or not, are and what to do; None for any other path."""
    if path.suffix in _PICKLES and not path.is_dir():
        return _PICKLED
    places = [path, path.parent] if path.is_dir() else []  # a step's folder lies in the one that tells
    known = (said for place in places for name, said in _FOLDERS.items() if (place / name).is_file())
    pickles = (f"holds {file.name}, {_PICKLED}" for file in path.glob("*") if file.suffix in _PICKLES)
    return next(known, None) or next(pickles, None)
