"""The configuration: what users write and what comes out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.config.load import Config, load_config
from crosstrain.config.run_options import AmpOptions, RunOptions
from crosstrain.config.schema import Component, NoOptions
from crosstrain.config.sources import Layer, escape, resolve
from crosstrain.utils.errors import ConfigError, UserError
from fixtures_config import configured_home, edit, load, mistake, mistakes
from fixtures_plugins import forget_plugins, plugin, write


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    yield from configured_home(monkeypatch, tmp_path)


# ---- what comes out


def test_a_project_file_becomes_typed_options(home: Path) -> None:
    config = load()
    assert config.model.name == "net"
    assert config.model_type == "small"
    assert vars(config.model.options) == {
        "width": 8,
        "depth": 2,
        "dropout": 0.1,
        "activation": "gelu",
        "plan": {"qkv": "column"},
    }
    data = config.datasets["webtext"].options
    assert data.path == Path("data/webtext")
    assert data.split == (949, 50, 1)
    assert (data.prepare.input, data.prepare.vocabulary) == ("stdlib", None)
    assert (data.resize.name, data.resize.options.size) == ("crop", 4)
    runner = config.run.runner
    assert (runner.name, runner.options.stage, runner.options.offload) == ("shard", 2, False)
    assert config.run.optimizer.options.betas == (0.9, 0.95)
    assert config.run.lr_sched == Component("cosine", NoOptions())
    assert config.run.init_lr == 1.5e-4
    assert config.run.amp == AmpOptions(dtype="fp16")


def test_the_shortest_project_takes_every_default(home: Path) -> None:
    run = "run: {output_dir: o, max_epoch: 1, micro_batch_size: 2}"
    write(home, {"p.yaml": f"model: {{arch: other_net}}\ndatasets: {{x: images}}\n{run}\n"})
    config = load()
    expected = RunOptions(output_dir="o", max_epoch=1, micro_batch_size=2)
    for f in fields(RunOptions):
        if f.name not in ("runner", "optimizer", "lr_sched", "trackers"):
            assert getattr(config.run, f.name) == getattr(expected, f.name), f.name
    assert [config.run.runner.name, config.run.optimizer.name, config.run.lr_sched.name] == ["ddp", "adamw", "cosine"]
    assert config.run.optimizer.options.betas == (0.9, 0.999)
    assert (config.model_type, config.model.options.layers) == (None, 1)


def test_whole_numbers_do_for_floats_and_become_floats(home: Path) -> None:
    value = load("run.grad_norm_clip=1", "run.init_lr=1").run.grad_norm_clip
    assert type(value) is float


def test_interpolation_sees_other_layers_and_defaults(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "elsewhere")
    edit(
        home,
        "output_dir: output/x",
        "output_dir: ${oc.env:WHERE}/${model.model_type}_${model.width}_${run.seed}",
    )
    config = load("run.warmup_steps=null", "datasets.webtext.seq_length=${run.sample_tokens}", "model.width=16")
    assert config.run.output_dir == "elsewhere/small_16_1234"
    assert config.datasets["webtext"].options.seq_length == 64


def test_names_may_be_interpolated(home: Path) -> None:
    edit(home, "runner: {name: shard, stage: 2}", "runner: ${oc.env:NO_SUCH_VARIABLE,shard2}")
    assert load().run.runner.options.stage == 2


SIDE_BY_SIDE = {
    "configs/datasets/side_by_side.yaml": "name: both",
    "plugins/both.py": """
from dataclasses import dataclass
from crosstrain import registry

@registry.register_dataset("both")
class Both:
    @dataclass
    class Options:
        parts: list[dict[str, object]]
