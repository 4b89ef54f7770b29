"""Annotations of images: each key of an entry, a turn and a part is used, named or refused, in every layout."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from crosstrain_plugins.builtin.datasets.annotations import annotation_of
from crosstrain_plugins.builtin.datasets.row_audit import RowAudit
from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE_ID
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.data.chat import SampleError
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.utils.errors import ConfigError, DataError
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_shards import captions, jpeg, module_of, opened, write_shard
from fixtures_vision import EVAL, picture, write_project

ASKED = [{"from": "human", "value": "<image>\nwhat colour is it"}, {"from": "gpt", "value": "red"}]
SHOWN = [{"type": "image"}, {"type": "text", "text": "what colour is it"}]
ANSWERED = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}
DATA_URL = "data:image/png;base64,"


def notes(home: Path, words: Path, content: Any, name: str = "notes.json", **more: Any) -> dict[str, Any]:
    """A dataset of annotations beside three images; bytes are the file's, and other content is written as JSON."""
    for i in range(3):
        picture(home / "images" / f"{i}.png", i)
        picture(home / "images" / f"{i}.jpg", i)
    (home / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    places = {"annotations": str(home / name), "images": str(home / "images")}
    return {"name": "instructions", "tokenizer": str(words), "max_skipped": 0.5, **places, **more}


def by(processor: str, **options: Any) -> dict[str, Any]:
    return {"text_processor": {"train": {"name": processor, **options}, "eval": {"name": processor, **options}}}


def get(dataset: Any, index: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    sample: dict[str, np.ndarray] = dataset.get(index, np.random.default_rng(seed))
    return sample


def said(dataset: Any, index: int = 0, seed: int = 0) -> str:
    """The words that are learned from a sample."""
    labels = get(dataset, index, seed)["labels"]
    return " ".join(dataset.encoder.tokenizer.backend.id_to_token(int(i)) for i in labels if i != IGNORE_INDEX)


def told(dataset: Any, index: int = 0) -> str:
    """All words of a sample, with * for a position of an image."""
    vocabulary = dataset.encoder.tokenizer.backend
    return " ".join("*" if i == IMAGE_ID else vocabulary.id_to_token(int(i)) for i in get(dataset, index)["input_ids"])


def base64_of(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


# ---- where an entry names its image


def references(home: Path) -> dict[str, dict[str, Any]]:
    encoded = base64_of(picture(home / "images" / "1.png", 1))
    chat = {"messages": [{"role": "user", "content": SHOWN}, ANSWERED]}
    part = {"type": "image", "image": "1.png"}, SHOWN[1]
    url = {"type": "image_url", "image_url": {"url": DATA_URL + encoded}}, SHOWN[1]
    return {
        "a name": {"image": "1.png", "conversations": ASKED},
        "a path": {"image": {"path": "1.png"}, "conversations": ASKED},
        "a path without bytes": {"image": {"bytes": None, "path": "1.png"}, "conversations": ASKED},
        "bytes": {"image": {"bytes": encoded, "path": None}, "conversations": ASKED},
        "bytes with a path": {"image": {"bytes": encoded, "path": "none.png"}, "conversations": ASKED},
        "a data URL": {"image": DATA_URL + encoded, "conversations": ASKED},
        "a list of paths": {"images": [{"path": "1.png"}], "conversations": ASKED},
        "images beside a null": {"image": None, "images": ["1.png"], "conversations": ASKED},
        "file_name": {"file_name": "1.png", "conversations": ASKED},
        "messages": {"image": "1.png", "messages": ASKED},
        "parts": {"images": ["1.png"], **chat},
        "a part with its image": {"messages": [{"role": "user", "content": list(part)}, ANSWERED]},
        "a part with a data URL": {"messages": [{"role": "user", "content": list(url)}, ANSWERED]},
        "MiniGPT4Qwen": {"image": "1.png", "instruction": "<Img><ImageHere></Img>\nwhat colour is it", "output": "red"},
        "Alpaca": {"image": "1.png", "instruction": "<image>", "input": "what colour is it", "output": "red"},
        "query and response": {"images": ["1.png"], "query": "what colour is it", "response": "red"},
        "prompt and completion": {"image": "1.png", "prompt": "what colour is it", "completion": "red"},
        "turns in JSON": {"image": "1.png", "conversations": json.dumps(ASKED)},
        "a turn as prompt": {"image": "1.png", "prompt": {"role": "user", "content": SHOWN}, "completion": "red"},
    }


NAMES = [
    "a name", "a path", "a path without bytes", "bytes", "bytes with a path", "a data URL", "a list of paths",
    "images beside a null", "file_name", "messages", "parts", "a part with its image", "a part with a data URL",
    "MiniGPT4Qwen", "Alpaca", "query and response", "prompt and completion", "turns in JSON", "a turn as prompt",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_layout_gives_the_same_sample(home: Path, words: Path, name: str) -> None:
    dataset = opened(home, notes(home, words, [references(home)[name]]))
    assert dataset.notice == ""
    sample = get(dataset)
    with Image.open(home / "images" / "1.png") as image:
        expected = dataset.image_processor(image.convert("RGB"), np.random.default_rng(0))
    assert np.array_equal(sample["pixel_values"], expected[None])
    assert said(dataset) == "red <|im_end|>"
    assert told(dataset).split().count("*") == 4
    assert "what colour is it" in told(dataset)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("https://example.org/1.png", "its image is 'https://example.org/1.png'; expected a file name"),
        ({"hash": "1"}, "its image is {'hash': '1'}; expected a file name"),
        ({"bytes": None, "path": None}, "its image is {'bytes': None"),
        ([["1.png"]], r"its image is \['1.png'\]"),
        ([None], "its image is None"),
        (7, "its image is 7"),
    ],
)
def test_an_image_that_is_no_file_is_refused(home: Path, words: Path, image: Any, reason: str) -> None:
    with pytest.raises(DataError, match=rf"1 of 1 rows are dropped, 1 such as .*notes\.json, entry 0: {reason}"):
        opened(home, notes(home, words, [{"image": image, "conversations": ASKED}]))


def test_two_lists_of_images_are_refused(home: Path, words: Path) -> None:
    with pytest.raises(DataError, match="it has both image and images"):
        opened(home, notes(home, words, [{"image": "0.png", "images": ["1.png"], "conversations": ASKED}]))


@pytest.mark.parametrize("given", [DATA_URL + "***", {"bytes": "***"}, DATA_URL + base64.b64encode(b"x").decode()])
def test_bytes_that_are_no_image_are_skipped_with_their_place(home: Path, words: Path, given: Any) -> None:
    rows = [{"image": given, "conversations": ASKED}, {"image": "1.png", "conversations": ASKED}]
    dataset = opened(home, notes(home, words, rows))
    assert said(dataset) == "red <|im_end|>"
    assert "not valid base64" in dataset.skipped[0] or f"{home}/notes.json, entry 0: {DATA_URL}" in dataset.skipped[0]


# ---- files


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


PLAIN = [{"image": f"{i}.png", "caption": f"red{mark}circle"} for i, mark in enumerate(("\u2028", "\x85", "\x0c"))]
FILES: dict[str, tuple[str, bytes]] = {
    "a list": ("n.json", json.dumps(PLAIN).encode()),
    "a list with a mark of order": ("n.json", json.dumps(PLAIN).encode("utf-8-sig")),
    "a list in UTF-16": ("n.json", json.dumps(PLAIN, ensure_ascii=False).encode("utf-16")),
    "lines": ("n.jsonl", lines(*PLAIN).encode()),
    "lines with a mark of order": ("n.jsonl", lines(*PLAIN).encode("utf-8-sig")),
    "lines in UTF-16": ("n.jsonl", lines(*PLAIN).encode("utf-16-le")),
    "lines that end as on Windows": ("n.jsonl", lines(*PLAIN).replace("\n", "\r\n").encode()),
    "lines in a .json": ("n.json", lines(*PLAIN).encode()),
    "a list in a .jsonl": ("n.jsonl", json.dumps(PLAIN).encode()),
    "under annotations": ("n.json", json.dumps({"annotations": PLAIN}).encode()),
    "under data": ("n.json", json.dumps({"data": PLAIN}).encode()),
    "compressed": ("n.json.gz", gzip.compress(json.dumps(PLAIN).encode())),
    "compressed lines": ("n.jsonl.gz", gzip.compress(lines(*PLAIN).encode())),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_by_their_content(home: Path, words: Path, name: str) -> None:
    file, data = FILES[name]
    dataset = opened(home, notes(home, words, data, file, **by("captions")))
    assert [said(dataset, i) for i in range(3)] == ["red circle <|im_end|>"] * 3
    assert dataset.notice == ""
    assert str(home / file) in dataset.location(2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "none of the 0 entries"),
        (b"\xff\xfe\x00", "is damaged"),
        (b"PAR1" + bytes(99), "is not JSON"),
        (b'[{"image": "0.png", "caption": "red"}, {"ima', r"n\.json: it is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"3", "it is not a JSON object"),
        (b'{"a": 1}\n{"b": 2}', r"n\.json:1: its layout is unknown; it has a"),
        (b'[{"image": "0.png", "boxes": []}]', "entry 0: its layout is unknown; it has image, boxes"),
    ],
)
def test_a_file_that_holds_no_annotations_is_one_sentence(home: Path, words: Path, data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        opened(home, notes(home, words, data, "n.json"))


def test_rows_that_cannot_be_used_are_dropped_up_to_a_share(home: Path, words: Path) -> None:
    good = [{"image": "0.png", "conversations": ASKED}] * 18
    text = lines(*good) + '{"image": "0.p\n' + lines({"image": "0.png"})
    dataset = opened(home, notes(home, words, text.encode(), "n.jsonl"))
    assert len(dataset) == 18
    assert "2 of 20 rows are dropped" in dataset.notice
    assert "n.jsonl:19: it is not JSON" in dataset.notice
    assert "n.jsonl:20: its layout is unknown; it has image" in dataset.notice
    with pytest.raises(DataError, match=r"3 of 21 rows are dropped, .*more than max_dropped=0\.1"):
        opened(home, notes(home, words, (text + "3\n").encode(), "n.jsonl"))
    assert len(opened(home, notes(home, words, (text + "3\n").encode(), "n.jsonl", max_dropped=0.2))) == 18


def test_a_table_holds_its_images(home: Path, words: Path) -> None:
    pixels = picture(home / "images" / "1.png", 1).read_bytes()
    row = {"image": {"bytes": pixels, "path": None}, "conversations": ASKED, "score": 2}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), home / "n.parquet")
    dataset = opened(home, notes(home, words, (home / "n.parquet").read_bytes(), "n.parquet"))
    named = opened(home, notes(home, words, [{"image": "1.png", "conversations": ASKED}]))
    assert np.array_equal(get(dataset)["pixel_values"], get(named)["pixel_values"])
    assert f"score (1 of 1 rows, first in {home}/n.parquet, row 0)" in dataset.notice


ODD_PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "an image in a turn": (
        {"conversations": [ASKED[0] | {"images": ["0.png"]}, ASKED[1]]},
        "it has images, but only text and images are read",
    ),
    "a video in a turn": ({"image": "0.png", "conversations": [ASKED[0] | {"video": "a"}, ASKED[1]]}, "has video"),
    "two systems": ({"system": "a", "conversations": [{"from": "system", "value": "b"}, *ASKED]}, "its system column"),
    "a part that is text": ({"messages": [{"role": "user", "content": ["<image>"]}, ANSWERED]}, "a part of type str"),
    "an answer without words": ({"image": "0.png", "question": "what", "answer": ""}, "its layout is unknown; it has "),
}


