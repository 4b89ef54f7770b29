"""Mistakes in a configuration: each gets one sentence with file, line, key and, if any, the nearest name."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.config.load import Config
from crosstrain.config.run_options import AmpOptions, RunOptions
from crosstrain.config.schema import Checker
from crosstrain.utils.errors import ConfigError, UserError
from fixtures_config import PROJECT, configured_home, edit, load, mistake, mistakes
from fixtures_plugins import write


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    yield from configured_home(monkeypatch, tmp_path)


# What is replaced in the project file, and by what; below it the sentence, without the file's name.
TABLE = r"""
model: => modle:
    1: modle: unknown key; did you mean model?
dropout: 0.1 => droput: 0.1
    4: model.droput: unknown key; did you mean model.dropout?
dropout: 0.1 => <<: {droput: 0.1}
    4: model.droput: unknown key; did you mean model.dropout?
dropout: 0.1 => xyz: 1
    4: model.xyz: unknown key; known: width, depth, dropout, activation, plan
split: => splt:
    9: datasets.webtext.splt: unknown key; did you mean datasets.webtext.split?
{input: stdlib} => {input: stdlib, vocabluary: 1}
    10: datasets.webtext.prepare.vocabluary: unknown key; did you mean datasets.webtext.prepare.vocabulary?
{input: stdlib} => {input: stdlib}\n    resize:\n      name: crop\n      sze: 1
    13: datasets.webtext.resize.sze: unknown key; did you mean datasets.webtext.resize.size?
max_iters: 320000 => max_iter: 3
    14: run.max_iter: unknown key; did you mean run.max_iters?
stage: 2 => stge: 2
    12: run.runner.stge: unknown key; did you mean run.runner.stage?
betas: => beta:
    19: run.optimizer.beta: unknown key; did you mean run.optimizer.betas?
amp: fp16 => amp: {dtyp: fp16}
    23: run.amp.dtyp: unknown key; did you mean run.amp.dtype?
lr_sched: cosine => lr_sched: {name: cosine, x: 1}
    21: run.lr_sched.x: unknown key; there are no options here
run: => seed: 1\nrun:
    11: seed: not an option here: use run.seed
dropout: 0.1 => 3: 0.1
    4: model.3: expected text, got 3
arch: net => arch: nett
    2: model.arch: there is no model called 'nett'; did you mean net?; known: net, other_net
name: lines => name: line
    7: datasets.webtext.name: there is no dataset called 'line'; did you mean lines?; known: books, images, lines
{name: shard, stage: 2} => shrd2
    12: run.runner: there is no runner called 'shrd2'; did you mean shard2 or shard?; known: ddp, shard, shard2, shard2_offload
name: adamw => name: adam
    18: run.optimizer.name: there is no optimizer called 'adam'; did you mean adamw?; known: adamw, sgd
lr_sched: cosine => lr_sched: consine
    21: run.lr_sched: there is no lr_scheduler called 'consine'; did you mean cosine?; known: cosine, linear
{input: stdlib} => {input: stdlib}\n    resize: corp
    11: datasets.webtext.resize: there is no processor called 'corp'; did you mean crop?; known: crop, pad
model_type: small => model_type: smal
    3: model.model_type: there is no configs/models/net/smal.yaml; did you mean small?
model_type: small => model_type: 345m
    3: model.model_type: there is no configs/models/net/345m.yaml; known: large, small
max_iters: 320000 => max_iters: many
    14: run.max_iters: expected a whole number or null, got the text 'many'
max_iters: 320000 => max_iters: 3.5
    14: run.max_iters: expected a whole number or null, got 3.5
max_iters: 320000 => max_iters: true
    14: run.max_iters: expected a whole number or null, got true
max_iters: 320000 => max_iters: '8'
    14: run.max_iters: expected a whole number or null, got the text '8'
init_lr: 1.5e-4 => init_lr: '1e-4'
    20: run.init_lr: expected a number, got the text '1e-4'
init_lr: 1.5e-4 => init_lr: true
    20: run.init_lr: expected a number, got true
init_lr: 1.5e-4 => init_lr: .nan
    20: run.init_lr: expected a number, got nan
init_lr: 1.5e-4 => init_lr:
    20: run.init_lr: expected a number, got null
output_dir: output/x => output_dir: 5
    13: run.output_dir: expected text, got 5
output_dir: output/x => output_dir: [a]
    13: run.output_dir: expected text, got a list of 1 values
micro_batch_size: 4 => save_best: 1
    16: run.save_best: expected true or false, got 1
