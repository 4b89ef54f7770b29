"""Image-text models of transformers: losses, gradients, packing and decoding are those of the library's own code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from crosstrain_plugins.builtin.datasets.vision.processor_encoder import ProcessorEncoder, joined
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from conftest import ROOT
from crosstrain import IGNORE_INDEX, Message, Sample, SampleError, registry
from crosstrain.inference.decoder import DecodeState
from crosstrain.modeling.meta_init import parameters_on_meta
from fixtures_image_text import FAMILIES, write_family
from fixtures_ranks import mostly_slow

QUESTIONS = ["<image>what colour is the circle?", "red? ", "<image> and <image>blue <image><image>", "green, or not?"]
SIZES = [(28, 40), (56, 28), (20, 20), (44, 30), (28, 28)]


class Family:
    """A tiny model of a family, with random weights, and samples with one, no and four images."""

    def __init__(self, family: str, folder: Path) -> None:
        self.name, self.folder = family, folder
        config = write_family(family, folder)
        kind = registry.get("model", "image_text")
        self.model = kind(kind.Options(config=config, make_vocab_size_divisible_by=1, router_loss="none"))
        torch.manual_seed(0)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        self.bare = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa")
        self.bare.load_state_dict(self.model.lm.state_dict())
        self.encoder, rng = ProcessorEncoder(str(folder), None, "chat"), np.random.default_rng(0)
        images = iter(Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES)
        self.conversations = [
            [Message("user", question), Message("assistant", "red green" * (number + 1))]
            for number, question in enumerate(QUESTIONS)
        ]
        self.images = [[next(images) for _ in range(question.count("<image>"))] for question in QUESTIONS]

    def samples(self) -> list[Sample]:
        made = []
        for conversation, images in zip(self.conversations, self.images, strict=True):
            made.append(self.encoder.sample([conversation], self.encoder.process(images)))
        return made

    def bare_inputs(self, number: int) -> tuple[dict[str, Any], torch.Tensor]:
        """What the library's processor makes of a conversation, and the targets: the answer and what ends its turn."""
        processor = AutoProcessor.from_pretrained(self.folder)
        turns = []
        for message in self.conversations[number]:
            first, *rest = message.text.split("<image>")
            parts = [{"type": "text", "text": first}] if first else []
            for text in rest:
                parts += [{"type": "image"}] + ([{"type": "text", "text": text}] if text else [])
            turns.append({"role": message.role, "content": parts})
        whole = processor.apply_chat_template(turns)
        asked = processor.apply_chat_template(turns[:1], add_generation_prompt=True)
        assert whole.startswith(asked)
        images = [self.images[number]] if self.images[number] else None
        if self.name == "paligemma":  # its processor adds the start of a text itself, and needs an image
            answer = whole[len(asked) :].removesuffix("</s>")
            if images is None:
                ids = processor.tokenizer(asked, add_special_tokens=False)["input_ids"]
                ids += processor.tokenizer(answer + "</s>", add_special_tokens=False)["input_ids"]
                given = {"input_ids": torch.tensor([ids])}
            else:
                prompt = asked.replace("<s>", "").removesuffix("\n")
                made = processor(text=[prompt], images=images, suffix=[answer], return_tensors="pt")
                given = dict(made)
                given.pop("labels")
            count = len(processor.tokenizer(answer + "</s>", add_special_tokens=False)["input_ids"])
            given["token_type_ids"] = torch.zeros_like(given["input_ids"])
            given["token_type_ids"][:, -count:] = 1
        else:
            given = dict(processor(text=[whole], images=images, return_tensors="pt", add_special_tokens=False))
            rest = whole[len(asked) :]
            count = len(processor.tokenizer(rest, add_special_tokens=False)["input_ids"])
            count -= rest.endswith("\n")  # after the end of the turn
            labels_end = given["input_ids"].shape[1] - rest.endswith("\n")
        given.pop("attention_mask", None)
        labels = torch.full_like(given["input_ids"], IGNORE_INDEX)
        end = given["input_ids"].shape[1] if self.name == "paligemma" else labels_end
        begin = end - count
        labels[:, begin:end] = given["input_ids"][:, begin:end]
        return given, labels

    def bare_loss(self, number: int) -> torch.Tensor:
        given, labels = self.bare_inputs(number)
        logits = self.bare.train()(**given, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )


@pytest.fixture(params=mostly_slow(FAMILIES, ["qwen2_5_vl", "gemma3", "smolvlm"]))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    return Family(request.param, tmp_path)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("lm."): p.grad for name, p in model.named_parameters()}
    return {name: torch.zeros(()) if grad is None else grad for name, grad in found.items()}


def assert_gradients(model: torch.nn.Module, bare: torch.nn.Module) -> None:
    """Up to the rounding of other sums: relative to the largest gradient of each tensor."""
    theirs = gradients(bare)
    most = max(float(grad.abs().max()) for grad in theirs.values())
    for name, grad in gradients(model).items():
        difference = float((grad - theirs[name]).abs().max())
        assert difference <= 2e-6 * max(float(theirs[name].abs().max()), 1e-2 * most), name


def assert_computed_as_by_the_library(family: Family, batch: dict[str, torch.Tensor]) -> None:
    """The loss and gradients of a batch of all samples are those of transformers, conversation by conversation."""
    loss = family.model.train()(**batch)
    loss.backward()
    theirs = sum(family.bare_loss(number) for number in range(len(QUESTIONS)))
    theirs.backward()  # type: ignore[union-attr]
    assert loss.item() == pytest.approx(float(theirs), rel=1e-6)
    assert_gradients(family.model, family.bare)


