"""Read annotations of images in the layouts that are published: LLaVA's, MiniGPT-4's, LAVIS', COCO's, chat messages."""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstrain import IMAGE, DataError, SampleError
from crosstrain.data.row_audit import RowAudit
from crosstrain.data.vision.image import LARGEST_IMAGE
from crosstrain.utils.errors import os_errors_as
from crosstrain.utils.files import read_regular

from ..commands.prepare.io import opened

_MOST_BYTES = 1 << 32
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
IMAGE_KEYS = ("image", "images", "file_name", "image_path")  # keys of names of images
_OTHER_MEDIA = ("video", "videos", "audio", "audios")
_KNOWN = ("conversations", "caption", "questions")  # of which an annotation has one, beside what a processor reads
_PLACEHOLDERS = ("<Img><ImageHere></Img>", "<ImageHere>")  # MiniGPT-4's
_SOURCES = ("bytes", "path", "url", "file_name", "image", "image_url")  # of an image that is described by an object
_EMPTY = (None, "", [], {})  # values without a meaning
_DATA = "data:"  # begins an image that stands in the annotation itself, in base64


def read_annotations(
    path: Path, audit: RowAudit | None = None, used: frozenset[str] = frozenset(), max_dropped: float = 0.1
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the annotation of each sample, in the form that `annotation_of` describes.

    The file is a list of objects, an object with such a list under `annotations` or `data`, or one object a line; it
    may be compressed. COCO's `images` give the names. `audit` counts the rows, those that are dropped, and their
    keys; without `used` no keys. Raises DataError for a file that cannot be read, and where more than the share
    `max_dropped` of the rows is dropped.
    """
    audit = audit or RowAudit(used)
    for place, entry in _entries(path.expanduser(), audit):
        try:
            sample = annotation_of(entry)
            if used and not any(key.partition(".")[0] in sample for key in (*_KNOWN, *used - {"images"})):
                raise SampleError(
                    f"it has none of the known layouts, but {', '.join(map(str, entry))[:100] or 'no keys'}"
                )
        except SampleError as error:
            audit.drop(place, str(error))
        else:
            audit.row(place, keys_of(sample) if used else [])
            yield place, sample
    audit.check(str(path), max_dropped)


def _entries(path: Path, audit: RowAudit) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with their places. A line that is no JSON is a row too, its text."""
    with opened(path) as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise DataError(f"{path} has more than {_MOST_BYTES >> 30} GiB: use shards of images and texts")
    try:
        text = data.decode(json.detect_encoding(data))
        rows = _rows(json.loads(text), str(path), audit)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise DataError(f"{path}:{error.lineno} is not JSON ({error.msg})") from None
        lines = enumerate(text.split("\n"), 1)  # only there: other ends of lines may stand within texts
        yield from ((f"{path}:{number}", _parsed(line)) for number, line in lines if line.strip())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error})") from None
    else:
        yield from ((f"entry {number} of {path}", row) for number, row in enumerate(rows))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def _rows(found: Any, path: str, audit: RowAudit) -> list[Any]:
    """Return a document's rows, those of COCO with the objects that describe their images; count the other keys."""
    document = found if isinstance(found, dict) else {"data": found}
    held = "annotations" if "annotations" in document else "data"
    rows, images = document.get(held), document.get("images")
    if not isinstance(rows, list):
        return [found]
    others = keys_of({key: document[key] for key in document.keys() - {held, "images"}})
    audit.add(RowAudit().plain | {"unread": {key: [1, path] for key in sorted(others)}})
    if isinstance(images, list):
        by_id = {str(image.get("id")): image for image in images if isinstance(image, dict)}
        for row in (row for row in rows if isinstance(row, dict)):
            name = str(row.pop("image_id", None))
            row.setdefault("image", by_id.get(name, {"unknown image_id": name}))
    return rows