micro_batch_size: 4 => save_best: 'yes'
    16: run.save_best: expected true or false, got the text 'yes'
gradient_checkpointing: full => gradient_checkpointing: fulll
    24: run.gradient_checkpointing: expected one of none, full, selective, offload, got the text 'fulll'; did you mean full?
gradient_checkpointing: full => gradient_checkpointing: true
    24: run.gradient_checkpointing: expected one of none, full, selective, offload, got true
gradient_checkpointing: full => keep_last: None
    24: run.keep_last: expected a whole number or null, got the text 'None'; did you mean null?
stage: 2 => stage: true
    12: run.runner.stage: expected one of 1, 2, 3, got true
stage: 2 => stage: 4
    12: run.runner.stage: expected one of 1, 2, 3, got 4
stage: 2 => bucket: 1.5
    12: run.runner.bucket: expected a whole number or text, got 1.5
path: data/webtext => path: 3
    8: datasets.webtext.path: expected a path, got 3
[949, 50, 1] => [949, 50]
    9: datasets.webtext.split: expected a list of 3 values (a whole number, a whole number, a whole number), got 2 values
[949, 50, 1] => [949, x, 1]
    9: datasets.webtext.split.1: expected a whole number, got the text 'x'
split: [949, 50, 1] => tags: a
    9: datasets.webtext.tags: expected a list of text, got the text 'a'
split: [949, 50, 1] => tags: [a, 1]
    9: datasets.webtext.tags.1: expected text, got 1
split: [949, 50, 1] => weights: [1]
    9: datasets.webtext.weights: expected a mapping, got a list of 1 values
split: [949, 50, 1] => weights: {a: b}
    9: datasets.webtext.weights.a: expected a number, got the text 'b'
split: [949, 50, 1] => weights: {1: 2}
    9: datasets.webtext.weights.1: expected text, got 1
{input: stdlib} => stdlib
    10: datasets.webtext.prepare: expected a mapping or null, got the text 'stdlib'
{input: stdlib} => {input: 3}
    10: datasets.webtext.prepare.input: expected text, got 3
amp: fp16 => amp: fp17
    23: run.amp: expected one of fp32, bf16, fp16, got the text 'fp17'; did you mean fp16?
amp: fp16 => amp: 16
    23: run.amp: expected one of fp32, bf16, fp16, or a mapping, got 16
lr_sched: cosine => lr_sched: 3
    21: run.lr_sched: expected the lr_scheduler's name, or a mapping with its name and options, got 3
name: adamw => name: 3
    18: run.optimizer.name: expected text, got 3
arch: net =>
    1: model.arch: the model's name is required; known: net, other_net
name: lines =>
    6: datasets.webtext.name: the dataset's name is required; known: images, lines, books
output_dir: output/x =>
    11: run.output_dir: required, but missing; expected text
path: data/webtext =>
    6: datasets.webtext.path: required, but missing; expected a path
model_type: small =>
    1: model.width: required, but missing; expected a whole number
{input: stdlib} => {vocabulary: 3}
    10: datasets.webtext.prepare.input: required, but missing; expected text
output_dir: output/x => output_dir: ???
    13: run.output_dir: required, but still ???; give it a value, or null if that is its default
max_iters: 320000 =>
    11: run.max_iters: the length of training is required: set max_iters or max_epoch
global_batch_size: 8\n  micro_batch_size: 4 =>
    11: run.global_batch_size: required, unless micro_batch_size or accum_grad_iters is set
max_iters: 320000 => max_iters: 3\n  max_epoch: 1
    15: run.max_epoch: max_iters already sets the length of training; give only one of the two
warmup_fraction: 0.01 => warmup_fraction: 0.01\n  warmup_steps: 3
    22: run.warmup_fraction: warmup_steps already sets the length of the warmup; give only one of the two
warmup_fraction: 0.01 => warmup_fraction: 1
    22: run.warmup_fraction: expected a number below 1, got 1
micro_batch_size: 4 => micro_batch_size: 0
    16: run.micro_batch_size: expected a whole number of at least 1, got 0
init_lr: 1.5e-4 => init_lr: 0
    20: run.init_lr: expected a number above 0, got 0
init_lr: 1.5e-4 => min_lr: 1
    20: run.min_lr: 1.0 is above init_lr, 0.0001
amp: fp16 => amp: {window: 0}
    23: run.amp.window: expected a whole number of at least 1, got 0
amp: fp16 => amp: {loss_scale: 0}
    23: run.amp.loss_scale: expected a number of at least 1e-06, got 0
stage: 2 => stage: 1, offload: true
    12: run.runner: offload needs stage 2 or 3
