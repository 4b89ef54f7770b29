"""Read image annotations in published layouts: LLaVA, MiniGPT-4, LAVIS, COCO and chat messages."""

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstrain import IMAGE, SampleError, first_line, os_errors_as, read_regular

from ..commands.prepare.chat_template import ChatError, refuse_if
from ..commands.prepare.conversation_files import rows_as_given
from ..commands.prepare.conversations import Turn, conversations
from .row_audit import RowAudit
from .vision.conversations import VIDEO
from .vision.image import LARGEST_IMAGE

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
_IMAGE_KEYS = ("image", "images", "file_name", "image_path")  # keys that hold image names
_KNOWN = ("conversations", "caption", "questions")  # annotations have one of these keys or a key that a processor reads
_PLACEHOLDERS = re.compile("<Img><ImageHere></Img>|<ImageHere>")  # MiniGPT-4's image placeholders
_READ = {"role", "content", "weight"}  # keys of a turn that processors read
# Keys of an image object that hold the image or its name.
_SOURCES = ("bytes", "path", "url", "file_name", "image", "image_url")
_EMPTY = (None, "", [], {})  # values that count as missing
_DATA = "data:"  # prefix of an image stored in the annotation itself, in base64


def read_annotations(path: Path, audit: RowAudit, max_dropped: float = 0.1) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, annotation) of each sample; annotations have the form that `annotation_of` returns.

    The file contains rows in a format that `conversation_files.rows` reads, or an object with the rows under
    `annotations`. In COCO's layout, the file names are under `images`. `audit` counts rows and dropped rows, and also
    the keys outside its `ignore_columns`, unless that is empty. Raises DataError if the file cannot be read, or if the
    fraction of dropped rows is above `max_dropped`.
    """
    used = audit.ignore_columns
    for entry, place in _entries(path, audit):
        try:
            sample, unread = annotation_of(entry)
            refuse_if(
                used and not {*sample, *entry} & {key.partition(".")[0] for key in (*_KNOWN, *used - {"images"})},
                f"its layout is unknown; it has {', '.join(map(str, entry))[:100] or 'no keys'}",
            )
        except SampleError as error:
            audit.drop(place, str(error))
        else:
            audit.row(place, [*keys_of(sample), *sorted(unread)] if used else [])
            yield place, sample
    audit.check(str(path), max_dropped)


def _entries(path: Path, audit: RowAudit) -> Iterator[tuple[Any, str]]:
    """Yield (row, location) of each row in a file; rows in COCO's layout get the image object that they refer to."""
    for row, place in rows_as_given(str(path)):
        if not isinstance(row, dict) or not (
            isinstance(row.get("annotations"), list) and isinstance(row.get("images") or [], list)
        ):
            yield row, place
            continue
        described = [image for image in row.pop("images", None) or () if isinstance(image, dict)]
        by_id = {str(image.get("id")): image for image in described}
        annotations = row.pop("annotations")
        audit.add({"unread": {key: [1, str(path)] for key in sorted(keys_of(row))}})
        for number, entry in enumerate(annotations):
            if by_id and isinstance(entry, dict):
                name = str(entry.pop("image_id", None))
                entry.setdefault("image", by_id.get(name, {"unknown image_id": name}))
            yield entry, f"{path}, annotation {number}"


