"""What each rule keeps, changes and drops, and that a recipe's mistakes show before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.prepare.filter import Dropped, Filter, make_filters
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions

from crosstrain.config.registry import registry
from crosstrain.config.schema import Checker, OptionError
from crosstrain.utils.errors import ConfigError

PROSE = "The town was founded long ago by fishermen. Later came traders, and after them the railway and a school."
GERMAN = "Die Stadt wurde vor langer Zeit von Fischern gegründet. Später kamen Händler und die Eisenbahn."


def rule(name: str, **options: Any) -> Filter:
    return make_filters([{"name": name, **options}])[0][1]


def why(found: str | Dropped | None) -> str:
    assert isinstance(found, Dropped)
    return found.reason


def test_wrongly_decoded_text_is_repaired() -> None:
    repair = rule("unicode")
    assert repair.text("schÃ¶n &amp; ﬁne â€œquotedâ€\x9d") == "schön & fine “quoted”"
    assert repair.text(PROSE) == PROSE
    assert rule("unicode", straight_quotes=True).text("“a”") == '"a"'
    assert rule("unicode", normalization="NFKC").text("x²") == "x2"
    assert rule("unicode", normalization="none").text("e\u0301") == "e\u0301"


def test_other_languages_are_dropped() -> None:
    english = rule("language", keep=["en"])
    assert english.text(PROSE) == PROSE
    assert why(english.text(GERMAN)).startswith("de (")
    assert rule("language", keep=["en", "de"]).text(GERMAN) == GERMAN
    with pytest.raises(OptionError, match="unknown language 'english'; known: ace, af"):
        rule("language", keep=["english"])


def test_lengths_in_tokens_and_characters() -> None:
    usual = rule("document_length")
    assert [usual.tokens(n) is None for n in (127, 128, 10**9)] == [False, True, True]
    assert why(usual.tokens(3)) == "3 tokens"
    assert usual.text("") == ""
    both = rule("document_length", min_tokens=2, max_tokens=4, min_characters=2, max_characters=4)
    assert [both.tokens(n) is None for n in range(1, 6)] == [False, True, True, True, False]
    assert [isinstance(both.text("x" * n), str) for n in range(1, 6)] == [False, True, True, True, False]
    with pytest.raises(ConfigError, match="max_tokens: 1 is below min_tokens=128"):
        rule("document_length", max_tokens=1)


def test_repetition_is_dropped_and_says_of_what() -> None:
    usual = rule("repetition")
    assert usual.text(PROSE) == PROSE
    assert why(usual.text("buy now\n" * 5 + PROSE)).startswith("lines 0.")
    assert why(rule("repetition", lines=1.0).text("again and\n\n" * 3 + PROSE)).startswith("paragraphs 0.5")
    assert why(usual.text(" ".join(f"the same {i}" for i in range(40)))).startswith("phrase_2")
    loose = rule(
        "repetition", lines=1.0, paragraphs=1.0, characters_in_lines=1.0, phrase_2=1.0, phrase_3=1.0, phrase_4=1.0
    )
    assert loose.text("a b\n" * 50) == "a b\n" * 50


def test_signs_are_dropped_and_say_of_what() -> None:
    usual = rule("symbols")
    assert usual.text(PROSE) == PROSE
    assert why(usual.text("12 34 == 56 | 78 | x")).startswith("words 0.")
    assert why(usual.text(" ".join(["tag #one"] * 5))).startswith("hashes 0.5")
    assert why(usual.text("and so on... and on… " * 3)).startswith("ellipses")
    assert why(usual.text("\n".join(["- a point of many words"] * 20))).startswith("bullets 1.0")
    cut = "\n".join([f"{PROSE} {i} read more..." for i in range(3)] + [PROSE])
    assert why(usual.text(cut)).startswith("cut_lines 0.75")


def test_what_is_no_rule_is_refused_by_name(tmp_path: Path) -> None:
    checker = Checker(lambda key: f"recipe.yaml: {'.'.join(key)}")

    def options(clean: list[Any]) -> PrepareOptions:
        return checker.dataclass(PrepareOptions, {"input": "stdlib", "tokenizer": "x", "clean": clean}, ())

    with pytest.raises(ConfigError, match=r"clean\.0\.name.*no processor called 'langauge'; did you mean language"):
        options(["langauge"])
    with pytest.raises(ConfigError, match=r"clean\.1\.kep: unknown key; did you mean clean\.1\.keep"):
        options(["unicode", {"name": "language", "kep": ["en"]}])
    registry.register_processor("upside_down")(object)
    with pytest.raises(ConfigError, match="the processor upside_down is not a filter for documents"):
        make_filters([{"name": "upside_down"}])