@pytest.mark.parametrize("name", ODD_PLACES)
def test_what_stands_in_an_odd_place_is_refused(home: Path, words: Path, name: str) -> None:
    row, reason = ODD_PLACES[name]
    with pytest.raises(DataError, match=f"1 of 1 rows are dropped, 1 such as .*entry 0: .*{reason}"):
        opened(home, notes(home, words, [row]))


@pytest.mark.parametrize(("more", "key"), [({"tools": [{"name": "f"}]}, "tools"), ({"label": False}, "label")])
def test_columns_of_chats_that_no_image_needs_are_named(home: Path, words: Path, more: Any, key: str) -> None:
    dataset = opened(home, notes(home, words, [{"image": "0.png", "conversations": ASKED, **more}]))
    assert f"unused keys: {key} (1 of 1 rows" in dataset.notice


# ---- captions of COCO


def test_captions_of_coco_have_the_names_that_the_file_gives(home: Path, words: Path) -> None:
    coco = {
        "info": {"year": 2014}, "licenses": [], "categories": [{"id": 1}],
        "images": [{"id": 7, "file_name": "2.png", "height": 20, "license": 3}, {"id": 9, "file_name": "0.png"}],
        "annotations": [
            {"image_id": 7, "id": 1, "caption": "red circle"}, {"image_id": 9, "id": 2, "caption": "blue"},
            {"image_id": 7, "id": 3, "caption": "left"},
        ],
    }  # fmt: skip
    dataset = opened(home, notes(home, words, coco, **by("captions")))
    assert [entry["images"] for _, entry in dataset.entries] == [["2.png"], ["0.png"], ["2.png"]]
    assert [said(dataset, i) for i in range(3)] == ["red circle <|im_end|>", "blue <|im_end|>", "left <|im_end|>"]
    for part in ("image.id (3 of 3 rows", "image.height (2 of 3 rows", "image.license (2 of 3", " id (3 of 3 rows"):
        assert part in dataset.notice
    assert f"info (1 of 3 rows, first in {home}/notes.json)" in dataset.notice
    assert "image_id" not in dataset.notice
    quiet = notes(home, words, coco, **by("captions"), ignore_columns=["id", "image", "info", "categories"])
    assert opened(home, quiet).notice == ""
    coco["annotations"] += [{"image_id": 8, "id": 4, "caption": "lost"}]
    with pytest.raises(
        DataError, match=r"1 of 4 rows are dropped, .* its image is {'unknown image_id': '8'}; expected"
    ):
        opened(home, notes(home, words, coco, **by("captions")))