def annotation_of(entry: Any, beside: bool = False) -> tuple[dict[str, Any], set[str]]:
    """Normalize an entry: return `images`, a list of names, with `conversations`, `caption` or `questions`.

    An entry with videos, which are lists of frames, has lists of names in `images`.

    Also returns the paths of unread keys. A conversation becomes a list of turns in normal form; a question and its
    answers become `questions`. Keys that this function does not read are kept. beside: the images are stored next to
    the entry, so the entry does not name them. Raises SampleError for an entry that is not an object, contains other
    media, or refers to images in an unknown form.
    """
    refuse_if(not isinstance(entry, Mapping), str(entry) if isinstance(entry, str) else "it is not a JSON object")
    row = {key: value for key, value in entry.items() if value not in _EMPTY}
    match row.get("videos"):
        case [[*_], *_] as videos if all(isinstance(frames, list) and frames for frames in videos):
            del row["videos"]
        case _:
            videos = []
    named = {key: row.pop(key) for key in _IMAGE_KEYS if key in row}
    refuse_if(not beside and named.keys() >= {"image", "images"}, "it has both image and images")
    given = [] if beside or not named else named.pop(next(iter(named)))
    unread = {"images of the .json"} if beside and "images" in named else set[str]()
    parts = list[dict[str, Any]]()
    images: list[Any] = [_reference(image, unread) for image in (given if isinstance(given, list) else [given])]
    images += [[_reference(frame, unread) for frame in frames] for frames in videos]
    refuse_if(videos and len(videos) < len(images), "it has both images and videos")
    if "question" in row and "answer" in row:
        row["questions"] = [{"question": row.pop("question"), "answer": row.pop("answer")}]
    match row:  # layout of MiniGPT4Qwen
        case {"instruction": [*asked], "output": [*answered]} if len(asked) == len(answered):
            *earlier, (row["instruction"], row["output"]) = zip(asked, answered, strict=True)
            row["history"] = [*row.get("history", []), *earlier]
    try:
        found, left = conversations(row, images=parts)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:  # an entry may be any JSON value
        raise ChatError(f"it is malformed ({first_line(error)})") from None
    made = {key: value for key, value in row.items() if key in left} | named
    unread |= (left - row.keys()) | (left & {"conversations"})
    for one in found:  # `found` is empty if the entry has no conversation
        made["conversations"] = [_plain(turn) for turn in one.messages]
        unread |= {f"messages.{key}" for turn in one.messages for key in turn.model_fields_set - _READ}
        unread |= {"tools"} if one.tools else set()
    refuse_if(images and any(part.keys() & {*_SOURCES} for part in parts), "it has images in its turns and beside them")
    for part in parts:
        unread |= {f"image.{key}" for key in part.keys() - {*_SOURCES, "type", "text"}}
        images += [_reference(part, unread)] if part.keys() & {*_SOURCES} else []
    if not images and "image_id" in row and not beside and not any(key in entry for key in _IMAGE_KEYS):
        name = str(made.pop("image_id"))
        images = [name if Path(name).suffix.lower() in _ENDINGS else f"{name}.jpg"]
    return made | {"images": images}, unread - ({IMAGE, VIDEO} if videos else {IMAGE})


def _plain(turn: Turn) -> dict[str, Any]:
    """Return the parts of a turn that processors read."""
    return {
        **{key: getattr(turn, key) for key in turn.model_fields_set & _READ},
        "content": turn.content and _PLACEHOLDERS.sub(IMAGE, turn.content),
    }


def _reference(given: Any, unread: set[str]) -> str:
    """Return an image's file name or data: URL, given a name or an image object (Hugging Face, COCO or OpenAI).

    Adds the paths of the object's other keys to `unread`.
    """
    name = given
    while isinstance(name, dict):
        source = next((source for source in _SOURCES if name.get(source)), "")
        unread |= {f"image.{key}" for key in name.keys() - {*_SOURCES, "type"} if name[key] not in _EMPTY}
        held = name.get(source)
        name = f"{_DATA};base64,{held}" if source == "bytes" and isinstance(held, str) else held
    if isinstance(name, bytes):  # the content of an image, from a Parquet table
        name = f"{_DATA};base64,{base64.b64encode(name).decode()}"
    refuse_if(
        not isinstance(name, str) or not name or name.startswith(("http:", "https:")),
        f"its image is {given!r:.80}; expected a file name, {{path: name}} or {{bytes: base64}}",
    )
    return str(name)


def read_image(name: str, folder: Path) -> bytes:
    """Return the bytes of an image from its file name or data: URL. Raises SampleError if the image cannot be read."""
    if name.startswith(_DATA):
        try:
            return base64.b64decode(name.partition(",")[2], validate=True)
        except ValueError:
            raise SampleError("the image in its annotation is not valid base64") from None
    with os_errors_as(SampleError, f"{folder / name} cannot be read"):
        return read_regular(folder / name, LARGEST_IMAGE)


def keys_of(annotation: Mapping[str, Any]) -> list[str]:
    """Return the keys that have a value: KEY, or KEY.NAME for the keys of objects in a list."""
    found = dict[str, None]()
    for key, value in annotation.items():
        inner = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
        names = [f"{key}.{name}" for item in inner for name, held in item.items() if held not in _EMPTY]
        found |= dict.fromkeys(names or ([key] if value not in _EMPTY else []))
    return list(found)
