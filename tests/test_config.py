"""The configuration: what users write, what comes out, and the one sentence that every mistake gets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_home import forget_plugins, isolate, plugin, write

from crosstrain.check import Checker, NoOptions, to_plain
from crosstrain.config import BatchPlan, Component, Config, OptionError, RunOptions, load_config, plan_batch
from crosstrain.errors import ConfigError, UserError
from crosstrain.options import AmpOptions
from crosstrain.registry import registry

PLUGINS = '''
from __future__ import annotations
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from crosstrain.config import Component, OptionError
from crosstrain.registry import registry

@registry.register_model("net")
class Net:
    @dataclass
    class Options:
        width: int
        depth: int = 2
        dropout: float = 0.0
        activation: Literal["gelu", "relu"] = "gelu"
        plan: dict[str, str] = field(default_factory=lambda: {"qkv": "column"})

        def __post_init__(self):
            if self.width % self.depth:
                raise OptionError("width", f"{self.width} is not a multiple of depth, {self.depth}")

@registry.register_model("other_net")
class OtherNet:
    @dataclass
    class Options:
        layers: int = 1

@dataclass
class Prepare:
    input: str
    vocabulary: int | None = None

@registry.register_dataset("lines")
class Lines:
    @dataclass
    class Options:
        path: Path
        seq_length: int = 16
        split: tuple[int, int, int] = (8, 1, 1)
        tags: list[str] = field(default_factory=list)
        weights: dict[str, float] = field(default_factory=dict)
        prepare: Prepare | None = None
        resize: Annotated[Component, "processor"] = field(default_factory=lambda: Component("crop"))

@registry.register_dataset("images")
class Images:
    @dataclass
    class Options:
        folder: str = "."

@registry.register_processor("crop")
class Crop:
    @dataclass
    class Options:
        size: int = 4

@registry.register_processor("pad")
class Pad:
    @dataclass
    class Options:
        value: float | None = None

@registry.register_runner("ddp")
class DDP:
    """No options."""

@registry.register_runner("shard")
class Shard:
    @dataclass
    class Options:
        stage: Literal[1, 2, 3] = 1
        offload: bool = False
        bucket: int | str = "auto"

        def __post_init__(self):
            if self.offload and self.stage == 1:
                raise ValueError("offload needs stage 2 or 3")

@registry.register_optimizer("adamw")
class AdamW:
    @dataclass
    class Options:
        betas: tuple[float, float] = (0.9, 0.999)
        eps: float = 1e-8

@registry.register_optimizer("sgd")
class SGD:
    @dataclass
    class Options:
        momentum: float = 0.0

@registry.register_lr_scheduler("cosine")
def cosine(step):
    return 1.0

@registry.register_lr_scheduler("linear")
def linear(step):
    return 1.0
'''

HOME = {
    "plugins/all.py": PLUGINS,
    "configs/models/net/small.yaml": "width: 8\n",
    "configs/models/net/large.yaml": "width: 64\ndepth: 4\n",
    "configs/runners/shard2.yaml": "# a preset\nname: shard\nstage: 2\n",
    "configs/runners/shard2_offload.yaml": "name: shard2\noffload: true\n",
    "configs/runners/ddp.yaml": "name: ddp\n",
    "configs/datasets/books.yaml": "name: lines\npath: data/books\nseq_length: 128\n",
}

PROJECT = """\
model:
  arch: net
  model_type: small
  dropout: 0.1
datasets:
  webtext:
    name: lines
    path: data/webtext
    split: [949, 50, 1]
    prepare: {input: stdlib}
run:
  runner: {name: shard, stage: 2}
  output_dir: output/x
  max_iters: 320000
  global_batch_size: 8
  micro_batch_size: 4
  optimizer:
    name: adamw
    betas: [0.9, 0.95]
  init_lr: 1.5e-4
  lr_sched: cosine
  warmup_fraction: 0.01
  amp: fp16
  gradient_checkpointing: full
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    write(tmp_path, {**HOME, "p.yaml": PROJECT})
    yield from isolate(monkeypatch, tmp_path)


def load(*options: str) -> Config:
    return load_config("p.yaml", options)


def edit(home: Path, old: str, new: str) -> None:
    """Change the project file."""
    assert PROJECT.count(old) == 1, old
    (home / "p.yaml").write_text(PROJECT.replace(old, new), encoding="utf-8")


