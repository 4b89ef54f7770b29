"""Read annotations of images in the layouts that are published: LLaVA's, MiniGPT-4's, LAVIS', COCO's, chat messages."""

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstrain import IMAGE, SampleError
from crosstrain.data.chat_template import ChatError, refuse_if
from crosstrain.data.vision.image import LARGEST_IMAGE
from crosstrain.utils.errors import first_line, os_errors_as
from crosstrain.utils.files import read_regular

from ..commands.prepare.conversation_files import rows_as_given
from ..commands.prepare.conversations import Turn, conversations
from .row_audit import RowAudit

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
_IMAGE_KEYS = ("image", "images", "file_name", "image_path")  # keys of names of images
_KNOWN = ("conversations", "caption", "questions")  # of which an annotation has one, beside what a processor reads
_PLACEHOLDERS = re.compile("<Img><ImageHere></Img>|<ImageHere>")  # MiniGPT-4's
_READ = {"role", "content", "weight"}  # keys of a turn that processors read
_SOURCES = ("bytes", "path", "url", "file_name", "image", "image_url")  # of an image that is described by an object
_EMPTY = (None, "", [], {})  # values without a meaning
_DATA = "data:"  # begins an image that stands in the annotation itself, in base64


def read_annotations(
    path: Path, audit: RowAudit | None = None, used: frozenset[str] = frozenset(), max_dropped: float = 0.1
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the annotation of each sample, in the form that `annotation_of` describes.

    The file is one of rows, as `conversation_files.rows` reads them, or an object with a list of rows under
    `annotations`, where COCO's `images` give the names. `audit` counts the rows, those that are dropped, and their
    keys; without `used` no keys. Raises DataError for a file that cannot be read, and where more than the share
    `max_dropped` of the rows is dropped.
    """
    audit = audit or RowAudit(used)
    for entry, place in _entries(path, audit):
        try:
            sample, unread = annotation_of(entry)
            refuse_if(
                used and not {*sample, *entry} & {key.partition(".")[0] for key in (*_KNOWN, *used - {"images"})},
                f"it has none of the known layouts, but {', '.join(map(str, entry))[:100] or 'no keys'}",
            )
        except SampleError as error:
            audit.drop(place, str(error))
        else:
            audit.row(place, [*keys_of(sample), *sorted(unread)] if used else [])
            yield place, sample
    audit.check(str(path), max_dropped)


def _entries(path: Path, audit: RowAudit) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file with their places; those of COCO with the objects that describe their images."""
    for row, place in rows_as_given(str(path)):
        if not isinstance(row, dict) or not isinstance(row.get("annotations"), list):
            yield row, place
            continue
        described = [image for image in row.pop("images", None) or () if isinstance(image, dict)]
        by_id = {str(image.get("id")): image for image in described}
        annotations = row.pop("annotations")
        audit.add(RowAudit().plain | {"unread": {key: [1, str(path)] for key in sorted(keys_of(row))}})
        for number, entry in enumerate(annotations):
            if by_id and isinstance(entry, dict):
                name = str(entry.pop("image_id", None))
                entry.setdefault("image", by_id.get(name, {"unknown image_id": name}))
            yield entry, f"{path}, annotation {number}"


def annotation_of(entry: Any, beside: bool = False) -> tuple[dict[str, Any], set[str]]:
    """Return an entry with `images`, a list of names, and `conversations`, `caption` or `questions`, as it has them.

    Also returns paths of keys that are left out. Conversations are turns of the normal form; a question and its
    answers become `questions`. Keys that are not read here stay. beside: the images stand beside the entry, so that it
    names none. Raises SampleError for an entry that is no object, or that has other media, or images in an unknown
    form.
    """
    refuse_if(not isinstance(entry, Mapping), str(entry) if isinstance(entry, str) else "it is no JSON object")
    row = {key: value for key, value in entry.items() if value not in _EMPTY}
    named = {key: row.pop(key) for key in _IMAGE_KEYS if key in row}
    refuse_if(not beside and named.keys() >= {"image", "images"}, "it has both image and images")
    given = [] if beside or not named else named.pop(next(iter(named)))
    unread, parts = set[str](), list[dict[str, Any]]()
    images = [_reference(image, unread) for image in (given if isinstance(given, list) else [given])]
    if "question" in row and "answer" in row:
        row["questions"] = [{"question": row.pop("question"), "answer": row.pop("answer")}]
    match row:  # MiniGPT4Qwen's
        case {"instruction": [*asked], "output": [*answered]} if len(asked) == len(answered):
            *earlier, (row["instruction"], row["output"]) = zip(asked, answered, strict=True)
            row["history"] = [*row.get("history", []), *earlier]
    try:
        found, left = conversations(row, images=parts)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:  # JSON may be anything
        raise ChatError(f"it is malformed ({first_line(error)})") from None
    made = {key: value for key, value in row.items() if key in left} | named
    unread |= (left - row.keys()) | (left & {"conversations"})
    for one in found:  # or none
        made["conversations"] = [_plain(turn) for turn in one.messages]
        unread |= {f"messages.{key}" for turn in one.messages for key in turn.model_fields_set - _READ}
        unread |= {"tools"} if one.tools else set()
    for part in parts:
        unread |= {f"image.{key}" for key in part.keys() - {*_SOURCES, "type", "text"}}
        images += [_reference(part, unread)] if part.keys() & {*_SOURCES} else []
    if not images and "image_id" in row and not beside and not any(key in entry for key in _IMAGE_KEYS):
        name = str(made.pop("image_id"))
        images = [name if Path(name).suffix.lower() in _ENDINGS else f"{name}.jpg"]
    return made | {"images": images}, unread - {IMAGE}


def _plain(turn: Turn) -> dict[str, Any]:
    """Return a turn with the keys that processors read."""
    plain = {key: getattr(turn, key) for key in turn.model_fields_set & _READ}
    return plain | {"content": turn.content and _PLACEHOLDERS.sub(IMAGE, turn.content)}


def _reference(given: Any, unread: set[str]) -> str:
    """Return a file's name, or a data: URL, from a name or an object of the Hugging Face hub, of COCO or of OpenAI.

    Paths of other keys of the object are added to `unread`.
    """
    name = given
    while isinstance(name, dict):
        source = next((source for source in _SOURCES if name.get(source)), "")
        beside = {key for key, held in name.items() if held not in _EMPTY} - {*_SOURCES, "type"}
        unread |= {f"image.{key}" for key in beside}
        held = name.get(source)
        name = f"{_DATA};base64,{held}" if source == "bytes" and isinstance(held, str) else held
    if isinstance(name, bytes):  # of a table
        name = f"{_DATA};base64,{base64.b64encode(name).decode()}"
    refuse_if(
        not isinstance(name, str) or not name or name.startswith(("http:", "https:")),
        f"its image is {given!r:.80}, and not a file's name, {{path: name}} or {{bytes: base64}}",
    )
    return str(name)


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