""",
}


def test_datasets_side_by_side_are_the_parts_of_one(home: Path) -> None:
    write(home, SIDE_BY_SIDE)
    edit(home, "run:\n", "  again: {name: images, sample_ratio: 3.0}\nrun:\n")
    (label,) = load().datasets
    first, second = load().datasets[label].options.parts
    assert label == "webtext+again"
    assert (first["dataset"]["name"], first["ratio"]) == ("lines", None)
    assert second == {"label": "again", "dataset": {"name": "images", "folder": "."}, "ratio": 3.0}
    assert Config.from_plain(load().plain).plain == load().plain
    assert "datasets.again.foldr: unknown key" in mistake("datasets.again.foldr=x")
    with pytest.raises(ConfigError, match=r"did you mean datasets\.webtext\+again\.parts\.1\.dataset\?"):
        Config.from_plain(load().plain, ["datasets.again.folder=x"])
    moved = Config.from_plain(load().plain, [f"datasets.{label}.parts.1.dataset.folder=x"])
    assert [part["dataset"].get("folder") for part in moved.datasets[label].options.parts] == [None, "x"]


def test_one_dataset_may_be_a_copy_of_another(home: Path) -> None:
    write(home, SIDE_BY_SIDE)
    edit(home, "run:\n", "  again: ${datasets.webtext}\nrun:\n")
    first, second = load().datasets["webtext+again"].options.parts
    assert first | {"label": "again"} == second


def test_yaml_anchors_and_merge_keys_work(home: Path) -> None:
    write(home, SIDE_BY_SIDE)
    edit(home, "run:\n", "  again: {<<: *it, seq_length: 32}\nrun:\n")
    text = (home / "p.yaml").read_text().replace("webtext:\n", "webtext: &it\n")
    write(home, {"p.yaml": text})
    assert load().datasets["webtext+again"].options.parts[1]["dataset"]["seq_length"] == 32
    write(home, {"p.yaml": text.replace("path:", "pth:")})
    assert mistakes() == [
        f"p.yaml:8: datasets.{label}.pth: unknown key; did you mean datasets.{label}.path?"
        for label in ("again", "webtext")
    ]


def test_amp_may_be_true_or_false(home: Path) -> None:
    assert load("run.amp=true").run.amp.dtype == "fp16"
    assert load("run.amp=true", "run.amp.window=500").run.amp == AmpOptions(dtype="fp16", window=500)
    edit(home, "amp: fp16", "amp: false")
    assert load().run.amp.dtype == "fp32"


def test_a_component_inside_another_may_be_a_preset(home: Path) -> None:
    write(home, {"configs/processors/wide.yaml": "name: crop\nsize: 9", "configs/processors/wider.yaml": "name: wide"})
    assert load("datasets.webtext.resize=wide").datasets["webtext"].options.resize.options.size == 9
    resize = load("datasets.webtext.resize={name: wider, size: 11}").datasets["webtext"].options.resize
    assert (resize.name, resize.options.size) == ("crop", 11)


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


def test_an_option_reaches_an_element_of_a_list(home: Path) -> None:
    config = load("datasets.webtext.split.1=3", "datasets.webtext.tags=[a, b]", "datasets.webtext.tags[0]=c")
    assert config.datasets["webtext"].options.split == (949, 3, 1)
    assert config.datasets["webtext"].options.tags == ["c", "b"]
    assert "datasets.webtext.split: expected " in mistake("datasets.webtext.split.3=3")


def test_the_later_option_counts(home: Path) -> None:
    assert load("run.seed=1", "run.seed=2").run.seed == 2


@pytest.mark.parametrize(
    "options", [["run.runner=shard", "run.runner.stage=3"], ["run.runner.stage=3", "run.runner=shard"]]
)
def test_options_for_one_component_combine_in_either_order(home: Path, options: list[str]) -> None:
    edit(home, "runner: {name: shard, stage: 2}", "runner: ddp")
    assert load(*options).run.runner.options.stage == 3


def test_another_name_drops_the_options_meant_for_the_old_one(home: Path) -> None:
    assert load("run.runner=ddp").run.runner == Component("ddp", NoOptions())
    assert load("run.runner.name=ddp").run.runner == Component("ddp", NoOptions())
    assert load("run.optimizer=sgd").run.optimizer.options.momentum == 0.0
    assert load("datasets.webtext.name=images").datasets["webtext"].options.folder == "."
    assert load("model.arch=other_net").model_type is None


def test_the_same_name_again_keeps_the_options(home: Path) -> None:
    assert load("run.runner=shard").run.runner.options.stage == 2
    assert load("run.optimizer={name: adamw, eps: 1e-6}").run.optimizer.options.betas == (0.9, 0.95)


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
    runner = load("run.runner=shard2").run.runner
    assert (runner.name, runner.options.stage) == ("shard", 2)


def test_explicit_keys_win_over_a_preset(home: Path) -> None:
    assert load("run.runner=shard2", "run.runner.stage=3").run.runner.options.stage == 3
    edit(home, "runner: {name: shard, stage: 2}", "runner: {name: shard2, stage: 3}")
    assert load().run.runner.options.stage == 3


def test_a_preset_may_build_on_another(home: Path) -> None:
    options = load("run.runner=shard2_offload").run.runner.options
    assert (options.stage, options.offload) == (2, True)


def test_a_dataset_may_be_a_preset(home: Path) -> None:
    data = load("datasets.webtext=books").datasets["webtext"]
    assert (data.name, data.options.path, data.options.seq_length) == ("lines", Path("data/books"), 128)


# ---- plain and back


def test_plain_spells_everything_out_and_reads_back(home: Path) -> None:
    for options in [
        [],
        ["run.runner=shard2_offload"],
        ["model.arch=other_net", "run.amp=bf16", "run.keep_last=null"],
    ]:
        config = load(*options)
        plain = yaml.safe_load(yaml.safe_dump(config.plain))
        assert plain == config.plain
        assert Config.from_plain(plain) == config
        assert Config.from_plain(plain).plain == plain


@settings(deadline=None, max_examples=30)
@given(prompt=st.text("a$\\{}: "), name=st.sampled_from(["", "${run.seed}"]))
def test_text_that_looks_like_an_interpolation_survives(prompt: str, name: str) -> None:
    text = f"{prompt}{name}{prompt}"
    tree = {"run": {"seed": 3, "prompt": escape(text)}}
    assert resolve(tree, [Layer("f", tree)])["run"]["prompt"] == text


def test_an_escaped_interpolation_is_text_for_ever(home: Path) -> None:
    edit(home, "amp: fp16", r"sample_prompts: ['echo \${HOME}']")
    config = load()
    assert config.run.sample_prompts == ["echo ${HOME}"]
    assert Config.from_plain(config.plain) == config


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
    assert (config.run.runner.name, config.run.runner.options.stage, config.run.seed) == ("shard", 2, 5)
    with pytest.raises(ConfigError, match=r"^--options: model\.model_type: cannot be changed, because config contains"):
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
    assert config.run.runner.name == "mine"
    forget_plugins()
    assert Config.from_plain(config.plain).plain == config.plain


def test_plugins_beside_the_project_are_proposed(home: Path) -> None:
    project = "model: {}\ndatasets: {x: {}}\nrun: {plugins: [mine.py]}"
    write(home, {"projects/deep/p.yaml": project, "projects/deep/mine.py": ""})
    with pytest.raises(
        ConfigError, match=r"plugins\.0: mine\.py: paths are relative to .* mean projects/deep/mine\.py\?"
    ):
        load_config("projects/deep/p.yaml")


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
        (
            "Options = dataclass(type('Options', (), {'__annotations__': {'name': str}}))",
            "a field called name",
        ),
        (
            "Options = dataclass(type('Options', (), {'__annotations__': {'x': 'Nowhere'}}))",
            "name 'Nowhere' is not",
        ),
    ],
)
def test_options_that_no_one_could_set_are_the_plugins_fault(home: Path, body: str, reason: str) -> None:
    write(home, {"plugins/odd.py": plugin("runner", "odd", body, before="from dataclasses import dataclass")})
    message = mistake("run.runner=odd")
    assert message.startswith("--options: run.runner: Options of crosstrain_plugins.builtin.odd.Component")
    assert reason in message