def mistake(*options: str, path: str = "p.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what comes out


def test_a_project_file_becomes_typed_options(home: Path) -> None:
    config = load()
    assert config.model.name == "net"
    assert config.model_type == "small"
    assert vars(config.model.options) == {
        "width": 8, "depth": 2, "dropout": 0.1, "activation": "gelu", "plan": {"qkv": "column"},
    }  # fmt: skip
    data = config.datasets["webtext"].options
    assert data.path == Path("data/webtext")
    assert data.split == (949, 50, 1)
    assert (data.prepare.input, data.prepare.vocabulary) == ("stdlib", None)
    assert (data.resize.name, data.resize.options.size) == ("crop", 4)
    assert (config.runner.name, config.runner.options.stage, config.runner.options.offload) == ("shard", 2, False)
    assert config.optimizer.options.betas == (0.9, 0.95)
    assert config.lr_sched == Component("cosine", NoOptions())
    assert config.run.init_lr == 1.5e-4
    assert config.run.amp == AmpOptions(dtype="fp16")
    assert config.run.runner is config.runner


def test_the_shortest_project_takes_every_default(home: Path) -> None:
    text = "model: {arch: other_net}\ndatasets: {x: images}\nrun: {output_dir: o, max_epoch: 1, micro_batch_size: 2}\n"
    write(home, {"p.yaml": text})
    config = load()
    expected = RunOptions(output_dir="o", max_epoch=1, micro_batch_size=2)
    for f in fields(RunOptions):
        if f.name not in ("runner", "optimizer", "lr_sched"):
            assert getattr(config.run, f.name) == getattr(expected, f.name), f.name
    assert [config.runner.name, config.optimizer.name, config.lr_sched.name] == ["ddp", "adamw", "cosine"]
    assert config.optimizer.options.betas == (0.9, 0.999)
    assert (config.model_type, config.model.options.layers) == (None, 1)


def test_whole_numbers_do_for_floats_and_become_floats(home: Path) -> None:
    value = load("run.grad_norm_clip=1", "run.init_lr=1").run.grad_norm_clip
    assert type(value) is float


def test_interpolation_sees_other_layers_and_defaults(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "elsewhere")
    edit(home, "output_dir: output/x", "output_dir: ${oc.env:WHERE}/${model.model_type}_${model.width}_${run.seed}")
    config = load("run.warmup_steps=null", "datasets.webtext.seq_length=${run.sample_tokens}", "model.width=16")
    assert config.run.output_dir == "elsewhere/small_16_1234"
    assert config.datasets["webtext"].options.seq_length == 64


def test_names_may_be_interpolated(home: Path) -> None:
    edit(home, "runner: {name: shard, stage: 2}", "runner: ${oc.env:NO_SUCH_VARIABLE,shard2}")
    assert load().runner.options.stage == 2


def test_one_dataset_may_be_a_copy_of_another(home: Path) -> None:
    edit(home, "run:\n", "  again: ${datasets.webtext}\nrun:\n")
    config = load()
    assert config.datasets["again"] == config.datasets["webtext"]


def test_yaml_anchors_and_merge_keys_work(home: Path) -> None:
    edit(home, "run:\n", "  again: {<<: *it, seq_length: 32}\nrun:\n")
    text = (home / "p.yaml").read_text().replace("webtext:\n", "webtext: &it\n")
    write(home, {"p.yaml": text})
    assert load().datasets["again"].options.seq_length == 32
    write(home, {"p.yaml": text.replace("path:", "pth:")})
    assert mistake().startswith("p.yaml:8: datasets.webtext.pth: unknown key; did you mean datasets.webtext.path?")


# ---- layers


def test_each_layer_stands_over_the_one_before(home: Path) -> None:
    edit(home, "  dropout: 0.1\n", "")
    assert load().model.options.depth == 2  # the component's default
    write(home, {"configs/models/net/small.yaml": "width: 8\ndepth: 4\n"})
    assert load().model.options.depth == 4  # configs/
    edit(home, "  dropout: 0.1\n", "  depth: 8\n")
    assert load().model.options.depth == 8  # the project
    assert load("model.depth=1").model.options.depth == 1  # the command line


def test_layers_merge_mappings_and_replace_lists(home: Path) -> None:
    config = load("model.plan.mlp=row", "datasets.webtext.split=[1,1,1]", "datasets.webtext.prepare.vocabulary=300")
    assert config.model.options.plan == {"qkv": "column", "mlp": "row"}
    data = config.datasets["webtext"].options
    assert data.split == (1, 1, 1)
    assert (data.prepare.input, data.prepare.vocabulary) == ("stdlib", 300)


def test_the_later_option_counts(home: Path) -> None:
    assert load("run.seed=1", "run.seed=2").run.seed == 2


@pytest.mark.parametrize("options", [["run.runner=shard", "run.runner.stage=3"], ["run.runner.stage=3", "run.runner=shard"]])
def test_options_for_one_component_combine_in_either_order(home: Path, options: list[str]) -> None:
    edit(home, "runner: {name: shard, stage: 2}", "runner: ddp")
    assert load(*options).runner.options.stage == 3


def test_another_name_drops_the_options_meant_for_the_old_one(home: Path) -> None:
    assert load("run.runner=ddp").runner == Component("ddp", NoOptions())
    assert load("run.runner.name=ddp").runner == Component("ddp", NoOptions())
    assert load("run.optimizer=sgd").optimizer.options.momentum == 0.0
    assert load("datasets.webtext.name=images").datasets["webtext"].options.folder == "."
    assert load("model.arch=other_net").model_type is None


def test_the_same_name_again_keeps_the_options(home: Path) -> None:
    assert load("run.runner=shard").runner.options.stage == 2
    assert load("run.optimizer={name: adamw, eps: 1e-6}").optimizer.options.betas == (0.9, 0.95)


def test_another_model_type_keeps_what_the_project_says(home: Path) -> None:
    options = load("model.model_type=large").model.options
    assert (options.width, options.dropout) == (64, 0.1)


def test_another_dtype_keeps_the_loss_scale_options(home: Path) -> None:
    edit(home, "amp: fp16", "amp: {dtype: fp16, window: 7}")
    assert load("run.amp=bf16").run.amp == AmpOptions(dtype="bf16", window=7)
    edit(home, "amp: fp16", "amp: fp16")
    assert load("run.amp.window=7").run.amp == AmpOptions(dtype="fp16", window=7)


def test_a_processor_inside_a_dataset_follows_the_same_rules(home: Path) -> None:
    edit(home, "run:\n", "    resize: {name: crop, size: 9}\nrun:\n")
    assert load().datasets["webtext"].options.resize.options.size == 9
    assert load("datasets.webtext.resize=crop").datasets["webtext"].options.resize.options.size == 9
    assert load("datasets.webtext.resize=pad").datasets["webtext"].options.resize.options.value is None


# ---- presets


def test_a_preset_stands_for_a_component_with_options(home: Path) -> None:
    runner = load("run.runner=shard2").runner
    assert (runner.name, runner.options.stage) == ("shard", 2)


def test_explicit_keys_win_over_a_preset(home: Path) -> None:
    assert load("run.runner=shard2", "run.runner.stage=3").runner.options.stage == 3
    edit(home, "runner: {name: shard, stage: 2}", "runner: {name: shard2, stage: 3}")
    assert load().runner.options.stage == 3


def test_a_preset_may_build_on_another(home: Path) -> None:
    options = load("run.runner=shard2_offload").runner.options
    assert (options.stage, options.offload) == (2, True)


def test_a_dataset_may_be_a_preset(home: Path) -> None:
    data = load("datasets.webtext=books").datasets["webtext"]
    assert (data.name, data.options.path, data.options.seq_length) == ("lines", Path("data/books"), 128)


# ---- plain and back


def test_plain_spells_everything_out_and_reads_back(home: Path) -> None:
    for options in [[], ["run.runner=shard2_offload"], ["model.arch=other_net", "run.amp=bf16", "run.keep_last=null"]]:
        config = load(*options)
        plain = yaml.safe_load(yaml.safe_dump(config.plain))
        assert plain == config.plain
        assert Config.from_plain(plain) == config
        assert Config.from_plain(plain).plain == plain


def test_plain_does_not_need_the_presets_again(home: Path) -> None:
    config = load("run.runner=shard2_offload")
    plain = copy.deepcopy(config.plain)
    assert plain["run"]["runner"] == {"name": "shard", "stage": 2, "offload": True, "bucket": "auto"}
    write(home, {"configs/runners/shard.yaml": "stage: 3\nbucket: 5\n"})
    (home / "configs" / "models" / "net" / "small.yaml").unlink()
    assert Config.from_plain(plain) == config
    assert plain == config.plain, "from_plain changed its argument"


def test_plain_may_be_overridden(home: Path) -> None:
    plain = load("run.runner=ddp").plain
    config = Config.from_plain(plain, ["run.runner=shard2", "run.seed=5"])
    assert (config.runner.name, config.runner.options.stage, config.run.seed) == ("shard", 2, 5)
    with pytest.raises(ConfigError, match=r"^--options: model\.model_type: cannot be changed, because config spells"):
        Config.from_plain(plain, ["model.model_type=large"])


def test_plain_names_its_source_in_errors(home: Path) -> None:
    plain = load().plain
    plain["run"]["seed"] = "x"
    with pytest.raises(ConfigError, match=r"^step_5: run\.seed: expected a whole number, got the text 'x'$"):
        Config.from_plain(plain, label="step_5")
    del plain["run"]["seed"], plain["run"]["output_dir"]
    with pytest.raises(ConfigError, match=r"^config: run\.output_dir: required"):
        Config.from_plain(plain)


# ---- plugins named by the project


def test_a_project_brings_its_own_plugins(home: Path) -> None:
    write(home, {"mine/it.py": plugin("runner", "mine")})
    edit(home, "runner: {name: shard, stage: 2}", "runner: mine\n  plugins: [mine]")
    config = load()
    assert config.runner.name == "mine"
    forget_plugins()
    assert Config.from_plain(config.plain).plain == config.plain


def test_a_missing_package_is_said_with_the_place(home: Path) -> None:
    write(home, {"plugins/needy.py": plugin("runner", "needy", before="import no_such_package")})
    with pytest.raises(UserError, match=r"^--options: run\.runner: runner 'needy' .* pip install no_such_package$"):
        load("run.runner=needy")


def test_a_broken_plugin_matters_only_when_it_is_named(home: Path) -> None:
    write(home, {"plugins/broken.py": plugin("runner", "broken", before="1 / 0")})
    load()
    assert "ZeroDivisionError" in mistake("run.runner=broken")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("Options = dict", "must be a dataclass"),
        ("Options = dataclass(type('Options', (), {'__annotations__': {'name': str}}))", "a field called name"),
        ("Options = dataclass(type('Options', (), {'__annotations__': {'x': 'Nowhere'}}))", "name 'Nowhere' is not"),
    ],
)
def test_options_that_no_one_could_set_are_the_plugins_fault(home: Path, body: str, reason: str) -> None:
    write(home, {"plugins/odd.py": plugin("runner", "odd", body, before="from dataclasses import dataclass")})
    message = mistake("run.runner=odd")
    assert message.startswith("--options: run.runner: Options of crosstrain_plugins.builtin.odd.Component")
    assert reason in message