# ---- what a row has beside


BESIDE: dict[str, tuple[dict[str, Any], str]] = {
    "a column": ({"image": "0.png", "conversations": ASKED, "source": "web"}, "source"),
    "a caption": ({"image": "0.png", "conversations": ASKED, "caption": "red"}, "caption"),
    "a key of a turn": (
        {"image": "0.png", "conversations": [ASKED[0], ASKED[1] | {"thought": "hm"}]}, "messages.reasoning_content"),
    "a key of a part": (
        {"images": ["0.png"], "messages": [{"role": "user", "content": [SHOWN[0] | {"max_pixels": 9}, SHOWN[1]]},
                                           ANSWERED]}, "image.max_pixels"),
    "zero": ({"image": "0.png", "conversations": ASKED, "score": 0}, "score"),
    "two conversations": ({"image": "0.png", "conversations": ASKED, "messages": ASKED}, "conversations"),
    "its identifier": ({"image": "0.png", "conversations": ASKED, "image_id": 0}, "image_id"),
    "a key of an image": ({"image": {"path": "0.png", "width": 3}, "conversations": ASKED}, "image.width"),
    "a list of objects": ({"image": "0.png", "conversations": ASKED, "boxes": [{"x": 1}]}, "boxes.x"),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_a_key_that_is_not_used_is_named_once_with_count_and_place(home: Path, words: Path, name: str) -> None:
    row, key = BESIDE[name]
    rows = [{"image": "0.png", "conversations": ASKED}, row, row]
    dataset = opened(home, notes(home, words, rows))
    assert f"{key} (2 of 3 rows, first in {home}/notes.json, entry 1)" in dataset.notice
    assert dataset.notice.count("first in") == 1
    assert opened(home, notes(home, words, rows, ignore_columns=[key.partition(".")[0]])).notice == ""


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8), st.integers(), max_size=4),
    st.sampled_from(["entry", "turn"]),
)
def test_no_key_is_passed_over(more: dict[str, int], place: str) -> None:
    layouts = module_of("instructions", "annotations")
    used = {"images", "conversations.role", "conversations.content"}
    turn = ASKED[1] | (more if place == "turn" else {})
    entry = {"image": "0.png", "conversations": [ASKED[0], turn]} | (more if place == "entry" else {})
    try:
        sample, unread = layouts.annotation_of(entry)
    except SampleError:  # a refusal is not silent
        return
    found = {*layouts.keys_of(sample), *unread} - used
    read = {"image", "images", "conversations", "from", "value", "image_id"}
    prefix = "messages." if place == "turn" else ""
    assert found >= {prefix + key for key in more if key not in read}


