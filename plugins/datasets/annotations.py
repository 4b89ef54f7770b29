"""Read JSON annotations of images in the layouts of MiniGPT-4, MiniGPT4Qwen and LLaVA."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstrain import DataError
from crosstrain.utils.files import read_regular

_MOST_BYTES = 1 << 32
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm")


def read_annotations(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each sample as {images: [names], and `caption` or `conversations` in LLaVA's form}.

    Layouts: LLaVA's [{image, conversations: [{from, value}]}], `image` a name, a list of them, or absent;
    MiniGPT-4's {annotations: [{image_id, caption}]}, whose images are IMAGE_ID, .jpg if it has no ending;
    MiniGPT4Qwen's [{image, instruction, output}], where lists of the same length are several turns. One object a line
    does for a list. Raises DataError for a file that cannot be read, or an entry in none of the layouts.
    """
    for number, entry in enumerate(_entries(path)):
        sample = _sample(entry) if isinstance(entry, dict) else None
        if sample is None:
            raise DataError(
                f"{path}: entry {number}{_keys(entry)} has none of the known layouts: image and conversations, image "
                f"(or image_id) and caption, or image, instruction and output"
            )
        yield sample


def _entries(path: Path) -> list[Any]:
    try:
        text = read_regular(path.expanduser(), _MOST_BYTES).decode()
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        found = json.loads(text)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error})") from None
    found = found.get("annotations") if isinstance(found, dict) else found
    if not isinstance(found, list):
        raise DataError(f"{path} is neither a list of samples nor an object with `annotations`")
    return found


def _keys(entry: Any) -> str:
    return f" ({', '.join(map(str, entry))[:100]})" if isinstance(entry, dict) else ""


def _sample(entry: dict[str, Any]) -> dict[str, Any] | None:
    kept = {key: value for key, value in entry.items() if key not in ("image", "images", "image_id")}
    images = _images(entry)
    if "conversations" in entry or "caption" in entry:
        return kept | {"images": images}
    if "instruction" in entry and "output" in entry:
        asked, answered = (v if isinstance(v, list) else [v] for v in (entry["instruction"], entry["output"]))
        if len(asked) != len(answered) or not all(isinstance(text, str) for text in (*asked, *answered)):
            return None
        turns = []
        for question, answer in zip(asked, answered, strict=True):
            turns += [{"from": "human", "value": _placeholder(question)}, {"from": "gpt", "value": answer}]
        return {"images": images, "conversations": turns}
    return None


def _placeholder(text: str) -> str:
    """Replace MiniGPT-4's placeholder of an image, <Img><ImageHere></Img>."""
    return text.replace("<Img><ImageHere></Img>", "<image>").replace("<ImageHere>", "<image>")


def _images(entry: dict[str, Any]) -> list[str]:
    if "image_id" in entry and "image" not in entry:
        name = str(entry["image_id"])
        return [name if Path(name).suffix.lower() in _ENDINGS else f"{name}.jpg"]
    named = entry.get("image", entry.get("images")) or []
    return [str(name) for name in (named if isinstance(named, list) else [named])]
