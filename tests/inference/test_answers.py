"""Whether it sees: questions whose answers are known, and those that somebody types."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE_ID
from crosstrain_plugins.builtin.evaluations.answers.scores import caption_scores, score
from crosstrain_plugins.builtin.evaluations.answers.vqa import (
    TILE,
    Answer,
    answer_questions,
    answer_sheet,
    answer_splits,
)
from crosstrain_plugins.builtin.evaluations.completions.talk import ChatSession
from PIL import Image

from conftest import ENVIRONMENT, ROOT, Run
from crosstrain.config.load import load_config
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.engine.build import build_model, make_runner
from crosstrain.inference.chat_form import ChatForm
from crosstrain.inference.encoding import open_tokenizer
from crosstrain.inference.generation import Sampling, generate
from crosstrain.inference.open_checkpoint import saved_config
from crosstrain.utils.errors import ConfigError, UserError
from crosstrain.utils.limited_process import LimitError
from fixtures_ranks import mostly_slow, run_ranks, train
from fixtures_shards import module_of
from fixtures_tampering import HARMFUL, never_ends
from fixtures_vision import OPEN, build, options, picture, write_project


def write_colours(folder: Path) -> dict[str, Any]:
    """Pictures of one thing, and the question what colour it has; the dataset's options."""
    scenes = module_of("shapes", "synthetic_scenes")
    module_of("shapes").write_tokenizer(folder)
    for split, count in (("train", 400), ("test", 60)):
        with tarfile.open(folder / f"{split}.tar", "w") as tar:
            for i in range(count):
                rng = np.random.default_rng([split == "test", i])
                colour = list(scenes.COLOURS)[i % 6]
                scene = [scenes.Thing(colour, scenes.SHAPES[rng.integers(4)], 4, True)]
                asked = {"questions": [{"kind": "colour", "question": "what colour is it", "answer": colour}]}
                for extension, data in (("jpg", scenes.render(scene, rng)), ("json", json.dumps(asked).encode())):
                    info = tarfile.TarInfo(f"{i:06d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    seen = {"name": "image_eval", "image_size": 48}
    return {
        "name": "image_text",
        "train": str(folder / "train.tar"),
        "test": str(folder / "test.tar"),
        "tokenizer": str(folder / "tokenizer"),
        "vis_processor": {"train": seen, "eval": seen},
        "text_processor": {"train": {"name": "vqa"}, "eval": {"name": "vqa"}},
        "cache": str(folder / "cache"),
    }


SEES = [
    *options(OPEN),
    "model.vision.image_size=48", "model.vision.encoder=vit_tiny_patch16_224", "model.vision.class_token=false",
    "model.qformer.dropout=0.0", "model.qformer.layer_norm_eps=1e-6", "model.qformer.cross_attention_frequency=1",
    "run.max_iters=160", "run.global_batch_size=24", "run.micro_batch_size=24", "run.warmup_steps=10",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("colours")
    project = write_project(folder / "project.yaml", write_colours(folder))
    prepare_data(load_config(project))
    return project, train(project, "out", *SEES)


def ask(project: str, checkpoint: str, *more: str, max_new_tokens: int = 4) -> tuple[list[Answer], int]:
    """The answers of the test split, on however many ranks this is run."""
    from transformers import AutoTokenizer

    config = load_config(project, [*SEES, *more])
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, Path(checkpoint), for_training=False)
    dataset = open_split(config, "test")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    found = answer_questions(runner, tokenizer, tokenizer.eos_token_id, dataset, None, max_new_tokens, batch=25)
    runner.close()
    return found


@pytest.fixture(scope="module")
def answers(trained: tuple[Path, Run]) -> list[Answer]:
    project, run = trained
    return ask(str(project), str(run.checkpoint(160)))[0]


@pytest.mark.slow
def test_it_sees_and_is_lost_without_the_image(answers: list[Answer]) -> None:
    assert len(answers) == 60
    scores = score(answers)["colour"]
    assert scores["right"] > 0.6
    assert scores["right_blind"] < 0.3  # always the same answer, which one in six has
    document = answers[0].document()
    assert document["truth"] == "red"
    assert document["right"] == (document["answer"] == "red")


@pytest.mark.slow
def test_asking_one_at_a_time_gives_what_batches_give(trained: tuple[Path, Run], answers: list[Answer]) -> None:
    from transformers import AutoTokenizer

    project, run = trained
    runner = build(project, *SEES, checkpoint=run.checkpoint(160))
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint(160))
    talk = ChatSession(ChatForm.of_training(load_config(project, SEES), run.checkpoint(160)), [])
    dataset = open_split(load_config(project, SEES), "test")
    (end,) = talk.form.ends
    for index, answer in enumerate(answers[:6]):
        talk.images, talk.waiting, talk.history = dataset.read(index)[0], 1, []
        prompt = talk.ask("what colour is it")
        (text,) = generate(runner, tokenizer, prompt, Sampling(max_new_tokens=4, temperature=0), ends=[end])
        assert text.strip() == answer.text