# ---- mistakes: each row is what is replaced in the project file, by what, and the sentence

MISTAKES = [
    # unknown keys, at every level
    ("model:\n", "modle:\n", "p.yaml:1: modle: unknown key; did you mean model?"),
    ("  dropout: 0.1", "  droput: 0.1", "p.yaml:4: model.droput: unknown key; did you mean model.dropout?"),
    ("  dropout: 0.1", "  xyz: 1", "p.yaml:4: model.xyz: unknown key; known: width, depth, dropout, activation, plan"),
    ("    split:", "    splt:", "p.yaml:9: datasets.webtext.splt: unknown key; did you mean datasets.webtext.split?"),
    (
        "{input: stdlib}",
        "{input: stdlib, vocabluary: 1}",
        "p.yaml:10: datasets.webtext.prepare.vocabluary: unknown key; did you mean datasets.webtext.prepare.vocabulary?",
    ),
    (
        "{input: stdlib}",
        "{input: stdlib}\n    resize:\n      name: crop\n      sze: 1",
        "p.yaml:13: datasets.webtext.resize.sze: unknown key; did you mean datasets.webtext.resize.size?",
    ),
    ("  max_iters: 320000", "  max_iter: 3", "p.yaml:14: run.max_iter: unknown key; did you mean run.max_iters?"),
    ("stage: 2", "stge: 2", "p.yaml:12: run.runner.stge: unknown key; did you mean run.runner.stage?"),
    ("    betas:", "    beta:", "p.yaml:19: run.optimizer.beta: unknown key; did you mean run.optimizer.betas?"),
    ("amp: fp16", "amp: {dtyp: fp16}", "p.yaml:23: run.amp.dtyp: unknown key; did you mean run.amp.dtype?"),
    (
        "lr_sched: cosine",
        "lr_sched: {name: cosine, x: 1}",
        "p.yaml:21: run.lr_sched.x: unknown key; there are no options here",
    ),
    ("run:\n", "seed: 1\nrun:\n", "p.yaml:11: seed: unknown section; did you mean run.seed?"),
    ("  dropout: 0.1", "  3: 0.1", "p.yaml:4: model.3: expected text, got 3"),
    # names of components
    (
        "arch: net",
        "arch: nett",
        "p.yaml:2: model.arch: there is no model called 'nett'; did you mean net?; known: net, other_net",
    ),
    (
        "name: lines",
        "name: line",
        "p.yaml:7: datasets.webtext.name: there is no dataset called 'line'; did you mean lines?; "
        "known: books, images, lines",
    ),
    (
        "{name: shard, stage: 2}",
        "shrd2",
        "p.yaml:12: run.runner: there is no runner called 'shrd2'; did you mean shard2 or shard?; "
        "known: ddp, shard, shard2, shard2_offload",
    ),
    (
        "name: adamw",
        "name: adam",
        "p.yaml:18: run.optimizer.name: there is no optimizer called 'adam'; did you mean adamw?; known: adamw, sgd",
    ),
    (
        "lr_sched: cosine",
        "lr_sched: consine",
        "p.yaml:21: run.lr_sched: there is no lr_scheduler called 'consine'; did you mean cosine?; "
        "known: cosine, linear",
    ),
    (
        "{input: stdlib}",
        "{input: stdlib}\n    resize: corp",
        "p.yaml:11: datasets.webtext.resize: there is no processor called 'corp'; did you mean crop?; "
        "known: crop, pad",
    ),
    (
        "model_type: small",
        "model_type: smal",
        "p.yaml:3: model.model_type: there is no configs/models/net/smal.yaml; did you mean small?",
    ),
    (
        "model_type: small",
        "model_type: 345m",
        "p.yaml:3: model.model_type: there is no configs/models/net/345m.yaml; known: large, small",
    ),
    # wrong types, of every kind
    ("max_iters: 320000", "max_iters: many", "p.yaml:14: run.max_iters: expected a whole number or null, got the text 'many'"),
    ("max_iters: 320000", "max_iters: 3.5", "p.yaml:14: run.max_iters: expected a whole number or null, got 3.5"),
    ("max_iters: 320000", "max_iters: true", "p.yaml:14: run.max_iters: expected a whole number or null, got true"),
    ("max_iters: 320000", "max_iters: '8'", "p.yaml:14: run.max_iters: expected a whole number or null, got the text '8'"),
    ("init_lr: 1.5e-4", "init_lr: '1e-4'", "p.yaml:20: run.init_lr: expected a number, got the text '1e-4'"),
    ("init_lr: 1.5e-4", "init_lr: true", "p.yaml:20: run.init_lr: expected a number, got true"),
    ("init_lr: 1.5e-4", "init_lr: .nan", "p.yaml:20: run.init_lr: expected a number, got nan"),
    ("init_lr: 1.5e-4", "init_lr:", "p.yaml:20: run.init_lr: expected a number, got null"),
    ("output_dir: output/x", "output_dir: 5", "p.yaml:13: run.output_dir: expected text, got 5"),
    ("output_dir: output/x", "output_dir: [a]", "p.yaml:13: run.output_dir: expected text, got a list of 1 values"),
    ("micro_batch_size: 4", "save_best: 1", "p.yaml:16: run.save_best: expected true or false, got 1"),
    ("micro_batch_size: 4", "save_best: 'yes'", "p.yaml:16: run.save_best: expected true or false, got the text 'yes'"),
    (
        "gradient_checkpointing: full",
        "gradient_checkpointing: fulll",
        "p.yaml:24: run.gradient_checkpointing: expected one of none, full, selective, offload, got the text 'fulll'; "
        "did you mean full?",
    ),
    (
        "gradient_checkpointing: full",
        "gradient_checkpointing: true",
        "p.yaml:24: run.gradient_checkpointing: expected one of none, full, selective, offload, got true",
    ),
    (
        "gradient_checkpointing: full",
        "keep_last: None",
        "p.yaml:24: run.keep_last: expected a whole number or null, got the text 'None'; did you mean null?",
    ),
    ("stage: 2", "stage: 4", "p.yaml:12: run.runner.stage: expected one of 1, 2, 3, got 4"),
    ("stage: 2", "bucket: 1.5", "p.yaml:12: run.runner.bucket: expected a whole number or text, got 1.5"),
    ("path: data/webtext", "path: 3", "p.yaml:8: datasets.webtext.path: expected a path, got 3"),
    (
        "[949, 50, 1]",
        "[949, 50]",
        "p.yaml:9: datasets.webtext.split: expected a list of 3 values (a whole number, a whole number, a whole number), "
        "got 2 values",
    ),
    ("[949, 50, 1]", "[949, x, 1]", "p.yaml:9: datasets.webtext.split.1: expected a whole number, got the text 'x'"),
    (
        "split: [949, 50, 1]",
        "tags: a",
        "p.yaml:9: datasets.webtext.tags: expected a list of text, got the text 'a'",
    ),
    ("split: [949, 50, 1]", "tags: [a, 1]", "p.yaml:9: datasets.webtext.tags.1: expected text, got 1"),
    ("split: [949, 50, 1]", "weights: [1]", "p.yaml:9: datasets.webtext.weights: expected a mapping, got a list of 1 values"),
    ("split: [949, 50, 1]", "weights: {a: b}", "p.yaml:9: datasets.webtext.weights.a: expected a number, got the text 'b'"),
    ("split: [949, 50, 1]", "weights: {1: 2}", "p.yaml:9: datasets.webtext.weights.1: expected text, got 1"),
    (
        "{input: stdlib}",
        "stdlib",
        "p.yaml:10: datasets.webtext.prepare: expected a mapping or null, got the text 'stdlib'",
    ),
    (
        "{input: stdlib}",
        "{input: 3}",
        "p.yaml:10: datasets.webtext.prepare.input: expected text, got 3",
    ),
    ("amp: fp16", "amp: fp17", "p.yaml:23: run.amp: expected one of fp32, bf16, fp16, got the text 'fp17'; did you mean fp16?"),
    ("amp: fp16", "amp: off", "p.yaml:23: run.amp: expected a mapping, got false"),
    (
        "lr_sched: cosine",
        "lr_sched: 3",
        "p.yaml:21: run.lr_sched: expected a mapping, got 3",
    ),
    ("name: adamw", "name: 3", "p.yaml:18: run.optimizer.name: expected text, got 3"),
    # sections
    (PROJECT[: PROJECT.index("datasets")], "", "p.yaml: model: this section is required, but missing"),
    (PROJECT[PROJECT.index("run:") :], "", "p.yaml: run: this section is required, but missing"),
    (PROJECT[PROJECT.index("run:") :], "run:\n", "p.yaml:11: run: expected a mapping, got null"),
    (PROJECT[PROJECT.index("run:") :], "run: fast\n", "p.yaml:11: run: expected a mapping, got the text 'fast'"),
    (PROJECT[: PROJECT.index("datasets")], "model: net\n", "p.yaml:1: model: expected a mapping, got the text 'net'"),
    (PROJECT[: PROJECT.index("datasets")], "model: [net]\n", "p.yaml:1: model: expected a mapping, got a list of 1 values"),
    (PROJECT[PROJECT.index("  webtext") : PROJECT.index("run:")], "  [a]\n", "p.yaml:5: datasets: expected a mapping, got a list of 1 values"),
    (PROJECT[PROJECT.index("  webtext") : PROJECT.index("run:")], "  {}\n", "p.yaml:5: datasets: at least one dataset is required"),
    (PROJECT[PROJECT.index("    name: l") : PROJECT.index("run:")], "    3\n", "p.yaml:6: datasets.webtext: expected a mapping, got 3"),
    # missing
    ("  arch: net\n", "", "p.yaml:1: model.arch: the name of a model is required; known: net, other_net"),
    (
        "    name: lines\n",
        "",
        "p.yaml:6: datasets.webtext.name: the name of a dataset is required; known: images, lines, books",
    ),
    ("  output_dir: output/x\n", "", "p.yaml:11: run.output_dir: required, but missing; expected text"),
    ("    path: data/webtext\n", "", "p.yaml:6: datasets.webtext.path: required, but missing; expected a path"),
    ("  model_type: small\n", "", "p.yaml:1: model.width: required, but missing; expected a whole number"),
    (
        "{input: stdlib}",
        "{vocabulary: 3}",
        "p.yaml:10: datasets.webtext.prepare.input: required, but missing; expected text",
    ),
    ("output_dir: output/x", "output_dir: ???", "p.yaml:13: run.output_dir: required, but still ???"),
    ("  max_iters: 320000\n", "", "p.yaml:11: run.max_iters: how long to train is required: give max_iters or max_epoch"),
    (
        "  global_batch_size: 8\n  micro_batch_size: 4\n",
        "",
        "p.yaml:11: run.global_batch_size: required, unless micro_batch_size or accum_grad_iters is given",
    ),
    # what cannot go together, or is out of range
    (
        "max_iters: 320000",
        "max_iters: 3\n  max_epoch: 1",
        "p.yaml:15: run.max_epoch: max_iters already says how long to train; give one of the two",
    ),
    (
        "warmup_fraction: 0.01",
        "warmup_fraction: 0.01\n  warmup_steps: 3",
        "p.yaml:22: run.warmup_fraction: warmup_steps already says how long the warmup is; give one of the two",
    ),
    ("warmup_fraction: 0.01", "warmup_fraction: 1", "p.yaml:22: run.warmup_fraction: expected at least 0 and less than 1, got 1.0"),
    ("micro_batch_size: 4", "micro_batch_size: 0", "p.yaml:16: run.micro_batch_size: expected at least 1, got 0"),
    ("init_lr: 1.5e-4", "init_lr: 0", "p.yaml:20: run.init_lr: expected more than 0, got 0.0"),
    ("init_lr: 1.5e-4", "min_lr: 1", "p.yaml:20: run.min_lr: 1.0 is above init_lr, 0.0001"),
    ("amp: fp16", "amp: {window: 0}", "p.yaml:23: run.amp.window: expected at least 1, got 0"),
    ("amp: fp16", "amp: {loss_scale: 0}", "p.yaml:23: run.amp.loss_scale: expected more than 0, got 0.0"),
    ("  dropout: 0.1", "  depth: 3", "configs/models/net/small.yaml:1: model.width: 8 is not a multiple of depth, 3"),
    ("stage: 2", "stage: 1, offload: true", "p.yaml:12: run.runner: offload needs stage 2 or 3"),
    # YAML and interpolation
    ("split: [949, 50, 1]", "split: [949, 50", "p.yaml:10: not valid YAML: expected ',' or ']', but got ':'"),
    ("  dropout: 0.1", "\tdropout: 0.1", "p.yaml:4: not valid YAML: found character '\\t' that cannot start any token"),
    ("  dropout: 0.1", "  arch: other_net", "p.yaml:4: not valid YAML: found duplicate key arch"),
    ("output/x", "${model.model_typ}", "p.yaml:13: run.output_dir: ${model.model_typ} stands for no key; did you mean ${model.model_type}?"),
    ("output/x", "${oc.env:NO_SUCH_VARIABLE}", "p.yaml:13: run.output_dir: the interpolation cannot be resolved: KeyError raised while resolving interpolation: \"Environment variable 'NO_SUCH_VARIABLE' not found\""),
    ("output/x", "${nope:1}", "p.yaml:13: run.output_dir: the interpolation cannot be resolved: Unsupported interpolation type nope"),
    ("output/x", "${run.output_dir}", "p.yaml:13: run.output_dir: the interpolation cannot be resolved: Recursive interpolation detected"),
    ("output/x", "${model.width", "p.yaml:13: run.output_dir: the interpolation cannot be resolved: no viable alternative at input '${model.width'"),
    ("[949, 50, 1]", "[1, '${nope}', 1]", "p.yaml:9: datasets.webtext.split.1: ${nope} stands for no key"),
    ("amp: fp16", "plugins: p.yaml", "p.yaml:23: run.plugins: expected a list of text, got the text 'p.yaml'"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), MISTAKES, ids=[sentence for *_, sentence in MISTAKES])