split: [949, 50, 1] => split: [949, 50
    10: not valid YAML: expected ',' or ']', but got ':'
dropout: 0.1 => arch: other_net
    4: not valid YAML: found duplicate key arch
dropout: 0.1 => freeze: {*_proj: row}
    4: not valid YAML: found undefined alias '_proj'; text that begins with * needs quotes
dropout: 0.1 => freeze: [?_proj]
    4: not valid YAML: text that begins with ? needs quotes inside braces
dropout: 0.1 => freeze: a: b
    4: not valid YAML: mapping values are not allowed here; text that contains ': ' needs quotes
dropout: 0.1 => freeze: @block
    4: not valid YAML: found character '@' that cannot start any token; text that begins with this character needs quotes
output/x => ${model.model_typ}
    13: run.output_dir: ${model.model_typ} refers to an unknown key; did you mean ${model.model_type}?
output/x => ${oc.env:NO_SUCH_VARIABLE}
    13: run.output_dir: the interpolation cannot be resolved: KeyError raised while resolving interpolation: "Environment variable 'NO_SUCH_VARIABLE' not found"
output/x => ${nope:1}
    13: run.output_dir: the interpolation cannot be resolved: Unsupported interpolation type nope
output/x => ${run.output_dir}
    13: run.output_dir: the interpolation cannot be resolved: Recursive interpolation detected
output/x => ${model.width
    13: run.output_dir: the interpolation cannot be resolved: no viable alternative at input '${model.width'
[949, 50, 1] => [1, '${nope}', 1]
    9: datasets.webtext.split.1: ${nope} refers to an unknown key
amp: fp16 => plugins: p.yaml
    23: run.plugins: expected a list of text, got the text 'p.yaml'
"""  # noqa: E501
MISTAKES = re.findall(r"^(\S.*) =>(?: (.*))?\n    (.*)$", TABLE, re.MULTILINE)


@pytest.mark.parametrize(("old", "new", "sentence"), MISTAKES, ids=[sentence for *_, sentence in MISTAKES])
def test_a_mistake_in_the_file_gets_one_sentence(home: Path, old: str, new: str, sentence: str) -> None:
    edit(home, old.replace("\\n", "\n"), new.replace("\\n", "\n"))
    assert mistake() == f"p.yaml:{sentence}"


SECTIONS = {name: text for text in re.split(r"^(?=\w)", PROJECT, flags=re.M) if (name := text.partition(":")[0])}


@pytest.mark.parametrize(
    ("section", "content", "sentence"),
    [
        ("model", "", "p.yaml: model: required, but missing; expected a mapping"),
        ("datasets", "", "p.yaml: datasets: required, but missing; expected a mapping"),
        ("run", "", "p.yaml: run: required, but missing; expected a mapping"),
        ("model", "model: net\n", "p.yaml:1: model: expected a mapping, got the text 'net'"),
        ("model", "model: [net]\n", "p.yaml:1: model: expected a mapping, got a list of 1 values"),
        ("datasets", "datasets: [a]\n", "p.yaml:5: datasets: expected a mapping, got a list of 1 values"),
        (
            "datasets",
            "datasets: {}\n",
            "p.yaml:5: datasets: expected a mapping that is not empty, got an empty mapping",
        ),
        (
            "datasets",
            "datasets: {x: 3}\n",
            "p.yaml:5: datasets.x: expected the dataset's name, or a mapping with its name and options, got 3",
        ),
        ("run", "run:\n", "p.yaml:11: run: expected a mapping, got null"),
        ("run", "run: fast\n", "p.yaml:11: run: expected a mapping, got the text 'fast'"),
    ],
)
def test_a_section_that_is_missing_or_no_mapping_says_so(home: Path, section: str, content: str, sentence: str) -> None:
    edit(home, SECTIONS[section], content)
    assert mistake() == sentence


def test_a_tab_in_front_of_a_key_says_so(home: Path) -> None:
    edit(home, "  dropout", "\tdropout")
    assert mistake() == (
        "p.yaml:4: not valid YAML: found character '\\t' that cannot start any token; indent with spaces"
    )


OPTION_MISTAKES = [
    ("run.seed", "'run.seed' is not of the form key=value, such as run.seed=1"),
    ("=3", "'=3' is not of the form key=value, such as run.seed=1"),
    ("run..seed=3", "'run..seed=3' is not of the form key=value, such as run.seed=1"),
    ("run.sede=1", "run.sede: unknown key; did you mean run.seed?"),
    ("rnu.seed=1", "rnu: unknown key; did you mean run?"),
    ("seed=1", "seed: not an option here: use run.seed"),
    ("model.dropot=0", "model.dropot: unknown key; did you mean model.dropout?"),
    ("datasets.webtxt.path=x", "datasets.webtxt: unknown key; did you mean datasets.webtext?"),
    ("run.runner=shrd", "run.runner: there is no runner called 'shrd'; did you mean shard or shard2?; "
     "known: ddp, shard, shard2, shard2_offload"),
    ("run.objective=dpoo", "run.objective: there is no objective called 'dpoo'; known: none"),
    ("run.objective=3",
     "run.objective: expected the objective's name, or a mapping with its name and options or null, got 3"),
    ("run.runner.stag=1", "run.runner.stag: unknown key; did you mean run.runner.stage?"),
    ("run.runner.stage=9", "run.runner.stage: expected one of 1, 2, 3, got 9"),
    ("run.runner.name=", "run.runner.name: expected text, got null"),
    ("run.seed=1.0", "run.seed: expected a whole number, got 1.0"),
    ("run.seed=-1", "run.seed: expected a whole number of at least 0, got -1"),
    ("run.seed.deeper=1", "run.seed: expected a whole number, got a mapping with deeper"),
    ("run.seed=${run.sed}", "run.seed: ${run.sed} refers to an unknown key; did you mean ${run.seed}?"),
    ("run=fast", "run: expected a mapping, got the text 'fast'"),
    ("run.amp=fp23", "run.amp: expected one of fp32, bf16, fp16, got the text 'fp23'; did you mean fp32?"),
    ("run.amp.dtype=3", "run.amp.dtype: expected one of fp32, bf16, fp16, got 3"),
    ("model.model_type=smll", "model.model_type: there is no configs/models/net/smll.yaml; "
     "did you mean small?"),
    ("model.model_type=3", "model.model_type: expected text, got 3"),
    ("model.width=7", "model.width: 7 is not a multiple of depth, 2"),
    ("datasets.webtext.sample_ratio=abc",
     "datasets.webtext.sample_ratio: expected a number or null, got the text 'abc'"),
    ("datasets.webtext.split=[1,2]", "datasets.webtext.split: expected a list of 3 values "
     "(a whole number, a whole number, a whole number), got 2 values"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "rest"), OPTION_MISTAKES, ids=[option for option, _ in OPTION_MISTAKES])
def test_a_mistake_on_the_command_line_gets_one_sentence(home: Path, option: str, rest: str) -> None:
    assert mistake(option) == f"--options: {rest}"


def test_a_value_on_the_command_line_that_is_not_yaml_gets_one_sentence(home: Path) -> None:
    assert mistake("run.seed=[1").startswith("--options: run.seed: cannot parse the value: not valid YAML: ")


def test_a_mistake_in_a_preset_is_placed_there(home: Path) -> None:
    write(
        home,
        {"configs/runners/bad.yaml": "name: shard\n\nstge: 2\n", "configs/models/net/bad.yaml": "width: x\n"},
    )
    assert mistake("run.runner=bad") == (
        "configs/runners/bad.yaml:3: run.runner.stge: unknown key; did you mean run.runner.stage?"
    )
    assert mistake("model.model_type=bad") == (
        "configs/models/net/bad.yaml:1: model.width: expected a whole number, got the text 'x'"
    )


def test_values_of_two_layers_that_do_not_go_together_are_placed_at_the_one_named(home: Path) -> None:
    edit(home, "dropout: 0.1", "depth: 3")
    assert mistake() == "configs/models/net/small.yaml:1: model.width: 8 is not a multiple of depth, 3"


def test_presets_that_go_round_in_a_circle_end(home: Path) -> None:
    write(home, {"configs/runners/a.yaml": "name: b\n", "configs/runners/b.yaml": "name: a\n"})
    assert "there is no runner called 'a'" in mistake("run.runner=a")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "p.yaml: the file is empty"),
        (b"# only a comment\n", "p.yaml: the file is empty"),
        (b"- a\n- b\n", "p.yaml:1: expected a mapping of keys to values"),
        (b"\njust text\n", "p.yaml:2: expected a mapping of keys to values"),
        (b"model: {a: \xff}\n", "p.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (b"a: 1\n---\nb: 2\n", "p.yaml:2: not valid YAML: but found another document"),
        (b"a: &x [*x]\n", "p.yaml: an anchor contains itself"),
        (b"a: *x\n", "p.yaml:1: not valid YAML: found undefined alias 'x'"),
        (
            b"a: !!python/object:os.system x\n",
            "p.yaml:1: not valid YAML: could not determine a constructor for the tag",
        ),
        (b"? [a]\n: 1\n", "p.yaml:1: not valid YAML: found unhashable key"),
    ],
)
def test_a_file_that_is_no_mapping_says_so(home: Path, content: bytes, reason: str) -> None:
    (home / "p.yaml").write_bytes(content)
    assert mistake().startswith(reason)


def test_a_key_that_is_no_text_is_told_with_the_other_mistakes(home: Path) -> None:
    write(home, {"p.yaml": "null: 1\nmodel: {arch: net, width: 4, 3: 4}\n"})
    assert mistakes() == [
        "p.yaml:2: model.3: expected text, got 3",
        "p.yaml: None: unknown key; known: model, datasets, run",
        "p.yaml: datasets: required, but missing; expected a mapping",
        "p.yaml: run: required, but missing; expected a mapping",
    ]


def test_a_file_that_is_not_there_says_what_is(home: Path) -> None:
    assert mistake(path="q.yaml") == "q.yaml: no such file or folder; did you mean p.yaml?"
    assert mistake(path="configs").startswith("configs: cannot be read: ")


def test_a_folder_of_plugins_that_is_not_there_is_placed(home: Path) -> None:
    edit(home, "amp: fp16", "plugins: [confgs]")
    assert mistake() == "p.yaml:23: run.plugins.0: confgs: no such file or folder; did you mean configs?"


# ---- generated


def misspellings(word: str) -> set[str]:
    """Every way to lose one letter of a word or to swap two neighbours."""
    lost = {word[:i] + word[i + 1 :] for i in range(len(word))}
    swapped = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    return (lost | swapped) - {word, ""}


@pytest.mark.parametrize("cls", [pytest.param(RunOptions, marks=pytest.mark.slow), AmpOptions])
def test_any_misspelling_of_a_key_of_run_suggests_the_key(cls: type) -> None:
    check = Checker(lambda key: f"f: {'.'.join(key)}")
    for name in [f.name for f in fields(cls)]:
        for wrong in misspellings(name):
            with pytest.raises(ConfigError) as caught:
                check.dataclass(cls, {"output_dir": "o", wrong: 1} if cls is RunOptions else {wrong: 1}, ("s",))
            assert str(caught.value) == f"f: s.{wrong}: unknown key; did you mean s.{name}?"


def all_keys(tree: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        yield (*at, name)
        if isinstance(value, dict):
            yield from all_keys(value, (*at, name))


FREE = {("datasets", "webtext"), ("model", "plan", "qkv")}  # keys that users choose
NAMES = {"arch", "name", "model_type"}  # their loss changes what the other keys are checked against


def test_any_key_misspelled_in_a_file_is_named_with_its_line_and_the_right_key(home: Path) -> None:
    plain = load("run.runner=shard2").plain
    keys = [key for key in all_keys(plain) if key not in FREE and key[-1] not in NAMES]
    assert len(keys) > 50
    for number, key in enumerate(keys):
        tree = copy.deepcopy(plain)
        parent = tree
        for name in key[:-1]:
            parent = parent[name]
        wrong = sorted(misspellings(key[-1]))[number % len(key[-1])]
        parent[wrong] = parent.pop(key[-1])  # now the section's last key
        text = yaml.safe_dump(tree, sort_keys=False)
        write(home, {"p.yaml": text})
        (line,) = [i for i, row in enumerate(text.splitlines(), 1) if row.strip().startswith(f"{wrong}:")]
        written = ".".join((*key[:-1], wrong))
        assert mistake() == f"p.yaml:{line}: {written}: unknown key; did you mean {'.'.join(key)}?"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["ddp", "${a", "???", "fp16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("name"), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One home for all examples of a property."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from configured_home(monkeypatch, tmp_path_factory.mktemp("home"))


@settings(deadline=None, max_examples=50)
@given(data=st.data(), value=JSON)
def test_whatever_stands_at_a_key_it_loads_and_reads_back_or_gets_one_sentence(
    shared_home: Path, data: st.DataObject, value: Any
) -> None:
    plain = load().plain
    key = data.draw(st.sampled_from(list(all_keys(plain))))
    parent = plain
    for name in key[:-1]:
        parent = parent[name]
    parent[key[-1]] = value
    try:
        config = Config.from_plain(plain)
    except UserError as error:
        sentence = str(error)
    else:
        sentence = "config: fine"
        assert Config.from_plain(config.plain) == config
    assert re.fullmatch(r"config: .+(\nconfig: .+)*", sentence)  # a line for each mistake
