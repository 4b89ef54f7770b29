"""Whether it sees: questions whose answers are known, and those that somebody types."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import ENVIRONMENT, ROOT, Run
from crosstrain import assembly
from crosstrain.answering import Answer, answer_questions, contact_sheet, score
from crosstrain.commands.answers import Conversing
from crosstrain.commands.saved import saved_config
from crosstrain.config import load_config
from crosstrain.data.conversations import IMAGE_ID
from crosstrain.data.dataset import Example
from crosstrain.errors import ConfigError, UserError
from crosstrain.generation import Sampling, generate
from ranks import train
from sight import OPEN, build, options, picture, write_project
from test_image_text import module_of


def write_colours(folder: Path) -> dict[str, Any]:
    """Pictures of one thing, and the question what colour it has; the dataset's options."""
    scenes = module_of("shapes", "shape_scenes")
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
        "name": "image_text", "train": str(folder / "train.tar"), "test": str(folder / "test.tar"),
        "tokenizer": str(folder / "tokenizer"), "vis_processor": {"train": seen, "eval": seen},
        "text_processor": {"train": {"name": "vqa"}, "eval": {"name": "vqa"}}, "cache": str(folder / "cache"),
    }  # fmt: skip


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
    assembly.prepare_data(load_config(project))
    return project, train(project, "out", *SEES)


def answers_of(project: Path, run: Run) -> list[Answer]:
    from transformers import AutoTokenizer

    runner = build(project, *SEES, checkpoint=run.checkpoint(160))
    dataset = assembly.open_split(load_config(project, SEES), "test")
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint(160))
    return answer_questions(runner, tokenizer, tokenizer.eos_token_id, dataset, None, 4, batch=25)


def test_it_sees_and_is_lost_without_the_image(trained: tuple[Path, Run]) -> None:
    answers = answers_of(*trained)
    assert len(answers) == 60
    scores = score(answers)["colour"]
    assert scores["right"] > 0.6
    assert scores["right_blind"] < 0.3  # always the same answer, which one in six has
    document = answers[0].document()
    assert document["truth"] == "red"
    assert document["right"] == (document["answer"] == "red")


def test_asking_one_at_a_time_gives_what_batches_give(trained: tuple[Path, Run]) -> None:
    from transformers import AutoTokenizer

    project, run = trained
    runner = build(project, *SEES, checkpoint=run.checkpoint(160))
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint(160))
    talk = Conversing.about([], load_config(project, SEES), run.checkpoint(160))
    dataset = assembly.open_split(load_config(project, SEES), "test")
    end = talk.questioner.end_id
    for index, answer in enumerate(answers_of(project, run)[:6]):
        talk.images, talk.waiting, talk.history = dataset.read(index)[0], 1, []
        prompt = talk.ask("what colour is it")
        (text,) = generate(runner, tokenizer, prompt, Sampling(max_new_tokens=4, temperature=0), end=end)
        assert text.strip() == answer.text


def test_a_conversation_about_images_goes_on(trained: tuple[Path, Run], tmp_path: Path) -> None:
    project, run = trained
    files = [str(picture(tmp_path / f"{i}.png", i)) for i in range(2)]
    talk = Conversing.about(files[:1], load_config(project, SEES), run.checkpoint(160))
    first = talk.ask("what colour is it")
    assert (first["input_ids"] == IMAGE_ID).sum() == 4
    talk.remember("what colour is it", "red")
    assert talk.command(f"image {files[1]}")
    second = talk.ask("and this")
    assert (second["input_ids"] == IMAGE_ID).sum() == 8
    assert second["pixel_values"].shape[0] == 2
    assert second["input_ids"][: len(first["input_ids"])].tolist() == first["input_ids"].tolist()
    assert talk.command("new")
    assert (talk.ask("and these")["input_ids"] == IMAGE_ID).sum() == 8
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
    assert "forgets what was said" in said(*short, "--interactive", typed="what colour is it\nwhere\nstop\n")
    out = said("--answers", "--sheet", "sheet.png", "--output", "out.json", "--max-new-tokens", "3")
    assert "colour" in out
    results = json.loads((tmp_path / "out.json").read_text())["answers"]["test"]
    assert len(results["predictions"]) == 60
    assert Image.open(tmp_path / "sheet.png").size[0] == 6 * 152


def test_long_answers_are_judged_as_captions() -> None:
    def answer(said: str, truth: str) -> Answer:
        return Answer(Example({}, "describe", truth, "caption"), said, "")

    truths = ["red circle top left and blue square", "green cross in the very middle", "two white things at the top"]
    good = score([answer(t, t) for t in truths])["caption"]
    bad = score([answer(truths[i - 1], t) for i, t in enumerate(truths)])["caption"]
    assert good["right"] == 1.0
    assert good["bleu4"] == pytest.approx(1.0)
    assert good["cider"] > 9
    assert bad["right"] == 0
    assert bad["cider"] < 1


def test_a_sheet_shows_pictures_with_answers(tmp_path: Path) -> None:
    image = Image.new("RGB", (10, 10), "red")
    shown = [Answer(Example({}, f"<image>question {i}", "yes", "x", image), "no", "") for i in range(7)]
    contact_sheet(shown, tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.size == (6 * 152, 2 * 190)
    assert sheet.getpixel((60, 60)) == (255, 0, 0)


def test_a_checkpoint_cannot_make_evaluation_run_a_command(trained: tuple[Path, Run], tmp_path: Path) -> None:
    _, run = trained
    state = json.loads((run.checkpoint(160) / "state.json").read_text())
    state["config"]["datasets"]["images"]["test"] = "pipe:touch harm; cat x.tar"
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"its data come from a command \(pipe:\.\.\.\), which is not run"):
        saved_config(tmp_path, [])