@pytest.mark.slow
def test_a_conversation_about_images_goes_on(trained: tuple[Path, Run], tmp_path: Path) -> None:
    project, run = trained
    files = [str(picture(tmp_path / f"{i}.png", i)) for i in range(2)]
    talk = ChatSession(ChatForm.of_training(load_config(project, SEES), run.checkpoint(160)), files[:1])
    first = talk.ask("what colour is it")
    assert (first["input_ids"] == IMAGE_ID).sum() == 4
    talk.remember("what colour is it", "red")
    assert talk.command(f"image {files[1]}")
    second = talk.ask("and this")
    assert (second["input_ids"] == IMAGE_ID).sum() == 8
    assert second["pixel_values"].shape[0] == 2
    assert second["input_ids"][: len(first["input_ids"])].tolist() == first["input_ids"].tolist()
    assert talk.command("new")
    assert (talk.ask("and these")["input_ids"] == IMAGE_ID).sum() == 0
    assert not talk.command("is it new")
    with pytest.raises(UserError, match="is not a readable image"):
        talk.command(f"image {project}")


@pytest.mark.slow
def test_the_program_answers_about_a_picture(trained: tuple[Path, Run], tmp_path: Path) -> None:
    _, run = trained
    image = picture(tmp_path / "photo.png", 0, (48, 48))
    command = [sys.executable, str(ROOT / "evaluate.py"), "--checkpoint", str(run.folder)]

    def said(*arguments: str, typed: str = "") -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=ENVIRONMENT, input=typed, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    short = ("--temperature", "0", "--max-new-tokens", "3", "--image", str(image))
    assert "what colour is it\n" in said(*short, "--generate", "what colour is it")
    chat = f"how many\nimage {image}\nwhat colour is it\nimage none.png\nwhere\nnew\nwhere\nstop\nhow many\n"
    out = said(*short[:4], "--interactive", "--output", "chat.json", typed=chat)  # which begins without an image
    assert "`image FILE` adds an image" in out
    assert "error: --image: none.png is not a readable image" in out
    spoken = json.loads((tmp_path / "chat.json").read_text())["completions"]
    assert [turn["prompt"] for turn in spoken] == ["how many", "what colour is it", "where", "where"]
    assert "`new` starts over" in said(*short, "--interactive", typed="what colour is it\nwhere\nstop\n")
    alone = subprocess.run([*command, "--image", str(image)], capture_output=True, text=True, env=ENVIRONMENT)
    assert alone.returncode == 1
    assert "--image: needs --generate or --interactive" in alone.stderr
    asking = ("--answers", "--max-new-tokens", "3", "--output")
    out = said(*asking, "out.json", "--sheet", "sheet.png")
    assert re.search(r"test \| colour +right 0\.\d+ \| without the image 0\.\d+ \(60 questions\)", out)
    results = json.loads((tmp_path / "out.json").read_text())["answers"]["test"]
    assert len(results["predictions"]) == 60
    assert results["scores"]["colour"]["right"] == sum(p["right"] for p in results["predictions"]) / 60
    said(*asking, "shared.json", "--nproc-per-node", "2")
    assert json.loads((tmp_path / "shared.json").read_text())["answers"]["test"] == results
    assert Image.open(tmp_path / "sheet.png").size == (6 * TILE[0], 8 * TILE[1])


@pytest.mark.parametrize("name", mostly_slow(["ddp@2", "ddp@3", "fsdp@2", "zero3@2", "megatron_tp2@2"], []))
def test_ranks_share_the_questions_and_find_the_same_answers(
    trained: tuple[Path, Run], answers: list[Answer], name: str
) -> None:
    project, run = trained
    runner, _, size = name.partition("@")
    for found, silent in run_ranks(int(size), ask, str(project), str(run.checkpoint(160)), f"run.runner={runner}"):
        assert found == answers, "of 60 samples in blocks of 32, some ranks have one block, and a third one none"
        assert silent == 0


def write_questions(folder: Path, words: Path) -> Path:
    """A project whose test split has images in its first block alone, and one sample that cannot be used."""
    picture(folder / "0.png", 0)
    seen = {"image": "0.png", "instruction": "what colour is it", "output": "red"}
    lost = seen | {"image": "1.png"}
    blind = {"instruction": "how many", "output": "two"}
    (folder / "notes.json").write_text(json.dumps([seen] * 31 + [lost] + [blind] * 8))
    dataset = {
        "name": "instructions", "annotations": str(folder / "notes.json"), "images": str(folder),
        "tokenizer": str(words), "split": [0, 0, 1], "max_skipped": 0.1,
        "vis_processor": {key: {"name": "image_eval", "image_size": 48} for key in ("train", "eval")},
    }  # fmt: skip
    return write_project(folder / "project.yaml", dataset)