KEYS = ["image", "images", "conversations", "messages", "from", "value", "role", "content", "type", "text", "caption",
        "bytes", "path", "url", "question", "answer", "questions", "instruction", "input", "output", "system", "weight",
        "image_id", "annotations", "data", "id", "file_name", "video"]  # fmt: skip
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["", "a", "image", "text", "user", "assistant"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=100, deadline=None)
@given(ODD)
def test_rows_of_any_shape_are_read_or_refused(document: Any) -> None:
    layouts = module_of("instructions", "annotations")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notes.json"
        path.write_text(json.dumps(document))
        try:
            rows = [row for _, row in layouts.read_annotations(path, RowAudit({"images", "caption"}), 0.99)]
        except DataError:
            rows = []
    for name in ("captions", "dialogue", "vqa"):
        kind = registry.get("processor", name)
        for row in rows:
            with suppress(SampleError):
                for conversation in kind(kind.Options())(row, len(row["images"]), np.random.default_rng(0)):
                    assert all(isinstance(message.text, str) for message in conversation)


def test_nulls_and_empty_values_mean_nothing(home: Path, words: Path) -> None:
    row = {"image": "0.png", "conversations": ASKED, "video": None, "audio": [], "note": "", "more": {}, "system": None}
    dataset = opened(home, notes(home, words, [row]))
    assert dataset.notice == ""
    assert said(dataset) == "red <|im_end|>"


