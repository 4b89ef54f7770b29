"""Plans of the megatron runner: from YAML alone, and what is wrong with them or with a layout."""

from __future__ import annotations

from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.plan.estimate import Project
from crosstrain_plugins.builtin.commands.plan.plan import Budget, make_plan

from conftest import Workspace
from crosstrain.config.load import Config, load_config
from crosstrain.config.registry import registry
from crosstrain.training.preflight import dry_run, preflight
from crosstrain.utils.errors import ConfigError
from fixtures_families import tiny
from fixtures_ranks import train
from fixtures_training import COMMON, TOLERANCE, assert_equal_training, compare, follow, project

NEO = {
    "arch": "causal_lm",
    "config": {
        "model_type": "gpt_neo", "vocab_size": 320, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]], "window_size": 8,
        "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.05,
        "bos_token_id": 0, "eos_token_id": 0,
    },
}  # fmt: skip
NEO_PLAN = {
    "transformer.wte": "vocabulary",
    "transformer.h.*.attn.attention.?_proj": "column",
    "transformer.h.*.attn.attention.num_heads": "divide",
    "transformer.h.*.attn.attention.out_proj": "row",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
}


@pytest.mark.slow
def test_a_model_that_nobody_knows_is_cut_by_a_plan_in_yaml_alone(workspace: Workspace) -> None:
    options = (*COMMON, "run.init_lr=5e-3", "run.grad_norm_clip=0.3")
    one = follow(project(workspace, NEO), "ddp@1", *options)
    assert one.column("loss")[-1] < 0.8 * one.column("loss")[0]
    two = {"name": "megatron", "tensor_parallel": 2, "plan": NEO_PLAN}
    project(workspace, NEO, two)
    # `follow` names the runner, under which the project's options for it stand.
    assert_equal_training(one, follow(workspace, "megatron@2", *options), TOLERANCE)


PLAN = "run.runner.plan="
NO_PLAN = "model={arch: causal_lm, config: {model_type: gpt_neo, num_layers: 2, attention_types: [[[global], 2]]}}"
MISTAKES = {
    PLAN + "{'transformer.h.*.nothing': row}": "'transformer.h.*.nothing' matches no parameter; similar names: ",
    PLAN + "{'transformer.h.*.attn.nothing': divide}": "'transformer.h.*.attn.nothing' matches no parameter",
    PLAN + "{'transformer.h.*.mlp.c_fc': sideways}": "unknown style 'sideways'; known: column, fused_qkv, row",
    PLAN + "{'transformer.ln_f': column}": "transformer.ln_f.weight belongs to a LayerNorm, but the style",
    PLAN + "{transformer.wpe: row}": "transformer.wpe.weight belongs to a Embedding, but the style row",
    PLAN + "{'transformer.h.*.attn.layer_idx': divide}": (
        "run.runner.tensor_parallel: transformer.h.1.attn.layer_idx, which is 1, cannot be divided by 2 ranks; the "
        "model allows 1"
    ),
    "model.n_head=1": (
        "run.runner.tensor_parallel: transformer.h.0.attn.c_attn.weight of shape [32, 96] cannot be cut fused_qkv-wise "
        "for 2 ranks, because the output features of each of its three parts are 1 x 32; the model allows 1"
    ),
    "run.runner={name: megatron, tensor_parallel: 4}": "are 2 x 16; the model allows 1, 2",
    NO_PLAN: "gpt_neo has no plan for sharding its parameters; write one under run.runner.plan (see Plans in docs/",
    "run.runner={name: megatron, pipeline_parallel: 4}": "pipeline_parallel: 4 stages are too many for 2 blocks",
    "run.runner={name: megatron, pipeline_parallel: 2, pipeline_layers: [2, 1]}": "[2, 1] are 3 blocks, but the model",
    "run.compile=model": "run.compile: the megatron runner communicates between blocks; use blocks",
}


@pytest.mark.parametrize("option", MISTAKES)
def test_what_a_model_cannot_is_said_before_any_worker_starts(workspace: Workspace, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(str(workspace.project), ("run.runner=megatron_tp2", option)), 4)
    assert MISTAKES[option] in str(caught.value)