def test_a_mistake_in_the_file_gets_one_sentence(home: Path, old: str, new: str, sentence: str) -> None:
    edit(home, old, new)
    assert mistake() == sentence


OPTION_MISTAKES = [
    ("run.seed", "'run.seed' is not of the form key=value, such as run.seed=1"),
    ("=3", "'=3' is not of the form key=value, such as run.seed=1"),
    ("run..seed=3", "'run..seed=3' is not of the form key=value, such as run.seed=1"),
    ("run.sede=1", "run.sede: unknown key; did you mean run.seed?"),
    ("rnu.seed=1", "rnu: unknown key; did you mean run?"),
    ("seed=1", "seed: unknown section; did you mean run.seed?"),
    ("model.dropot=0", "model.dropot: unknown key; did you mean model.dropout?"),
    ("datasets.webtxt.path=x", "datasets.webtxt: unknown key; did you mean datasets.webtext?"),
    ("run.runner=shrd", "run.runner: there is no runner called 'shrd'; did you mean shard or shard2?; "
     "known: ddp, shard, shard2, shard2_offload"),
    ("run.runner.stag=1", "run.runner.stag: unknown key; did you mean run.runner.stage?"),
    ("run.runner.stage=9", "run.runner.stage: expected one of 1, 2, 3, got 9"),
    ("run.runner.name=", "run.runner.name: expected text, got null"),
    ("run.seed=1.0", "run.seed: expected a whole number, got 1.0"),
    ("run.seed=-1", "run.seed: expected at least 0, got -1"),
    ("run.seed.deeper=1", "run.seed: expected a whole number, got a mapping with deeper"),
    ("run.seed=${run.sed}", "run.seed: ${run.sed} stands for no key; did you mean ${run.seed}?"),
    ("run=fast", "run: expected a mapping, got the text 'fast'"),
    ("run.amp=fp23", "run.amp: expected one of fp32, bf16, fp16, got the text 'fp23'; did you mean fp32?"),
    ("run.amp.dtype=fp23", "run.amp.dtype: expected one of fp32, bf16, fp16, got the text 'fp23'; did you mean fp32?"),
    ("model.model_type=smll", "model.model_type: there is no configs/models/net/smll.yaml; did you mean small?"),
    ("model.model_type=3", "model.model_type: expected text, got 3"),
    ("model.width=7", "model.width: 7 is not a multiple of depth, 2"),
    ("datasets.webtext.split=[1,2]", "datasets.webtext.split: expected a list of 3 values "
     "(a whole number, a whole number, a whole number), got 2 values"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "rest"), OPTION_MISTAKES, ids=[option for option, _ in OPTION_MISTAKES])