def test_a_mixture_says_what_its_parts_do_not_use(home: Path, words: Path) -> None:
    shards = write_shard(home / "a.tar", [{"jpg": jpeg(0), "json": b'{"caption": "red", "url": "u"}'}])
    parts = [notes(home, words, [BESIDE["a column"][0]]), captions(words, train=str(shards))]
    sight = {"image_tokens": 4, "vis_processor": {"train": EVAL, "eval": EVAL}}
    mixture = {"name": "mixture", "parts": [{"dataset": part | sight, "ratio": 1.0} for part in parts]}
    document = yaml.safe_load(write_project(home / "mixed.yaml", {}).read_text())
    (home / "mixed.yaml").write_text(yaml.safe_dump(document | {"datasets": {"mixed": mixture}}))
    config = load_config(home / "mixed.yaml")
    prepare_data(config)
    notice = open_split(config, "train").notice
    assert "source (1 of 1 rows, first in " in notice
    assert "url (1 of 1 rows, first in a.tar: 000000)" in notice


# ---- other media, placeholders, roles and weights


@pytest.mark.parametrize("key", ["video", "videos", "audio", "audios"])
def test_a_row_with_other_media_is_dropped_with_the_reason(home: Path, words: Path, key: str) -> None:
    rows = [{"image": "0.png", "conversations": ASKED}] * 9 + [{key: ["a.mp4"], "conversations": ASKED[1:]}]
    dataset = opened(home, notes(home, words, rows))
    assert len(dataset) == 9
    assert f"1 of 10 rows are dropped, 1 such as {home}/notes.json, entry 9: it has {key}, but" in dataset.notice
    with pytest.raises(DataError, match=f"it has {key}, but only text and images are read"):
        opened(home, notes(home, words, rows, max_dropped=0.05))


