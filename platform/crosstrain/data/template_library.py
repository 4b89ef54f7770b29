"""Chat templates in configs/chat_templates that mark the assistant's text.

The first line of each template lists the tokens that a tokenizer needs for it.
"""

from functools import cache

from tokenizers import Tokenizer

from crosstrain.utils import paths


@cache
def template_library() -> dict[str, str]:
    """Return template name -> Jinja text."""
    files = sorted((paths.home() / "configs" / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def lacking(tokenizer: Tokenizer, template: str) -> list[str]:
    """Return the tokens of a library template that a tokenizer does not have."""
    first = template.partition("\n")[0].removeprefix("{#- tokens:").removesuffix("-#}")
    return [token for token in first.split() if tokenizer.token_to_id(token) is None]