def test_a_mistake_on_the_command_line_gets_one_sentence(home: Path, option: str, rest: str) -> None:
    assert mistake(option) == f"--options: {rest}"


def test_a_value_on_the_command_line_that_is_not_yaml_gets_one_sentence(home: Path) -> None:
    assert mistake("run.seed=[1").startswith("--options: run.seed: the value is not valid YAML: ")


def test_a_mistake_in_a_preset_is_placed_there(home: Path) -> None:
    write(home, {"configs/runners/bad.yaml": "name: shard\n\nstge: 2\n", "configs/models/net/bad.yaml": "width: x\n"})
    assert mistake("run.runner=bad") == (
        "configs/runners/bad.yaml:3: run.runner.stge: unknown key; did you mean run.runner.stage?"
    )
    assert mistake("model.model_type=bad") == (
        "configs/models/net/bad.yaml:1: model.width: expected a whole number, got the text 'x'"
    )


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
        (b"a: !!python/object:os.system x\n", "p.yaml:1: not valid YAML: could not determine a constructor for the tag"),
        (b"? [a]\n: 1\n", "p.yaml:1: not valid YAML: found unhashable key"),
    ],
)
def test_a_file_that_is_no_mapping_says_so(home: Path, content: bytes, reason: str) -> None:
    (home / "p.yaml").write_bytes(content)
    assert mistake().startswith(reason)