UNUSABLE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "video": ([{"from": "human", "value": "<video>\nwhat"}, ASKED[1]], "placeholder <video>, but only images"),
    "audio": ([{"from": "human", "value": "what <audio>"}, ASKED[1]], "placeholder <audio>, but only images"),
    "two placeholders": ([{"from": "human", "value": "<image><image>"}, ASKED[1]], "2 <image> placeholders"),
    "a weight of a half": ([ASKED[0], ASKED[1] | {"weight": 0.5}], "a turn has {'weight': 0.5}; expected 0, 1"),
    "nothing learned": ([ASKED[0], ASKED[1] | {"weight": 0}], "no assistant turn to train on"),
    "a tool": ([ASKED[0], {"from": "observation", "value": "x"}, ASKED[1]], "a turn is a tool call or a tool result"),
    "half a character": ([ASKED[0], {"from": "gpt", "value": "red \ud800"}], "half a surrogate pair"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_conversation_that_cannot_be_used_is_skipped_with_the_reason(home: Path, words: Path, name: str) -> None:
    turns, reason = UNUSABLE[name]
    rows = [{"image": "0.png", "conversations": turns}, {"image": "0.png", "conversations": ASKED}]
    dataset = opened(home, notes(home, words, rows, max_dropped=0.5))
    assert said(dataset) == "red <|im_end|>"
    assert len(dataset) - len(dataset.skipped) == 1
    assert reason in "".join([dataset.notice, *dataset.skipped.values()])


def test_a_part_of_another_kind_is_dropped(home: Path, words: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, ANSWERED]
    with pytest.raises(DataError, match="a turn has a part of type video, not text or image or image_url"):
        opened(home, notes(home, words, [{"messages": chat}]))


@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss": False}, {"train": False}, {"weight": 0.0}])
def test_a_turn_of_no_weight_is_only_context(home: Path, words: Path, mark: dict[str, Any]) -> None:
    turns = [ASKED[0], ASKED[1] | mark, {"from": "human", "value": "where"}, {"from": "gpt", "value": "left"}]
    dataset = opened(home, notes(home, words, [{"image": "0.png", "conversations": turns}]))
    assert said(dataset) == "left <|im_end|>"
    assert "red" in told(dataset)
    assert dataset.notice == ""
    assert [example.answer for example in dataset.examples(0)] == ["left"]


def test_html_within_a_text_is_text(home: Path, words: Path) -> None:
    turns = [{"from": "human", "value": "what is a <video> tag"}, {"from": "gpt", "value": "<audio>"}]
    assert said(opened(home, notes(home, words, [{"conversations": turns}]))).endswith("<|im_end|>")


def test_a_system_column_is_the_system_turn(home: Path, words: Path) -> None:
    dataset = opened(home, notes(home, words, [{"image": "0.png", "conversations": ASKED, "system": "blue"}]))
    assert told(dataset).startswith("<|im_start|> system") or "blue" in told(dataset).split()[:4]
    assert dataset.notice == ""


# ---- questions and captions


def test_questions_of_lavis_draw_one_of_their_answers(home: Path, words: Path) -> None:
    rows = [{"image": "0.png", "question": "what", "answer": ["red", "red", "blue"], "question_id": 5}]
    dataset = opened(home, notes(home, words, rows, **by("vqa")))
    drawn = {said(dataset, 0, seed) for seed in range(30)}
    assert drawn == {"red <|im_end|>", "blue <|im_end|>"}
    assert [example.answer for example in dataset.examples(0)] == ["red"]
    assert "question_id (1 of 1 rows" in dataset.notice
    dataset = opened(home, notes(home, words, [*rows, {"conversations": ASKED[1:]}]))
    assert said(dataset) == "red <|im_end|>"
    assert dataset.skipped[0] == "it has no conversations; text_processor vqa reads its questions"


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        (None, "it has no caption"), ("", "it has no caption"), ("  ", "it has no caption: expected a text, got '  '"),
        ({"en": "red"}, "it has no caption: expected a text, got \"{'en': 'red'}\""),
        (["red", None], "it has no caption: expected a text, got \"['red', None]\""),
        (3, "it has no caption: expected a text, got '3'"),
        ("red <image>", "the text has 2 <image> placeholders, but the sample has 1 images"),
    ],
)  # fmt: skip
def test_a_caption_that_is_no_text_is_skipped(home: Path, words: Path, caption: Any, reason: str) -> None:
    rows = [{"image": "0.png", "caption": caption}, {"image": "0.png", "caption": ["red circle"]}]
    dataset = opened(home, notes(home, words, rows, **by("captions")))
    assert said(dataset) == "red circle <|im_end|>"
    assert dataset.skipped[0].startswith(reason)


