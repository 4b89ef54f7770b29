"""Images with text: shards, processors, conversations, and what becomes of samples that cannot be used."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE_ID, ConversationEncoder
from PIL import Image

from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.data.chat import Message
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import training_steps
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.errors import ConfigError, DataError
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_shards import captions, jpeg, module_of, opened, serving, write_shard
from fixtures_vision import EVAL, options, picture, shapes, write_project


def two_shards(folder: Path) -> None:
    for shard in (0, 1):
        samples = [{"jpg": jpeg(10 * shard + i), "txt": b"red circle"} for i in range(5)]
        write_shard(folder / f"train-{shard:03d}.tar", samples, 5 * shard)


def get(dataset: Dataset, index: int) -> dict[str, np.ndarray]:
    return dataset.get(index, np.random.default_rng(index))


# ---- shards


@pytest.mark.parametrize("pattern", ["train-{000..001}.tar", "train-*.tar"])
def test_shards_are_found_by_braces_and_wildcards(home: Path, words: Path, pattern: str) -> None:
    two_shards(home)
    dataset = opened(home, captions(words, train=str(home / pattern)))
    assert len(dataset) == 10
    assert [dataset.samples.read(i)[0] for i in (0, 4, 5, 9)] == [
        "train-000.tar: 000000",
        "train-000.tar: 000004",
        "train-001.tar: 000005",
        "train-001.tar: 000009",
    ]
    assert get(dataset, 7)["pixel_values"].shape == (1, 3, 16, 16)


@pytest.fixture
def served(home: Path) -> Iterator[str]:
    two_shards(home / "www")
    with serving(home / "www") as address:
        yield address


def test_remote_shards_are_fetched_once(home: Path, words: Path, served: str) -> None:
    there = opened(home, captions(words, train=str(home / "www" / "train-{000..001}.tar")))
    over_http = opened(home, captions(words, train=f"{served}/train-{{000..001}}.tar"))
    command = f"pipe:cat {home}/www/train-000.tar && echo fetched >> {home}/times"
    for _ in range(2):
        piped = opened(home, captions(words, train=command))
    for other, length in ((over_http, 10), (piped, 5)):
        assert len(other) == length
        for i in range(length):
            assert other.samples.read(i)[1] == there.samples.read(i)[1]
    assert (home / "times").read_text().count("fetched") == 1


@pytest.mark.parametrize("source", ["pipe:false", "pipe:echo no tar", "missing-{0..1}.tar", "missing-*.tar"])
def test_shards_that_cannot_be_had_are_one_sentence(home: Path, words: Path, source: str) -> None:
    with pytest.raises(DataError, match=r"cannot be fetched|not a tar file|cannot be opened|no shard matches"):
        opened(home, captions(words, train=source))


def test_a_shard_that_changed_is_indexed_again(home: Path, words: Path) -> None:
    samples = [{"jpg": jpeg(i), "txt": b"red circle"} for i in range(3)]
    path = write_shard(home / "a.tar", samples)
    assert len(opened(home, captions(words, train=str(path)))) == 3
    write_shard(path, samples[:2])
    assert len(opened(home, captions(words, train=str(path)))) == 2


def test_the_order_is_the_platforms_and_resuming_is_seeking(home: Path, words: Path) -> None:
    two_shards(home)
    augmented = {"name": "image_train", "image_size": 16, "color_jitter": 0.4}
    vis = {"train": augmented, "eval": {"name": "image_eval", "image_size": 16}}
    dataset = opened(home, captions(words, train=str(home / "train-*.tar"), vis_processor=vis))

    def batches(start: int, size: int, workers: int = 0) -> list[torch.Tensor]:
        steps = training_steps(
            dataset, BatchPlan(size, size, 1, 1), seed=3, start=start, dp_rank=0, num_workers=workers
        )
        return [image for _ in range(12 // size) for image in next(steps)[0].data["pixel_values"]]

    whole = batches(0, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], batches(4, 4), strict=False))
    assert all(torch.equal(a, b) for a, b in zip(whole, batches(0, 3, workers=2), strict=True))
    assert len({image.sum().item() for image in whole}) == 12, "an image seen again looks another way"


# ---- images


def test_evaluation_transforms_are_timms_for_the_encoder() -> None:
    from timm.data import create_transform

    cls = registry.get("processor", "image_eval")
    ours = cls(cls.Options(encoder="eva_giant_patch14_224"))
    image = Image.open(io.BytesIO(jpeg(0, (60, 90))))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP, as EVA-g
    theirs = create_transform(
        (3, 224, 224), is_training=False, mean=mean, std=std, crop_pct=1.0, crop_mode="squash", interpolation="bicubic"
    )
    made = ours(image, np.random.default_rng(0))
    assert made.shape == (3, 224, 224)
    assert np.array_equal(made, theirs(image).numpy())


def test_training_transforms_draw_from_the_samples_generator_alone() -> None:
    cls = registry.get("processor", "image_train")
    ours = cls(cls.Options(image_size=16, color_jitter=0.4))
    image = Image.open(io.BytesIO(jpeg(0)))
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    made = [ours(image, np.random.default_rng(seed)) for seed in (1, 2, 1)]
    assert np.array_equal(made[0], made[2])
    assert not np.array_equal(made[0], made[1])
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- text


def test_chats_are_tokenised_as_the_template_says_and_the_assistant_is_learned(words: Path) -> None:
    from transformers import AutoTokenizer

    encoder = ConversationEncoder(load_tokenizer(words), 3, "chat")
    turns = [("user", "what colour is it"), ("assistant", "red"), ("user", "where"), ("assistant", "top left")]
    tokens = encoder.encode([Message(role, text) for role, text in turns])  # type: ignore[arg-type]
    theirs = AutoTokenizer.from_pretrained(words)
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokens.ids == expected
    learned = [theirs.decode([i]) for i, learn in zip(tokens.ids, tokens.is_target, strict=True) if learn]
    assert learned == ["red", "<|im_end|>", "top", "left", "<|im_end|>"]
    asked = encoder.encode([Message("user", "<image>where")], answering=True).ids
    assert asked.count(IMAGE_ID) == 3
    text = theirs.apply_chat_template([messages[2]], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert [i for i in asked if i != IMAGE_ID] == text


def test_special_tokens_in_what_users_write_are_text(words: Path) -> None:
    encoder = ConversationEncoder(load_tokenizer(words), 1, "chat")
    tokens = encoder.encode([Message("user", "red <|im_end|> <|im_start|> assistant blue")])
    assert tokens.ids.count(encoder.end_id) == 1


def test_captions_follow_their_images_without_a_template(home: Path, words: Path) -> None:
    two_shards(home)
    dataset = opened(home, captions(words, train=str(home / "train-*.tar")))
    sample = get(dataset, 0)
    tokenizer = load_tokenizer(words)
    assert sample["input_ids"].tolist() == [IMAGE_ID] * 4 + tokenizer.encode("red circle")
    assert sample["labels"].tolist() == [IGNORE_INDEX] * 3 + [*tokenizer.encode("red circle"), tokenizer.end_id]


# ---- samples that cannot be used


def broken(home: Path) -> str:
    image = jpeg(0)
    good = [{"jpg": jpeg(i), "txt": b"red circle"} for i in range(6)]
    bad = [
        {"jpg": image[: len(image) // 2], "txt": b"red"},  # truncated
        {"jpg": b"no image", "txt": b"red"},
        {"txt": b"red"},
        {"jpg": image, "json": b"{"},
        {"jpg": image},
        {"jpg": image, "txt": b" "},
    ]
    return str(write_shard(home / "train.tar", [*good[:3], *bad, *good[3:]]))


def test_bad_samples_are_skipped_counted_and_replaced_by_the_next_good_one(home: Path, words: Path) -> None:
    dataset = opened(home, captions(words, train=broken(home), max_skipped=0.5))
    assert len(dataset) == 12
    for index in range(3, 9):
        assert np.array_equal(get(dataset, index)["pixel_values"], get(dataset, 9)["pixel_values"])
    parts = ["not a readable image"] * 2 + ["no image", "text cannot be read", "one .txt or one of each", "no caption"]
    for index, part in enumerate(parts, 3):
        assert part in dataset.skipped[index]


def test_more_bad_samples_than_allowed_end_the_training(home: Path, words: Path) -> None:
    dataset = opened(home, captions(words, train=broken(home), max_skipped=0.3))
    with pytest.raises(DataError, match=r"4 of 12 samples cannot be used, .* more than max_skipped=0\.3"):
        get(dataset, 3)  # whose place the next good one would take


def test_a_wrong_folder_ends_a_large_training_at_once(home: Path, words: Path) -> None:
    project = instructions(home, words, [LLAVA[0]] * 5000, images=str(home / "none"), max_skipped=0.01)
    with pytest.raises(DataError, match=r"^datasets\.\w+: the image folder .*none does not exist$"):
        opened(home, project)
    (home / "none").mkdir()
    dataset = opened(home, project)
    with pytest.raises(DataError, match=r"11 of 1000 samples cannot be used, .* the last one: .*0\.png cannot be read"):
        get(dataset, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_loading_process_is_its_sentence_alone(home: Path, words: Path, workers: int) -> None:
    dataset = opened(home, captions(words, train=broken(home), max_skipped=0.0))
    steps = training_steps(dataset, BatchPlan(12, 12, 1, 1), seed=3, start=0, dp_rank=0, num_workers=workers)
    with pytest.raises(DataError, match=r"^datasets.images, train split: 1 of 12 samples cannot be used") as raised:
        next(steps)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(("policy", "length"), [("skip", 10), ("truncate", 12), ("error", None)])
def test_samples_that_are_too_long(home: Path, words: Path, policy: str, length: int | None) -> None:
    samples = [{"jpg": jpeg(i), "txt": b"red circle " * (20 if i == 1 else 3)} for i in range(3)]
    path = write_shard(home / "a.tar", samples)
    dataset = opened(home, captions(words, train=str(path), too_long=policy, max_length=12, max_skipped=0.5))
    if length is None:
        with pytest.raises(DataError, match="44 tokens, and max_length is 12"):
            get(dataset, 1)
    else:
        assert len(get(dataset, 1)["input_ids"]) == length
        assert list(dataset.skipped) == ([1] if policy == "skip" else [])


# ---- instructions and mixtures


LLAVA = [
    {"id": "a", "image": "0.png", "conversations": [
        {"from": "human", "value": "<image>\nwhat colour is it"}, {"from": "gpt", "value": "red"},
        {"from": "human", "value": "where"}, {"from": "gpt", "value": "left"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "how many"}, {"from": "gpt", "value": "two"}]},
    {"id": "c", "image": ["0.png", "1.png"], "conversations": [
        {"from": "human", "value": "<image><image> what"}, {"from": "gpt", "value": "blue"}]},
]  # fmt: skip
LAYOUTS: dict[str, Any] = {
    "llava": LLAVA,
    "minigpt4": {"annotations": [{"image_id": "0", "caption": "red circle"}, {"image_id": "1", "caption": "blue"}]},
    "minigpt4qwen": [
        {"image": "0.png", "instruction": "<Img><ImageHere></Img> what", "output": "red"},
        {"image": "1.png", "instruction": ["what", "where"], "output": ["blue", "left"]},
    ],
}


def instructions(home: Path, words: Path, content: Any, **more: Any) -> dict[str, Any]:
    for i in range(2):
        picture(home / "images" / f"{i}.png", i)
        picture(home / "images" / f"{i}.jpg", i)
    (home / "notes.json").write_text(json.dumps(content))
    places = {"annotations": str(home / "notes.json"), "images": str(home / "images")}
    return {"name": "instructions", "tokenizer": str(words), "max_skipped": 0.5, **places, **more}


def said(dataset: Any, sample: dict[str, np.ndarray]) -> str:
    """What of a sample is learned."""
    vocabulary = dataset.encoder.tokenizer.backend
    return " ".join(vocabulary.id_to_token(int(i)) for i in sample["labels"] if i != IGNORE_INDEX)


def test_llavas_layout_with_several_turns_and_several_images_and_none(home: Path, words: Path) -> None:
    dataset = opened(home, instructions(home, words, LLAVA))
    samples = [get(dataset, i) for i in range(3)]
    assert [said(dataset, s) for s in samples] == [
        "red <|im_end|> left <|im_end|>",
        "two <|im_end|>",
        "blue <|im_end|>",
    ]
    assert [len(s.get("pixel_values", ())) for s in samples] == [1, 0, 2]
    assert [(s["input_ids"] == IMAGE_ID).sum() for s in samples] == [4, 0, 8]
    batch = dataset.collate(samples)
    assert batch["pixel_values"].shape == (3, 3, 16, 16)


def test_the_layouts_of_minigpt4(home: Path, words: Path) -> None:
    caption = {"train": {"name": "captions"}, "eval": {"name": "captions"}}
    dataset = opened(home, instructions(home, words, LAYOUTS["minigpt4"], text_processor=caption))
    assert said(dataset, get(dataset, 0)) == "red circle <|im_end|>"
    dataset = opened(home, instructions(home, words, LAYOUTS["minigpt4qwen"]))
    assert [said(dataset, get(dataset, i)) for i in range(2)] == ["red <|im_end|>", "blue <|im_end|> left <|im_end|>"]
    assert (get(dataset, 1)["input_ids"] == IMAGE_ID).sum() == 4


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([{"from": "human", "value": "<image>"}], "no assistant turn"),
        ([{"from": "human", "value": "<image><image>"}, {"from": "gpt", "value": "a"}], "2 <image> placeholders"),
        ([{"from": "nobody", "value": "x"}], "a turn has the role 'nobody'"),
        ([], "no conversations"),
    ],
)
def test_conversations_that_teach_nothing(home: Path, words: Path, turns: Any, reason: str) -> None:
    content = [{"image": "0.png", "conversations": turns}, LLAVA[0]]
    dataset = opened(home, instructions(home, words, content, max_dropped=0.5))
    assert said(dataset, get(dataset, 0)).startswith("red")
    assert reason in "".join([dataset.notice, *dataset.skipped.values()])


def test_a_missing_image_is_skipped_and_counted(home: Path, words: Path) -> None:
    dataset = opened(home, instructions(home, words, [LLAVA[0] | {"image": "9.png"}, LLAVA[0]]))
    assert said(dataset, get(dataset, 0)).startswith("red")
    assert "9.png cannot be read" in dataset.skipped[0]


@pytest.mark.parametrize("content", [{"a": 1}, [3], [{"image": "a"}]])
def test_other_layouts_are_refused(home: Path, words: Path, content: Any) -> None:
    with pytest.raises(DataError, match=r"notes\.json"):
        opened(home, instructions(home, words, content))


def test_mixtures_have_their_shares(home: Path, words: Path) -> None:
    two_shards(home)
    common = {
        "image_tokens": 4,
        "vis_processor": {"train": EVAL, "eval": EVAL},
    }
    shards = captions(words, train=str(home / "train-*.tar")) | common
    notes = instructions(home, words, LLAVA) | common
    parts = [{"dataset": shards, "ratio": 3.0}, {"dataset": notes, "ratio": 1.0}]
    write_project(home / "mixed.yaml", {})
    import yaml

    document = yaml.safe_load((home / "mixed.yaml").read_text())
    document["datasets"] = {"mixed": {"name": "mixture", "parts": parts}}
    (home / "mixed.yaml").write_text(yaml.safe_dump(document))
    config = load_config(home / "mixed.yaml")
    prepare_data(config)
    dataset = open_split(config, "train")
    assert len(dataset) == 14
    kinds = Counter(said(dataset.parts[0], get(dataset, i)) == "red circle <|im_end|>" for i in range(14))
    assert kinds == {True: 10, False: 4}
    batch = dataset.collate([get(dataset, i) for i in (0, 10, 11, 12)])
    assert batch["pixel_values"].shape[0] == 4
    with pytest.raises(ConfigError, match="give a ratio to all parts or to none"):
        load_config(home / "mixed.yaml", options({"datasets.mixed.parts": [parts[0], {"dataset": notes}]}))


# ---- the task that proves sight


def test_splits_of_shapes_hold_out_what_they_say() -> None:
    scenes = module_of("shapes", "synthetic_scenes")
    rng = np.random.default_rng(0)
    least = {"train": 1, "test": 2, "novel": 2}
    drawn = {split: [scenes.draw_scene(split, rng, n, 4) for _ in range(300)] for split, n in least.items()}

    def pairs(scene: Any) -> set[frozenset[Any]]:
        kinds = [(t.colour, t.shape) for t in scene]
        return {frozenset((a, b)) for i, a in enumerate(kinds) for b in kinds[:i]}

    for scene in drawn["train"]:
        assert not pairs(scene) & scenes.HELD_PAIRS
        assert frozenset(t.cell for t in scene) not in scenes.HELD_LAYOUTS
    for scene in drawn["test"]:
        assert pairs(scene) & scenes.HELD_PAIRS
        assert frozenset(t.cell for t in scene) in scenes.HELD_LAYOUTS
    for split, scene in ((s, scene) for s in drawn for scene in drawn[s]):
        assert any((t.colour, t.shape) in scenes.NOVEL for t in scene) == (split == "novel")


def test_a_curriculum_begins_with_single_things_and_keeps_its_order(home: Path) -> None:
    dataset = opened(home, shapes(home, images=100, curriculum=True))
    counts = [dataset.read(i)[1]["caption"].count(",") + 1 for i in range(100)]
    assert [set(counts[a:b]) for a, b in ((0, 7), (7, 14), (14, 21))] == [{1}, {1, 2}, {2, 3}]
    assert set(counts[21:]) == {2, 3, 4}
    plan = BatchPlan(2, 2, 1, 1)
    steps = training_steps(dataset, plan, seed=0, start=98, dp_rank=0)
    taken = [next(steps)[0].data["input_ids"] for _ in range(2)]  # samples 98 and 99, then the first two again
    for (a, b), batch in zip(((98, 99), (0, 1)), taken, strict=True):
        wanted = dataset.collate([get(dataset, a), get(dataset, b)])["input_ids"]
        assert torch.equal(torch.as_tensor(batch), torch.as_tensor(wanted))


def test_the_split_of_novel_combinations_is_asked_for_as_test(home: Path) -> None:
    novel = {f"{colour} {shape}" for colour, shape in module_of("shapes", "synthetic_scenes").NOVEL}
    for asked in (False, True):
        dataset = opened(home, shapes(home), *options({"datasets.images.novel": asked}), split="test")
        named = [" ".join(thing.split()[:2]) for i in range(8) for thing in dataset.read(i)[1]["caption"].split(" , ")]
        assert bool(novel & set(named)) == asked


def test_answers_of_shapes_are_balanced_and_true(home: Path) -> None:
    dataset = opened(home, shapes(home, images=1, held_out=400), split="test")
    given: dict[str, Counter[str]] = {}
    for i in range(400):
        for example in dataset.examples(i):
            given.setdefault(example.kind, Counter())[example.answer] += 1
    for kind, answers in (("count", 3), ("colour", 6), ("shape", 4), ("above", 2), ("left", 2)):
        counts = given[kind]
        assert len(counts) == answers
        # Four standard errors of a share among so many questions, of which those of one picture are not independent.
        allowed = 4 * (2 / answers / counts.total()) ** 0.5
        assert all(abs(n / counts.total() - 1 / answers) < max(allowed, 0.09) for n in counts.values()), (kind, counts)


def test_pictures_of_shapes_show_what_is_said_of_them(home: Path) -> None:
    dataset = opened(home, shapes(home, images=1, held_out=30), split="test")
    scenes = module_of("shapes", "synthetic_scenes")
    for index in range(30):
        images, annotation = dataset.read(index)
        pixels = np.asarray(images[0]).astype(int)
        for thing in annotation["caption"].split(" , "):
            colour, _, row, column = thing.split()
            y, x = scenes.ROWS.index(row) * 16 + 8, scenes.COLUMNS.index(column) * 16 + 8
            around = pixels[y - 2 : y + 3, x - 2 : x + 3].reshape(-1, 3)
            nearest = {
                min(scenes.COLOURS, key=lambda c, p=p: ((np.array(scenes.COLOURS[c]) - p) ** 2).sum()) for p in around
            }
            assert colour in nearest, (index, thing)


def test_the_same_shapes_are_made_again_and_others_refused(home: Path) -> None:
    one = opened(home, shapes(home))
    other = opened(home, shapes(home / "again"))
    assert all(one.samples.read(i) == other.samples.read(i) for i in range(40))
    with pytest.raises(DataError, match="was made with images=40, but images is now 41: choose a different folder"):
        opened(home, shapes(home, images=41))


def test_images_of_a_sample_are_in_the_order_of_their_numbers() -> None:
    number = module_of("image_text")._number
    names = ["jpg", "0.jpg", "2.jpg", "10.jpg", "page_2.png", "page_10.png"]
    assert sorted(reversed(names), key=number) == names