@pytest.mark.parametrize("runner", mostly_slow(["ddp", "fsdp", "zero3"], []))
def test_a_rank_may_have_text_alone_to_ask(trained: tuple[Path, Run], tmp_path: Path, runner: str) -> None:
    project, run = trained
    other = write_questions(tmp_path, project.parent / "tokenizer")
    place = (str(other), str(run.checkpoint(160)))
    alone, silent = ask(*place)
    assert silent == 1
    assert [a.sample for a in alone] == [*range(31), *range(32, 40)]
    for shared, count in run_ranks(2, ask, *place, f"run.runner={runner}"):
        assert (shared, count) == (alone, 1)


@pytest.mark.slow
def test_questions_that_leave_no_room_are_refused(trained: tuple[Path, Run]) -> None:
    project, run = trained
    with pytest.raises(UserError, match=r"the model takes at most 256, so there is no room for 250 more; lower --max"):
        ask(str(project), str(run.checkpoint(160)), max_new_tokens=250)


@pytest.mark.slow
def test_questions_that_take_too_long_to_encode_end_with_a_sentence(
    trained: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, run = trained
    words = Path(shutil.copytree(project.parent / "tokenizer", tmp_path / "words"))
    never_ends(words)
    asked = [{"instruction": HARMFUL, "output": "two"}] * 4
    other = write_questions(tmp_path, words)
    (tmp_path / "notes.json").write_text(json.dumps(asked))
    model: Any = SimpleNamespace(
        config=load_config(other, SEES), runner=build(other, *SEES), tokenizer=open_tokenizer(run.checkpoint(160))
    )
    with pytest.raises(LimitError, match=r"the tokenizer took more than 10\.\d+ s of CPU time|retry-limit"):
        answer_splits(model, ["test"], {"max_samples": None, "max_new_tokens": 2, "sheet": None})


def answer(said: str, truth: str, kind: str = "caption", blind: str = "") -> Answer:
    return Answer(0, kind, "describe", truth, said, blind)


def test_long_answers_are_judged_as_captions() -> None:
    truths = ["red circle top left and blue square", "green cross in the very middle", "two white things at the top"]
    good = score([answer(t, t) for t in truths])["caption"]
    assert (good["right"], good["right_blind"]) == (1.0, 0.0)
    assert good["bleu4"] == pytest.approx(1.0)
    assert good["cider"] == pytest.approx(10.0)
    assert good["cider_blind"] == 0
    assert good["bleu4_blind"] < 1e-3
    assert "cider" not in score([answer("red", "red")])["caption"]


def test_cider_and_bleu_are_what_their_papers_say() -> None:
    # By hand. No word is in both true captions, so that all weigh the same; n-grams of the first that are right:
    # 3 of 4, 2 of 3, 1 of 2, 0 of 1; all of the second.
    found = caption_scores(["a b c x", "e f g h"], ["a b c d", "E  f g h"])
    assert found["cider"] == pytest.approx(((3 / 4 + 2 / 3 + 1 / 2 + 0) / 4 * 10 + 10) / 2)
    assert found["bleu4"] == pytest.approx((7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** 0.25, rel=1e-6)
    # CIDEr-D counts a repeated word once, of a vector four times as long: 1 * 1 / (4 * 2).
    assert caption_scores(["a a a a", "e f g h"], ["a b c d", "e f g h"])["cider"] == pytest.approx(
        (10 / 4 / 8 + 10) / 2
    )
    # BLEU's penalty for 7 words in place of 8.
    short = caption_scores(["a b c d", "e f g"], ["a b c d", "e f g h"])["bleu4"]
    assert short == pytest.approx(np.exp(1 - 8 / 7), rel=1e-6)


def test_a_sheet_shows_pictures_with_answers(tmp_path: Path) -> None:
    image = Image.new("RGB", (10, 10), "red")
    shown = [(answer("no", "yes \N{SNOWMAN} " * 40), image) for _ in range(7)]
    answer_sheet(shown, tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.size == (6 * TILE[0], 2 * TILE[1])
    assert sheet.getpixel((60, 60)) == (255, 0, 0)


@pytest.mark.slow
def test_a_checkpoint_cannot_make_evaluation_run_a_command(trained: tuple[Path, Run], tmp_path: Path) -> None:
    _, run = trained
    state = json.loads((run.checkpoint(160) / "state.json").read_text())
    state["config"]["datasets"]["images"]["test"] = "pipe:touch harm; cat x.tar"
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        ConfigError, match=r"its data comes from a command \(pipe:\.\.\.\), and commands .* are not run"
    ):
        saved_config(tmp_path, [])