def test_captions_of_an_image_folder(home: Path, words: Path) -> None:
    text = lines({"file_name": "0.png", "text": "red circle"})
    dataset = opened(home, notes(home, words, text.encode(), "metadata.jsonl", **by("captions", key="text")))
    assert said(dataset) == "red circle <|im_end|>"
    assert dataset.notice == ""


# ---- shards


def tar(path: Path, members: list[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return str(path)


def img2dataset(number: int, **more: Any) -> bytes:
    known = {"caption": f"red {number}", "url": "u", "width": 3, "status": "success", "error_message": None}
    return json.dumps(known | more).encode()


def test_shards_of_img2dataset_have_captions_and_named_metadata(home: Path, words: Path) -> None:
    members = [
        {"jpg": jpeg(0), "txt": b"red circle", "json": img2dataset(0, caption="red circle")},
        {"jpg": jpeg(1), "txt": b"blue", "json": img2dataset(1, caption=None)},
        {"jpg": jpeg(2), "txt": b"left", "json": json.dumps({"url": "u"}).encode()},
    ]
    path = str(write_shard(home / "a.tar", members))
    dataset = opened(home, captions(words, train=path))
    found = sorted(said(dataset, i) for i in range(3))
    assert [text.rpartition(" ")[0] for text in found] == ["blue", "left", "red circle"]
    notice = dataset.notice
    for key in ("url", "width", "status"):
        assert f"{key} (" in notice
    assert "error_message" not in notice
    assert "url (3 of 3 rows, first in a.tar: 000000)" in notice
    quiet = captions(words, train=path, ignore_columns=["url", "width", "status"])
    assert opened(home, quiet).notice == ""


def test_a_text_that_is_another_caption_and_other_members_are_named(home: Path, words: Path) -> None:
    members = [{"jpg": jpeg(0), "txt": b"blue", "json": b'{"caption": "red"}', "npy": b"x", "mp4": b"y"}]
    dataset = opened(home, captions(words, train=str(write_shard(home / "a.tar", members))))
    assert said(dataset).startswith("red")
    for key in ("txt", "npy", "mp4"):
        assert f"{key} (1 of 1 rows, first in a.tar: 000000)" in dataset.notice


def test_names_of_images_in_the_metadata_of_a_shard_are_only_named(home: Path, words: Path) -> None:
    metadata = {"caption": "red", "image": "https://example.org/1.jpg", "image_id": 7}
    path = write_shard(home / "a.tar", [{"jpg": jpeg(0), "json": json.dumps(metadata).encode()}])
    dataset = opened(home, captions(words, train=str(path), max_skipped=0.0))
    assert said(dataset).startswith("red")
    assert get(dataset)["pixel_values"].shape[0] == 1
    assert "image_id (1 of 1 rows" in dataset.notice
    assert " image (1 of 1 rows" in dataset.notice


def test_names_with_several_endings(home: Path, words: Path) -> None:
    members = [("s.input.jpg", jpeg(0)), ("s.outputs.txt", b"red circle"), ("t.a.png", b""), ("u.b.txt", b"blue")]
    dataset = opened(home, captions(words, train=tar(home / "a.tar", members), max_skipped=0.9))
    assert said(dataset).startswith("red circle")
    members = [("s.jpg", jpeg(0)), ("s.question.txt", b"what"), ("s.answer.txt", b"red")]
    dataset = opened(home, captions(words, train=tar(home / "b.tar", members)))
    with pytest.raises(DataError, match=r"or one of each, got jpg, question\.txt, answer\.txt"):
        get(dataset)


def test_members_in_any_order_are_paired_by_their_names(home: Path, words: Path) -> None:
    pictures = [(f"{i}.jpg", jpeg(i)) for i in range(4)]
    texts = [(f"{i}.txt", text) for i, text in enumerate((b"red", b"blue", b"left", b"where"))]
    mixed = tar(home / "a.tar", [*pictures, *reversed(texts)])
    sorted_ = tar(home / "b.tar", [member for pair in zip(pictures, texts, strict=True) for member in pair])
    one, other = (opened(home, captions(words, train=path)) for path in (mixed, sorted_))
    assert len(one) == len(other) == 4
    for i in range(4):
        a, b = get(one, i), get(other, i)
        assert all(np.array_equal(a[key], b[key]) for key in a)


def test_options_of_streams_are_ignored_where_they_changed_nothing(home: Path, words: Path) -> None:
    train = str(write_shard(home / "a.tar", [{"jpg": jpeg(0), "txt": b"red"}]))
    old = {"streaming": False, "samples": None, "shuffle_buffer": 1000}
    assert len(opened(home, captions(words, train=train, **old))) == 1
    with pytest.raises(ConfigError, match=r"streaming: not an option here: shards are read by index"):
        opened(home, captions(words, train=train, **old | {"streaming": True}))


@pytest.mark.parametrize("apart", [False, True])
def test_a_member_that_is_there_twice_is_refused(home: Path, words: Path, apart: bool) -> None:
    members = [("0.jpg", jpeg(0)), ("0.txt", b"red"), ("0.txt", b"blue")]
    members.insert(2, ("1.jpg", jpeg(1))) if apart else None
    with pytest.raises(DataError, match=r"it contains .*0\.txt twice"):
        opened(home, captions(words, train=tar(home / "a.tar", members)))


def test_layouts_of_files_are_read_in_shards_too(home: Path, words: Path) -> None:
    question = [{"jpg": jpeg(0), "json": b'{"question": "what", "answer": ["red"]}'}]
    dataset = opened(home, captions(words, train=str(write_shard(home / "q.tar", question))) | by("vqa"))
    assert (said(dataset), dataset.notice) == ("red <|im_end|>", "")
    rows = [{"instruction": "what", "output": "red"}, {"messages": [{"role": "user", "content": SHOWN}, ANSWERED]}]
    samples = [{"jpg": jpeg(i), "json": json.dumps(row).encode()} for i, row in enumerate(rows)]
    path = str(write_shard(home / "a.tar", samples))
    dataset = opened(home, captions(words, train=path) | by("dialogue"))
    assert [said(dataset, i) for i in range(2)] == ["red <|im_end|>"] * 2
    video = [{"jpg": jpeg(0), "json": json.dumps({"video": "a.mp4", "caption": "red"}).encode()}]
    dataset = opened(home, captions(words, train=str(write_shard(home / "b.tar", video))))
    with pytest.raises(DataError, match="it has video, but only text and images are read"):
        get(dataset)


def test_videos_are_lists_of_frames() -> None:
    turns = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "a cat"}]
    entry, unread = annotation_of({"videos": [["a.png", {"path": "b.png"}]], "messages": turns})
    assert entry["images"] == [["a.png", "b.png"]]
    assert not unread
    with pytest.raises(SampleError, match="both images and videos"):
        annotation_of({"images": ["c.png"], "videos": [["a.png"]], "messages": turns})


def test_images_in_turns_and_beside_them_have_no_order_and_are_refused() -> None:
    turns = [{"role": "user", "content": [{"type": "image", "image": "green.png"}, {"type": "image"}]}]
    with pytest.raises(SampleError, match="it has images in its turns and beside them"):
        annotation_of({"images": ["red.png"], "messages": [*turns, {"role": "assistant", "content": "ok"}]})


def test_names_of_images_in_a_shard_s_json_are_reported() -> None:
    assert annotation_of({"images": ["b.png", "a.png"], "caption": "x"}, beside=True)[1] == {"images of the .json"}