def annotation_of(entry: Any) -> dict[str, Any]:
    """Return an entry with `images`, a list of names, and `conversations`, `caption` or `questions`, as it has them.

    Conversations are [{from or role, value or content: text}]; messages with parts, and instructions and outputs become
    such. A question and its answers become `questions`. Keys that are not read here stay. Raises SampleError for an
    entry that is no object, or that has other media, or images in an unknown form.
    """
    if not isinstance(entry, dict):
        raise SampleError(f"it is no JSON object, but {str(entry)[:50]!r}")
    if media := [key for key in _OTHER_MEDIA if entry.get(key)]:
        raise SampleError(f"it has {media[0]}, and only images and texts are read")
    sample = dict(entry)
    named = next((key for key in IMAGE_KEYS if sample.get(key)), "images")
    given = sample.pop(named, None) or []
    if named == "image" and sample.get("images"):
        raise SampleError("it has both image and images")
    images = [_reference(image, sample) for image in (given if isinstance(given, list) else [given])]
    if "question" in sample and "answer" in sample:
        sample["questions"] = [{"question": sample.pop("question"), "answer": sample.pop("answer")}]
    if "conversations" not in sample and "messages" in sample:
        sample["conversations"] = sample.pop("messages")
    elif "conversations" not in sample and "instruction" in sample and "output" in sample:
        asked = sample.pop("instruction")
        if isinstance(asked, str) and isinstance(sample.get("input"), str):  # Alpaca's
            asked = "\n\n".join(filter(None, (asked, sample.pop("input"))))
        sample["conversations"] = _turns(asked, sample.pop("output"))
    turns = sample.get("conversations")
    if isinstance(turns, list):
        told = [{"from": "system", "value": sample.pop("system")}] if sample.get("system") else []
        parts: list[Any] = []
        sample["conversations"] = told + [_flat(turn, parts, sample) for turn in turns]
        images += parts
    if not images and sample.get("image_id") not in _EMPTY and not any(key in entry for key in IMAGE_KEYS):
        name = str(sample.pop("image_id"))
        images = [name if Path(name).suffix.lower() in _ENDINGS else f"{name}.jpg"]
    return sample | {"images": images}


def _turns(asked: Any, answered: Any) -> list[dict[str, Any]]:
    """Return the turns of an instruction and its output, or of equally many. Raises SampleError for other values."""
    questions, answers = (value if isinstance(value, list) else [value] for value in (asked, answered))
    if len(questions) != len(answers) or not all(isinstance(text, str) for text in (*questions, *answers)):
        raise SampleError("its instruction and output are neither texts nor lists of equally many")
    turns = []
    for question, answer in zip(questions, answers, strict=True):
        for placeholder in _PLACEHOLDERS:
            question = question.replace(placeholder, IMAGE)
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return turns


def _flat(turn: Any, images: list[str], sample: dict[str, Any]) -> Any:
    """Return a turn whose parts are one text, with placeholders of images; add the images that the parts name.

    Keys of parts that are not read become keys of the sample.
    """
    key = "content" if isinstance(turn, dict) and "content" in turn else "value"
    if not isinstance(turn, dict) or not isinstance(turn.get(key), list):
        return turn
    text = ""
    for part in turn[key]:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind not in ("text", "image", "image_url") or not isinstance(part.get("text") or "", str):
            raise SampleError(f"a turn has a part of type {kind}, and only text, image and image_url are read")
        text += (part.get("text") or "") if kind == "text" else IMAGE
        if kind != "text" and any(part.get(source) for source in _SOURCES):
            images.append(_reference(part, sample))
        else:
            sample |= {f"part.{name}": value for name, value in part.items() if name not in ("type", "text")}
    return turn | {key: text}


def _reference(given: Any, sample: dict[str, Any]) -> str:
    """Return a file's name, or a data: URL, from a name or an object of the Hugging Face hub, of COCO or of OpenAI.

    Other keys of the object become keys of the sample.
    """
    name = given
    while isinstance(name, dict):
        source = next((source for source in _SOURCES if name.get(source)), "")
        sample |= {f"image.{key}": value for key, value in name.items() if key not in (*_SOURCES, "type")}
        name = f"{_DATA};base64,{name[source]}" if source == "bytes" else name.get(source)
    if not isinstance(name, str) or not name or name.startswith(("http:", "https:")):
        raise SampleError(f"its image is {given!r:.80}, and not a file's name, {{path: name}} or {{bytes: base64}}")
    return name


def read_image(name: str, folder: Path) -> bytes:
    """Return the bytes of an image that an annotation names or holds. Raises SampleError where they cannot be read."""
    if name.startswith(_DATA):
        try:
            return base64.b64decode(name.partition(",")[2], validate=True)
        except ValueError:
            raise SampleError("the image in its annotation is not base64") from None
    with os_errors_as(SampleError, f"{folder / name} cannot be read"):
        return read_regular(folder / name, LARGEST_IMAGE)


def keys_of(annotation: Mapping[str, Any]) -> list[str]:
    """Return the keys that have a value: KEY, or KEY.NAME for a name within a list of objects."""
    found = dict[str, None]()
    for key, value in annotation.items():
        inner = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
        names = [f"{key}.{name}" for item in inner for name, held in item.items() if held not in _EMPTY]
        found |= dict.fromkeys(names or ([key] if value not in _EMPTY else []))
    return list(found)
