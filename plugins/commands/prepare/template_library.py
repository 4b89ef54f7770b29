"""Chat templates in configs/chat_templates that mark the assistant's text.

The first line of each template lists the tokens that a tokenizer needs for it.
"""

from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from crosstrain import DataError, check_source
from crosstrain.data.tokenizer import TextTokenizer, cached_folder, load_cached
from crosstrain.utils import paths
from crosstrain.utils.errors import os_errors_as
from crosstrain.utils.files import read_regular

_MAX_BYTES = 1 << 27  # maximum size of a file


@cache
def template_library() -> dict[str, str]:
    """Return template name -> Jinja text."""
    files = sorted((paths.home() / "configs" / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def lacking(tokenizer: Tokenizer, template: str) -> list[str]:
    """Return the tokens of a library template that a tokenizer does not have."""
    first = template.partition("\n")[0].removeprefix("{#- tokens:").removesuffix("-#}")
    return [token for token in first.split() if tokenizer.token_to_id(token) is None]


@lru_cache(maxsize=8)
def load_with_template(spec: str, chat_template: str | None) -> tuple[TextTokenizer, Path]:
    """Load a tokenizer and return it with its `cached_folder`.

    chat_template: replaces the tokenizer's own: a name in configs/chat_templates, a Jinja text, or a Jinja file.
    """
    tokenizer, folder = load_cached(spec)
    if chat_template is None:
        return tokenizer, folder
    text, library = chat_template, template_library()
    if chat_template in library:
        text = library[chat_template]
        if missing := lacking(tokenizer.backend, text):
            raise DataError(f"chat_template: {chat_template} needs {', '.join(missing)}, which {spec} lacks")
    if "{" not in text:
        check_source(f"the chat template {text}")
        names = ", ".join(library)
        with os_errors_as(DataError, f"chat_template: {text} is neither Jinja, a file nor one of {names}"):
            text = read_regular(Path(text).expanduser(), _MAX_BYTES).decode("utf-8", "replace")
    tokenizer = replace(tokenizer, chat_template=text)
    return tokenizer, cached_folder(tokenizer, spec)