def test_a_file_that_is_not_there_says_what_is(home: Path) -> None:
    assert mistake(path="q.yaml") == "q.yaml: no such file or folder; did you mean p.yaml?"
    assert mistake(path="configs").startswith("configs: cannot be read: ")


def test_a_folder_of_plugins_that_is_not_there_is_placed(home: Path) -> None:
    edit(home, "amp: fp16", "plugins: [confgs]")
    assert mistake() == "p.yaml:23: run.plugins.0: confgs: no such file or folder; did you mean configs?"


def misspellings(word: str) -> set[str]:
    """Every way to lose one letter of a word or to swap two neighbours."""
    lost = {word[:i] + word[i + 1 :] for i in range(len(word))}
    swapped = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    return (lost | swapped) - {word, ""}


@pytest.mark.parametrize("cls", [RunOptions, AmpOptions])
def test_any_misspelling_of_a_key_of_run_suggests_the_key(cls: type) -> None:
    check = Checker(lambda key: f"f: {'.'.join(key)}")
    for name in [f.name for f in fields(cls)]:
        for wrong in misspellings(name):
            with pytest.raises(ConfigError) as caught:
                check.dataclass(cls, {wrong: 1}, ("s",))
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
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["ddp", "${a", "???", "fp16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("name"), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One home for all examples of a property."""
    home = write(tmp_path_factory.mktemp("home"), {**HOME, "p.yaml": PROJECT})
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from isolate(monkeypatch, home)


@settings(deadline=None)
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
        assert "\n" not in str(error)
        assert str(error).startswith("config: ")
    else:
        assert Config.from_plain(config.plain) == config


# ---- types


@dataclass
class Inner:
    value: int = 0


@dataclass
class Everything:
    """One field of every type that the checker understands."""

    flag: bool = False
    number: int = 0
    real: float = 0.0
    text: str = ""
    nothing: None = None
    anything: Any = None
    path: Path = Path(".")
    choice: Literal["a", 1, True] = "a"
    either: int | str | None = None
    items: list[int] = field(default_factory=list)
    loose: list = field(default_factory=list)
    pair: tuple[int, str] = (0, "")
    several: tuple[float, ...] = ()
    mapping: dict[str, list[int]] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    inners: list[Inner] = field(default_factory=list)
    maybe: Inner | None = None
    noted: Annotated[int, "a note"] = 0


CHECK = Checker(lambda key: f"f: {'.'.join(key)}")
NUMBERS = st.floats(allow_nan=False)


@given(
    st.builds(
        Everything,
        flag=st.booleans(),
        number=st.integers(),
        real=NUMBERS,
        text=st.text(),
        path=st.sampled_from([Path("a/b"), Path("/x")]),
        choice=st.sampled_from(["a", 1, True]),
        either=st.none() | st.integers() | st.text(),
        items=st.lists(st.integers()),
        loose=st.lists(st.booleans()),
        pair=st.tuples(st.integers(), st.text()),
        several=st.lists(NUMBERS).map(tuple),
        mapping=st.dictionaries(st.text(), st.lists(st.integers())),
        inner=st.builds(Inner, st.integers()),
        inners=st.lists(st.builds(Inner, st.integers())),
        maybe=st.none() | st.builds(Inner, st.integers()),
        noted=st.integers(),
    )
)
def test_typed_values_survive_being_made_plain(value: Everything) -> None:
    assert CHECK.dataclass(Everything, to_plain(value), ()) == value


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("flag", 1, "flag: expected true or false, got 1"),
        ("number", True, "number: expected a whole number, got true"),
        ("number", 1.0, "number: expected a whole number, got 1.0"),
        ("real", "1", "real: expected a number, got the text '1'"),
        ("text", None, "text: expected text, got null"),
        ("nothing", 0, "nothing: expected null, got 0"),
        ("choice", False, "choice: expected one of a, 1, True, got false"),
        ("either", 1.5, "either: expected a whole number or text or null, got 1.5"),
        ("items", [1, "x"], "items.1: expected a whole number, got the text 'x'"),
        ("loose", {}, "loose: expected a list, got an empty mapping"),
        ("pair", [1], "pair: expected a list of 2 values (a whole number, text), got 1 values"),
        ("several", [1, None], "several.1: expected a number, got null"),
        ("mapping", {"a": 1}, "mapping.a: expected a list of a whole number, got 1"),
        ("inner", None, "inner: expected a mapping, got null"),
        ("inners", [{"vlue": 1}], "inners.0.vlue: unknown key; did you mean inners.0.value?"),
        ("maybe", {"value": "x"}, "maybe.value: expected a whole number, got the text 'x'"),
        ("maybe", 3, "maybe: expected a mapping or null, got 3"),
        ("noted", "x", "noted: expected a whole number, got the text 'x'"),
    ],
)
def test_a_value_of_the_wrong_type_gets_one_sentence(key: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CHECK.dataclass(Everything, {key: value}, ())
    assert str(caught.value) == f"f: {sentence}"


def test_an_option_error_raised_outside_a_file_still_names_its_field() -> None:
    with pytest.raises(OptionError, match=r"^log_interval: expected at least 1, got 0$"):
        RunOptions(output_dir="o", max_iters=1, micro_batch_size=1, log_interval=0)


# ---- batch arithmetic


def batch(dp_size: int, **given: int | None) -> BatchPlan:
    return plan_batch(RunOptions(output_dir="o", max_iters=1, **given), dp_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "dp_size", "plan"),
    [
        ({"global_batch_size": 64, "micro_batch_size": 4}, 8, (64, 4, 2)),
        ({"global_batch_size": 64, "accum_grad_iters": 2}, 8, (64, 4, 2)),
        ({"micro_batch_size": 4, "accum_grad_iters": 2}, 8, (64, 4, 2)),
        ({"global_batch_size": 64, "micro_batch_size": 4, "accum_grad_iters": 2}, 8, (64, 4, 2)),
        ({"global_batch_size": 64}, 8, (64, 8, 1)),
        ({"micro_batch_size": 4}, 8, (32, 4, 1)),
        ({"accum_grad_iters": 2}, 8, (16, 1, 2)),
    ],
)
def test_what_is_not_given_follows(given: dict[str, int], dp_size: int, plan: tuple[int, int, int]) -> None:
    assert batch(dp_size, **given) == BatchPlan(*plan, dp_size)