def test_the_degrees_that_are_offered_divide_all_that_is_cut(workspace: Workspace) -> None:
    """Queries have eight heads, keys and values two, and the vocabulary is padded for any number of ranks."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 320}
    project(workspace, {"arch": "qwen", **sizes, "num_attention_heads": 8, "num_key_value_heads": 2})
    four = "run.runner={name: megatron, tensor_parallel: 4}"
    with pytest.raises(ConfigError, match=r"self_attn.k_proj.weight of shape \[8, 32\].* are 2 x 4; .* allows 1, 2$"):
        preflight(load_config(str(workspace.project), (four,)), 4)


@pytest.mark.slow
def test_nobody_starts_workers_for_a_layout_that_cannot_be(workspace: Workspace) -> None:
    run = workspace.train("out", "run.runner=megatron_tp4", nproc=4, fails=True)
    assert run.code == 1
    assert run.err.count("\n") == 1
    assert "the model allows 1, 2" in run.err
    train(workspace.project, "plain", "run.max_iters=1")
    said = workspace.evaluate("--checkpoint", "plain", "--nproc-per-node", "4", "--options", "run.runner=megatron_tp4")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "the model allows 1, 2" in said.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel": 3}, "needs a multiple of 3 ranks, but there are 4"),
        ({"pipeline_parallel": 2, "data_parallel": 4}, "needs 8 ranks, but there are 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_said_before_any_worker_starts(options: Any, sentence: str) -> None:
    runner = registry.get("runner", "megatron")
    with pytest.raises(ConfigError, match=sentence):
        runner.data_parallel_size(runner.Options(**options), 4)
    assert runner.data_parallel_size(runner.Options(tensor_parallel=2), 4) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("{sequence_parallel: true}", "run.runner.sequence_parallel: needs tensor_parallel above 1"),
        ("{pipeline_parallel: 2, pipeline_layers: [1, 1, 1]}", "expected the number of blocks of each of the 2 stages"),
        ("{offload: cpu, data_parallel_style: zero1}", "cpu needs data_parallel_style fsdp; zero1 keeps parameters"),
        ("{tensor_parallel: 0}", "run.runner.tensor_parallel: expected a whole number of at least 1, got 0"),
    ],
)
def test_options_that_exclude_each_other_are_said(workspace: Workspace, options: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(workspace.project, [f"run.runner={options}", "run.runner.name=megatron"])
    assert sentence in str(caught.value)


OPT = {
    "arch": "causal_lm",
    "config": {
        "model_type": "opt", "vocab_size": 320, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0,
    },
}  # fmt: skip
GPTJ = {
    "arch": "causal_lm",
    "config": {
        "model_type": "gptj", "vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "rotary_dim": 4,
    },
}  # fmt: skip
GPTJ_PLAN = {
    "transformer.wte": "vocabulary",
    "transformer.h.*.attn.?_proj": "column",
    "transformer.h.*.attn.out_proj": "row",
    "transformer.h.*.mlp.fc_in": "column",
    "transformer.h.*.mlp.fc_out": "row",
}


def test_a_plan_that_cannot_compute_is_refused_before_any_worker_starts(
    workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = {"name": "megatron", "tensor_parallel": 2, "plan": GPTJ_PLAN}
    project(workspace, GPTJ, runner)

    def check(config: Config) -> None:
        ready = preflight(config, 2)
        Project(config, ready.model, ready.sample).check_layouts(ready.plan, 2)

    def plan(config: Config) -> None:
        ready = dry_run(config, 2)
        make_plan(Project(config, ready.model, ready.sample), Budget(), 2, {})

    heads = {"transformer.h.*.attn.num_attention_heads": "divide"}
    cannot = r"the forward fails when the model is split across ranks \(.*\); is something mi"
    for wrong, said in (
        (GPTJ_PLAN, "a part of the heads; add transformer.h.*.attn.num_attention_heads: divide"),
        (GPTJ_PLAN | heads | {"transformer.h.*.mlp.fc_out": "replicated"}, cannot),
    ):
        runner["plan"] = wrong
        project(workspace, GPTJ, runner)
        for refuse in (check, plan):
            with pytest.raises(ConfigError, match=said):
                refuse(load_config(str(workspace.project)))
    assert "Traceback" not in capfd.readouterr().err
    runner["plan"] = GPTJ_PLAN | heads
    check(load_config(str(project(workspace, GPTJ, runner).project)))


def test_a_plan_that_computes_something_else_is_refused(workspace: Workspace) -> None:
    plan = {"model.decoder.layers.*.self_attn.?_proj": "column", "model.decoder.layers.*.self_attn.out_proj": "row"}
    project(workspace, OPT, {"name": "megatron", "tensor_parallel": 2, "plan": plan})
    with pytest.raises(ConfigError, match=r"add model\.decoder\.layers\.\*\.self_attn\.num_heads: divide"):
        preflight(load_config(str(workspace.project)), 2)


@pytest.mark.slow
def test_a_contestant_that_cannot_run_does_not_end_the_others(workspace: Workspace) -> None:
    done = compare(project(workspace, OPT), "ddp@1", "megatron_tp2@2", "ddp@2")
    assert done.returncode == 1
    assert "megatron_tp2@2: failed: run.runner.tensor_parallel: opt has no plan for sharding" in done.stdout
    assert "error: 1 of 2 failed: megatron_tp2@2" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "phi", "cohere"])
def test_heads_and_initial_values_are_the_same_under_every_runner(workspace: Workspace, family: str) -> None:
    """A softcap and a scaled embedding, which ranks hold whole with the tied head; a bias; a scale; norms from zero."""
    model = {"arch": "causal_lm", "config": tiny(family) | {"vocab_size": 320, "num_hidden_layers": 2}}
    two = ["ddp", "zero2", "zero3", "fsdp", "megatron_tp2", "megatron_tp2_sp", "megatron_pp2"]
    done = compare(project(workspace, model), "ddp@1", *(f"{runner}@2" for runner in two))
    assert done.stdout.count("trains alike") == len(two), done.stdout + done.stderr