def test_losses_and_gradients_are_those_of_the_library(family: Family) -> None:
    assert_computed_as_by_the_library(family, family.encoder.collate(family.samples()))


def test_packed_rows_are_separate_samples(family: Family) -> None:
    packed = family.encoder.collate([joined(family.samples())])
    assert len(packed["input_ids"]) == 1
    assert_computed_as_by_the_library(family, packed)


def test_a_batch_of_text_trains_the_vision_model_with_zeros(family: Family) -> None:
    """Ranks exchange the gradients of all parameters, so a rank without images needs them too."""
    texts = [sample for sample in family.samples() if not any("pixel" in key for key in sample)]
    batch = family.encoder.collate(texts)
    loss = family.model.train()(**batch)
    loss.backward()
    theirs = family.bare_loss(1) + family.bare_loss(3)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    for name, parameter in family.model.named_parameters():
        if "vision" in name or "visual" in name:
            assert parameter.grad is None or not parameter.grad.any(), name


WITH_VIDEO = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava_onevision", "internvl"]


@pytest.mark.parametrize("name", mostly_slow(WITH_VIDEO, ["qwen3_vl"]))
def test_videos_are_computed_as_by_the_library(name: str, tmp_path: Path) -> None:
    """Two videos, and text between them; also in a packed row after another sample."""
    family = Family(name, tmp_path)
    rng = np.random.default_rng(1)
    frames = [rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8) for _ in range(2)]
    videos = [[Image.fromarray(frame) for frame in video] for video in frames]
    conversation = [Message("user", "<video> then <video>what colour?"), Message("assistant", "red green")]
    ours = family.encoder.sample([conversation], family.encoder.process(videos))
    processor = AutoProcessor.from_pretrained(tmp_path)
    parts = [{"type": "video"}, {"type": "text", "text": " then "}, {"type": "video"}]
    turns = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "what colour?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "red green"}]},
    ]
    metadata = [VideoMetadata(4, fps=2.0, frames_indices=[0, 1, 2, 3]) for _ in videos]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False, chat_template=processor.chat_template)
    given = processor(
        text=[text], videos=frames, video_metadata=metadata, do_sample_frames=False, return_tensors="pt",
        add_special_tokens=False,
    )  # fmt: skip
    given.pop("attention_mask")
    ids = given["input_ids"]
    np.testing.assert_array_equal(ours["input_ids"], ids[0, : len(ours["input_ids"])].numpy())
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[0, 1 : len(ours["labels"]) + 1] = torch.from_numpy(ours["labels"])
    logits = family.bare.train()(**given, use_cache=False).logits[:, :-1]
    theirs = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss = family.model.train()(**family.encoder.collate([ours]))
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    packed = family.model(**family.encoder.collate([joined([family.samples()[1], ours])]))
    assert packed.item() == pytest.approx(theirs.item() + family.bare_loss(1).item(), rel=1e-6)


def test_prompts_of_a_batch_are_decoded_as_single_ones(family: Family) -> None:
    """Padding on the left, other images beside, and positions that depend on the sizes of images."""
    runner: Any = SimpleNamespace(model=family.model, evaluate=lambda batch: family.model(**batch))
    conversations = [conversation[:1] for conversation in family.conversations]
    if family.name == "paligemma":  # its padding would be a part of the prompt, whose tokens see each other
        conversations = conversations[:1]
    prompts = [
        family.encoder.prompt(conversation, family.encoder.process(images))
        for conversation, images in zip(conversations, family.images, strict=False)
    ]
    tokens = torch.randint(100, 300, (len(prompts), 3), generator=torch.Generator().manual_seed(0))
    family.model.eval()
    with torch.no_grad():
        together, steps = DecodeState(runner, prompts), []
        for number in range(4):
            steps.append(together.logits())
            if number < 3:
                together.append(tokens[:, number])
        for row, prompt in enumerate(prompts):
            single = DecodeState(runner, [prompt])
            for number in range(4):
                logits = single.logits()[0]
                torch.testing.assert_close(steps[number][row], logits, rtol=0, atol=2e-5 * float(logits.abs().max()))
                if number < 3:
                    single.append(tokens[row : row + 1, number])


def test_special_tokens_in_a_text_are_refused(tmp_path: Path) -> None:
    """Both in training and in prompts: a user's text cannot end its turn or add an image."""
    write_family("qwen2_5_vl", tmp_path)
    encoder = ProcessorEncoder(str(tmp_path), None, "chat")
    for token in ("<|im_end|>", "<|image_pad|>"):
        conversation = [Message("user", f"a {token} b"), Message("assistant", "red")]
        with pytest.raises(SampleError, match="contains the special token"):
            encoder.sample([conversation], encoder.process([]))
        with pytest.raises(SampleError, match="contains the special token"):
            encoder.prompt(conversation[:1], encoder.process([]))


PUBLISHED = {"qwen2_5_vl_7b": 8.29, "qwen3_vl_30b_a3b": 31.07, "llava_onevision_7b": 8.03, "internvl3_8b": 7.94}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    kind = registry.get("model", "image_text")
    config = yaml.safe_load((ROOT / "configs" / "models" / "image_text" / f"{preset}.yaml").read_text())["config"]
    with parameters_on_meta():
        model = kind(kind.Options(config=config, make_vocab_size_divisible_by=1))
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx(PUBLISHED[preset], abs=0.006)
    assert len(model.structure.decoder_blocks()) == model.text_config.num_hidden_layers