@pytest.mark.parametrize(
    ("given", "dp_size", "sentence"),
    [
        (
            {"global_batch_size": 10, "micro_batch_size": 4},
            1,
            "run.global_batch_size: 10 is not a multiple of 4 (4 micro_batch_size x 1 data-parallel ranks); "
            "the nearest valid global_batch_size is 8",
        ),
        (
            {"global_batch_size": 15, "micro_batch_size": 4},
            2,
            "run.global_batch_size: 15 is not a multiple of 8 (4 micro_batch_size x 2 data-parallel ranks); "
            "the nearest valid global_batch_size is 16",
        ),
        (
            {"global_batch_size": 3},
            8,
            "run.global_batch_size: 3 is not a multiple of 8 (1 accum_grad_iters x 8 data-parallel ranks); "
            "the nearest valid global_batch_size is 8",
        ),
        (
            {"global_batch_size": 64, "micro_batch_size": 4, "accum_grad_iters": 4},
            8,
            "run.global_batch_size: 64 is not 128 (4 micro_batch_size x 4 accum_grad_iters x 8 data-parallel ranks); "
            "the nearest valid global_batch_size is 128",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_explained(given: dict[str, int], dp_size: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batch(dp_size, **given)
    assert str(caught.value) == sentence


SIZES = st.none() | st.integers(1, 64)


@given(SIZES, SIZES, SIZES, st.integers(1, 16))
def test_a_plan_adds_up_and_a_refusal_names_a_size_that_works(
    total: int | None, micro: int | None, accumulation: int | None, dp_size: int
) -> None:
    sizes = {"global_batch_size": total, "micro_batch_size": micro, "accum_grad_iters": accumulation}
    if not any(sizes.values()):
        return
    try:
        plan = batch(dp_size, **sizes)
    except ConfigError as error:
        nearest = int(str(error).rsplit(" ", 1)[1])
        assert nearest != total
        plan = batch(dp_size, **{**sizes, "global_batch_size": nearest})
        assert plan.global_batch == nearest
    else:
        assert total in (None, plan.global_batch)
    assert plan.global_batch == plan.micro_batch * plan.accumulation * dp_size
    assert micro in (None, plan.micro_batch)
    assert accumulation in (None, plan.accumulation)
