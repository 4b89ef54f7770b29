"""The processor converts annotations to conversations, and reports missing keys."""

from pathlib import Path

import numpy as np
import pytest

from crosstrain import IMAGE, Message, SampleError, TextProcessor, registry

HERE = Path(__file__).parent


def make() -> TextProcessor:
    registry.add_folder(HERE / "example.py")
    cls = registry.get("processor", "example")
    return cls(cls.Options())


def test_a_conversation() -> None:
    annotation, rng = {"question": "what is it", "answer": "a cat"}, np.random.default_rng(0)
    expected = [Message("user", f"{IMAGE}what is it"), Message("assistant", "a cat")]
    assert make()(annotation, 1, rng) == [expected]
    assert make().questions(annotation, 1) == [(expected[:1], "a cat", "question")]


def test_a_sample_that_cannot_be_used_is_named() -> None:
    with pytest.raises(SampleError, match="it has no question or no answer"):
        make()({"question": "what is it"}, 1, np.random.default_rng(0))
