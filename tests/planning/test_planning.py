"""What a plan says before anything starts: the numbers of published sizes, layouts, refusals; and that it is fast."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from crosstrain_plugins.builtin.commands.plan import memory_trace
from crosstrain_plugins.builtin.commands.plan.estimate import HOST_COPY
from crosstrain_plugins.builtin.commands.units import read_bytes, read_number

import crosstrain
from conftest import ROOT
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.engine.build import make_model
from crosstrain.modeling.meta_init import parameters_on_meta
from fixtures_ranks import mostly_slow

GIB, MIB = 1 << 30, 1 << 20
PRECISION = ("precision", "weights")
SMALL = ["model.n_layer=2", "model.n_embd=128", "model.n_head=4", "model.vocab_size=1000"]


def planned(tmp_path: Path, project: str, *arguments: str) -> dict[str, Any]:
    out, file = tmp_path / "plan.json", str(ROOT / "projects" / f"{project}.yaml")
    assert main(["plan", "--cfg-path", file, "--output", str(out), *arguments]) == 0
    return json.loads(out.read_text())


@pytest.mark.slow
def test_gpt2_345m_on_two_tensor_parallel_ranks_has_the_known_numbers(tmp_path: Path) -> None:
    plan = planned(tmp_path, "gpt2_345m_tp2", "--world-size", "2", "--no-presets")
    assert plan["parameters"]["without_padding"] == 354_823_168
    assert plan["parameters"]["total"] == 355_002_368  # 50,257 rows padded to a multiple of 128 x 2
    assert plan["parameters"]["per_rank"] == 178_100_224
    # Weight and two moments, in fp32.
    device = plan["memory"]["device"]
    assert device["parameters"] == 4 * 178_100_224
    assert device["optimizer"] == 8 * 178_100_224
    assert plan["gradient_checkpointing"]["none"]["device_total"] > plan["memory"]["device_total"]
    # Each of 24 blocks sums [8, 1024, 1024] four times, in two bytes or four; a ring of two ranks sends all of it.
    assert plan["bytes_sent_per_step_by_a_rank"] >= 24 * 4 * 8 * 1024 * 1024 * 2


@pytest.mark.slow
def test_the_token_budget_of_125m_takes_4769_steps(tmp_path: Path) -> None:
    plan = planned(tmp_path, "gpt3_125m", "--tokens", "2.5B", "--tokens-per-second", "100e3", "--no-presets")
    assert (plan["tokens_per_step"], plan["steps"]) == (524_288, 4_769)
    assert plan["days"] == pytest.approx(4_769 * 524_288 / 100e3 / 86_400)


PROJECTS = sorted((ROOT / "projects").glob("*.yaml"))
QUICK = [path for path in PROJECTS if path.stem == "gpt2_345m_tp2"]
FROZEN = [["vision"], [], ["language_model"], ["vision", "qformer", "language_model"]]


@pytest.mark.parametrize("path", mostly_slow(PROJECTS, QUICK), ids=lambda path: path.stem)
def test_every_project_has_a_plan(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = load_config(path).run.runner.options
    sizes = [getattr(runner, f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "expert")]
    ranks = sizes[0] * sizes[1] * sizes[2]
    assert main(["plan", "--cfg-path", str(path), "--no-presets", "--world-size", str(ranks)]) == 0
    out = capsys.readouterr().out
    assert "memory of the fullest rank" in out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_finds_what_training_would_and_writes_nothing(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--cfg-path", str(project), "--dry-run", "--world-size", "8", "--options"]
    command += ["run.accum_grad_iters=1", "run.global_batch_size=null"]
    before = sorted(tmp_path.rglob("*"))
    assert main(command) == 0
    none, there, prepare = str(tmp_path / "none"), str(tmp_path), "datasets.t.prepare={train_tokenizer: 300, input: "
    wrong = [
        (["run.output_dir=/proc/x"], "run.output_dir: /proc/x cannot be written to"),
        ([f"run.output_dir={project}/x"], "cannot be written to"),
        ([f"datasets.t.path={none}"], "crosstrain prepare"),
        ([f"datasets.t.path={none}", f"{prepare}{none}}}"], f"the input {none} does not exist"),
        ([f"datasets.t.vocab_file={none}", f"datasets.t.merge_file={none}"], none),
        (["datasets.t.split=[1,0,0]", "run.eval_interval=1"], "the val split of"),
    ]
    for options, sentence in wrong:
        capsys.readouterr()
        assert main([*command, *options]) == 1
        assert sentence in capsys.readouterr().err
    makes = [f"datasets.t.path={none}", f"{prepare}{there}/text}}"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words")
    assert main([*command, *makes]) == 0
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "text", tmp_path / "text" / "a.txt"])


def test_a_mode_that_the_runner_refuses_is_impossible(tmp_path: Path) -> None:
    options = ["--options", "run.runner=zero3", *SMALL]
    plan = planned(tmp_path, "gpt2_345m", "--world-size", "1", "--no-presets", *options)
    modes = plan["gradient_checkpointing"]
    assert "selective and ZeRO stage 3 exclude each other" in modes["selective"]["impossible"]
    assert modes["full"] == plan["memory"]


@pytest.mark.slow
def test_other_runners_are_in_the_order_of_what_they_cost(project: Path) -> None:
    made = crosstrain.plan(project, ["run.global_batch_size=32"], world_size=2, device_memory="30MiB")
    rows, _, refused = str(made).partition("other runners")[2].partition("sorted by fit")
    possible = [made.presets[row[:37].strip()] for row in rows.splitlines()[1:-1]]
    assert len(possible) == sum(not isinstance(e, str) for e in made.presets.values())
    names = re.sub(r"\s+", " ", refused.partition("says why): ")[2].partition("\n\n")[0]).split(", ")
    assert names == list(dict.fromkeys(n.split()[0] for n, e in made.presets.items() if isinstance(e, str)))
    reached = [(not made.fits(e), bool(e.memory.host.keys() - {HOST_COPY}), e.sent) for e in possible]
    assert reached == sorted(reached)
    assert {wrong for wrong, _, _ in reached} == {False, True}


@pytest.mark.slow
def test_the_175b_plan_of_1024_ranks_takes_seconds(tmp_path: Path) -> None:
    plan = planned(tmp_path, "gpt3_175b", "--world-size", "1024", "--options", "run.device=cuda")
    assert plan["batch"]["dp_size"] == 8
    assert plan["memory"]["rank"] == "stage 1 of 16"
    assert 174e9 < plan["parameters"]["total"] < 176e9


@pytest.fixture
def project(tmp_path: Path, dataset: Path) -> Path:
    file = tmp_path / "project.yaml"
    model = {"arch": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 64}
    run = {"output_dir": str(tmp_path / "run"), "max_iters": 2, "global_batch_size": 16, "micro_batch_size": 16}
    data = {"t": {"name": "text", "path": str(dataset), "seq_length": 64}}
    file.write_text(yaml.safe_dump({"model": model, "datasets": data, "run": run | {"device": "cpu"}}))
    return file


def test_a_run_that_cannot_fit_is_refused_before_it_starts(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--cfg-path", str(project), "--device-memory", "30MiB"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "a rank needs" in error
    assert "its device has 30.0 MiB" in error
    assert "cheapest change that fits and leaves a tenth free: run.micro_batch_size=" in error  # the nearest change
    assert not (tmp_path / "run").exists()
    assert main([*command, "--no-fit-check"]) == 0
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.slow
def test_the_advice_fits_when_it_is_taken(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = ["plan", "--cfg-path", str(project), "--device-memory", "30MiB", "--output", str(out)]
    assert main(command) == 0
    advice = json.loads(out.read_text())["advice"]
    assert advice["fits"]
    assert main([*command, "--options", *advice["settings"]]) == 0
    plan = json.loads(out.read_text())
    assert plan["memory"]["fits"]
    assert plan["advice"] is None


def advised(tmp_path: Path, *command: str) -> tuple[list[str], bool]:
    """The advice of a plan, which fits into nine tenths when it is taken, if it says so."""
    out = tmp_path / "advice.json"
    assert main(["plan", *command, "--output", str(out)]) == 0
    advice = json.loads(out.read_text())["advice"]
    options = command[command.index("--options") + 1 :]
    rest = command[: command.index("--options")]
    assert main(["plan", *rest, "--output", str(out), "--options", *options, *advice["settings"]]) == 0
    taken = json.loads(out.read_text())
    assert taken["memory"]["device_total"] == advice["needs"]
    assert taken["memory"]["fits"] == advice["fits"] == (advice["needs"] <= 0.9 * read_bytes(command[3], "x"))
    return advice["settings"], advice["fits"]


@pytest.mark.slow
def test_an_option_by_which_a_runner_saves_memory_is_advised(project: Path, tmp_path: Path) -> None:
    options = ["run.device=cuda", "run.micro_batch_size=1", "run.global_batch_size=16", "model.n_embd=256"]
    options += ["model.n_layer=3", "model.n_head=1"]  # which cannot be cut over ranks
    plan = ["--cfg-path", str(project), "--device-memory", "26MiB", "--world-size", "8", "--options", *options]
    assert advised(tmp_path, *plan) == (["run.runner=fsdp", "run.runner.sync_each_micro_batch=true"], True)


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "more"), [("34MiB", []), ("15MiB", ["run.micro_batch_size=4"])])
def test_frozen_weights_in_half_precision_come_first_and_then_what_costs_speed(
    memory: str, more: list[str], tmp_path: Path
) -> None:
    file = str(ROOT / "projects" / "blip2_qwen_shapes.yaml")
    frozen = [f"model.{part}.freeze=true" for part in ("vision", "qformer", "language_model")]
    options = ["--options", "run.device=cuda", "run.amp=bf16", "datasets.shapes.max_length=64", *frozen]
    plan = ["--cfg-path", file, "--device-memory", memory, "--world-size", "2", "--no-presets"]
    light = [f"model.{part}.{key}=bf16" for part in ("vision", "qformer", "language_model") for key in PRECISION]
    assert advised(tmp_path, *plan, *options) == ([*light, *more], True)


@pytest.mark.slow
def test_adapters_are_advised_last_and_to_pretrained_models_alone(tmp_path: Path) -> None:
    file = str(ROOT / "projects" / "gpt2_345m.yaml")
    options = ["--options", "run.device=cuda", "run.micro_batch_size=1", *SMALL]
    plan = ["--cfg-path", file, "--device-memory", "20MiB", "--world-size", "1", "--no-presets"]
    settings, fits = advised(tmp_path, *plan, *options)
    assert not fits
    assert not any("adapter" in setting for setting in settings)
    settings, fits = advised(tmp_path, *plan, *options, "model.pretrained=no/such/model")
    assert fits
    assert settings[0].startswith("model.adapter=")


def test_ranks_that_a_layout_lacks_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cfg-path", str(ROOT / "projects" / "gpt3_175b.yaml"), "--options", "run.device=cpu"]) == 1
    said = capsys.readouterr().err
    assert "needs a multiple of 128 ranks, but there are 1; --world-size 128 plans for 128 ranks" in said
    train = ["train", "--cfg-path", str(ROOT / "projects" / "gpt2_345m_tp2.yaml"), "--options", "run.device=cpu"]
    assert main(train) == 1
    said = capsys.readouterr().err
    assert "tensor_parallel 2 needs a multiple of 2 ranks, but there are 1; --nproc-per-node 2 starts 2 workers" in said


@pytest.mark.slow
def test_seven_billion_frozen_parameters_fit_where_an_expert_would_put_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "projects" / "blip2_qwen7b_align.yaml")
    plan = ["--cfg-path", file, "--device-memory"]
    settings, fits = advised(tmp_path, *plan, "24GiB", "--world-size", "4", "--options", "run.device=cuda")
    assert fits
    assert "model.language_model.weights=bf16" in settings
    assert not any(setting.startswith("run.") for setting in settings)
    assert "checkpoint        31.5 MiB" in capsys.readouterr().out  # 33 MB, though the weights are not here
    settings, fits = advised(tmp_path, *plan, "12GiB", "--world-size", "4", "--options", "run.device=cuda")
    assert fits
    assert any("run.runner=" in setting for setting in settings)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alike_blocks_that_are_not_computed_count_as_if_they_were(
    mode: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*SMALL, "model.n_layer=5", "model.n_positions=64"]
    with parameters_on_meta():
        model = make_model(load_config(ROOT / "projects" / "gpt2_345m.yaml", options))
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    short = memory_trace.trace(model, batch, dtype, mode, "cpu")
    monkeypatch.setattr(memory_trace, "_alike", lambda chain: [])
    whole = memory_trace.trace(model, batch, dtype, mode, "cpu")
    for name in ("forward_peak", "kept", "inputs", "flops"):
        assert getattr(short, name) == getattr(whole, name), name
    for retained, outside, exchanged in ((0.0, 0.0, 0), (1.0, 1.0, 0), (0.5, 1.0, 10**7)):
        assert short.peak(retained, outside, exchanged) == whole.peak(retained, outside, exchanged)


WIDTH, LAYERS, IDS = 64, 4, 1024
LLAMA = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": IDS, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=pytest.mark.slow),
        ("cuda", torch.bfloat16),
        pytest.param("cpu", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("cuda", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_arithmetic_is_that_of_a_count_by_hand(device: str, dtype: torch.dtype, name: str) -> None:
    gpt2 = {"arch": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": IDS, "n_positions": 4096}
    model = gpt2 if name == "gpt2" else {"arch": "causal_lm", "config": LLAMA}
    data, run = {"t": {"name": "text", "path": "none", "seq_length": 4096}}, {"max_iters": 1, "micro_batch_size": 1}
    with parameters_on_meta():
        made = make_model(load_config({"model": model, "datasets": data, "run": run | {"output_dir": "none"}}))
    if name == "gpt2":
        block, last = 12 * WIDTH**2, 4 * WIDTH**2
    else:  # queries and outputs, keys and values of half as many heads, and a gated MLP
        block, last = 3 * WIDTH**2 + 3 * WIDTH * 192, WIDTH * 192
    for rows, length in ((16, 256), (1, 4096)):
        ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
        # Two products, and in the backward four, of every query with every key, as torch counts causal attention. A
        # fused kernel makes the scores a second time; the CPU has none with dropout, which GPT-2 has.
        products = 12 if name == "gpt2" and device == "cpu" else 14
        expected = 6 * (LAYERS * block + IDS * WIDTH) + products * LAYERS * WIDTH * length
        # Dropout after the last product of a block has it computed again; without, nothing needs its result.
        again = 2 * LAYERS * (block if name == "gpt2" else block - last) + 4 * LAYERS * WIDTH * length
        for mode, per_token in (("none", expected), ("full", expected + again)):
            counted = memory_trace.trace(made, {"input_ids": ids, "labels": ids}, dtype, mode, device).flops
            # Exact, but for the products of rotary frequencies.
            assert counted == pytest.approx(per_token * rows * length, rel=0.001), (length, mode)


@pytest.mark.parametrize("frozen", mostly_slow(FROZEN, []))
def test_blocks_of_several_chains_count_as_if_all_were_computed(
    frozen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        "--no-presets", "--options", "model.vision.depth=6", "model.language_model.model.num_hidden_layers=5",
        "model.qformer.gradient_checkpointing=full", "datasets.shapes.max_length=64",
        *(f"model.{part}.freeze=true" for part in frozen),
    )  # fmt: skip
    short = planned(tmp_path, "blip2_qwen_shapes", *options)
    monkeypatch.setattr(memory_trace, "_alike", lambda chain: [])
    whole = planned(tmp_path, "blip2_qwen_shapes", *options)
    assert short["memory"]["device"]["activations"] > 0
    assert short == whole


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * GIB), ("80GB", 80e9), ("512MiB", 512 * MIB), ("1000", 1e3)])
def test_sizes_are_read_as_people_write_them(text: str, size: float) -> None:
    assert read_bytes(text, "x") == size


def test_large_numbers_are_read_as_people_write_them() -> None:
    assert (read_number("2.5B", "x"), read_number("150T", "x"), read_number("3e11", "x")) == (2.5e9, 150e12, 3e11)


@pytest.mark.parametrize("text", ["much", "-1GiB", "24 parsecs", "", "80"])
def test_what_is_no_size_is_said(text: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cfg-path", str(project), f"--device-memory={text} "]) == 1
    assert "is not a size such as 5GB or 24GiB" in capsys.readouterr().err


def test_ranks_that_do_not_divide_the_heads_send_keys_and_values_to_all(tmp_path: Path) -> None:
    options = [
        "--options",
        "run.runner={name: ddp, context_parallel: 4}",
        "run.amp=fp32",
        *SMALL,
        "run.gradient_checkpointing=none",
    ]
    sent = []
    for heads in (2, 4):
        plan = planned(tmp_path, "gpt2_345m", "--world-size", "4", "--no-presets", *options, f"model.n_head={heads}")
        sent.append(plan["bytes_sent_per_step_by_a_rank"])
    batch = plan["batch"]
    rows = batch["micro_batch"] * batch["accumulation"]
    tensor = rows * 1024 * 128 * 4  # keys of all heads, or values, in fp32: [rows, length, width]
    # In each of 2 blocks, a ring of 4 ranks sends 3/4 of the whole keys and values, and of their gradients. Otherwise,
    # a rank sends 3/4 of its quarter of queries, keys, values, outputs, and of their gradients.
    assert sent[0] - sent[1] == 2 * (4 * tensor * 3 // 4 - 8 * (tensor // 4) * 3 // 4)
