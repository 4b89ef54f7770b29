"""GRPO and its relatives: the papers' losses and gradients, tokens that are learned as sampled, and the same samples
under every runner."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from crosstrain import Completion, Component, Environment, Episode, SampleError
from crosstrain.checkpoint.digests import recorded
from crosstrain.checkpoint.folders import find_checkpoint
from crosstrain.config.load import preset_files
from crosstrain.config.registry import registry
from crosstrain.config.sources import read_yaml
from crosstrain.utils.types import IGNORE_INDEX, MicroBatch
from fixtures_policy import make_guesser
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train

# The same formulas in another order of operations, in fp64 but for the advantages, which are fp32.
TOLERANCE = 5e-6
PROMPTS, GROUP, LONGEST = 3, 4, 6
END = 1


def objective(name: str, training: bool = True, **options: Any) -> Any:
    preset = preset_files("objective").get(name)
    given = {} if preset is None else read_yaml(preset, ()).tree
    kind = registry.get("objective", given.pop("name", name))
    rewards = [Component("matches", registry.get("reward", "matches").Options())]
    made = kind(kind.Options(rewards=rewards, **given | options))
    made.model = SimpleNamespace(training=training, max_length=None, record=lambda *_: None)
    return made


# ---- the papers, once more, token by token


def rollouts(seed: int, apart: float) -> dict[str, Any]:
    """Log-probabilities of three policies for completions of some lengths, and rewards; `apart`: how they differ."""
    rng = torch.Generator().manual_seed(seed)
    rows = PROMPTS * GROUP
    lengths = torch.randint(1, LONGEST + 1, (rows,), generator=rng)
    now = -torch.rand(rows, LONGEST, generator=rng, dtype=torch.float64) * 3
    old, reference = (now + apart * torch.randn(now.shape, generator=rng, dtype=torch.float64) for _ in range(2))
    rewards = torch.rand(rows, generator=rng)
    rewards[:GROUP] = 1.0  # a prompt whose completions are all right
    labels = torch.where(torch.arange(LONGEST) < lengths[:, None], 5, IGNORE_INDEX)
    return {
        "lengths": lengths, "now": now.requires_grad_(), "old": old, "reference": reference, "rewards": rewards,
        "labels": labels,
    }  # fmt: skip


def advantage(rewards: list[float], i: int, kind: str) -> float:
    mean = sum(rewards) / len(rewards)
    if kind == "leave_one_out":
        return rewards[i] - sum(r for j, r in enumerate(rewards) if j != i) / (len(rewards) - 1)
    if kind == "centered":
        return rewards[i] - mean
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return (rewards[i] - mean) / (deviation + 1e-4)


def by_the_paper(name: str, made: dict[str, Any], kl: float) -> Tensor:
    """The loss to minimize; every paper states the objective to maximize."""
    total, tokens, counted = torch.zeros((), dtype=torch.float64), 0, 0
    kind = {"dr_grpo": "centered", "rloo": "leave_one_out"}.get(name, "standardized")
    for row in range(PROMPTS * GROUP):
        group = made["rewards"][row // GROUP * GROUP :][:GROUP].tolist()
        if name == "dapo" and len(set(group)) == 1:
            continue
        a, length = advantage(group, row % GROUP, kind), int(made["lengths"][row])
        now, old, reference = (made[key][row, :length] for key in ("now", "old", "reference"))
        counted, tokens = counted + 1, tokens + length
        if name == "gspo":
            s = ((now - old).sum() / length).exp()
            total = total + torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a)
            continue
        for t in range(length):
            ratio = (now[t] - old[t]).exp()
            if name == "cispo":
                total = total + ratio.detach().clamp(max=1.2) * a * now[t]
                continue
            if name == "rloo":
                total = total + a * now[t]
                continue
            term = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28 if name == "dapo" else 1.2) * a)
            behind = reference[t] - now[t]
            term = term - kl * (behind.exp() - behind - 1)
            total = total + (term / length if name == "grpo" else term)
    divisor = {"dapo": tokens, "cispo": tokens, "dr_grpo": counted * LONGEST}.get(name, counted)
    return -total / divisor


OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": 0.05}, "dr_grpo": {}, "dapo": {}, "gspo": {}, "rloo": {}, "cispo": {},
}  # fmt: skip


def ours_of(name: str, made: dict[str, Any], **options: Any) -> tuple[Any, Tensor]:
    """The objective and its loss."""
    ours = objective(name, max_new_tokens=LONGEST, completions=GROUP, **options)
    module = __import__(type(ours).__module__, fromlist=["advantages"])
    rewards = made["rewards"].view(PROMPTS, GROUP)
    equal = (rewards == rewards[:, :1]).all(1).repeat_interleave(GROUP)
    counts = torch.where(equal & ours.options.skip_equal, 0.0, 1.0)
    batch = {
        "labels": made["labels"], "input_ids": made["labels"], "old": made["old"], "sampled": made["old"],
        "reference": made["reference"], "counts": counts,
        "advantages": module.advantages(rewards, ours.options.advantage).flatten(),
    }  # fmt: skip
    losses = torch.where(made["labels"] != IGNORE_INDEX, -made["now"], 0.0)
    return ours, ours.loss(losses, batch) / ours.units(batch)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_are_the_papers(name: str, seed: int) -> None:
    made = rollouts(seed, apart=0.0 if name == "rloo" else 0.002 if name == "gspo" else 0.3)
    _, found = ours_of(name, made, **OPTIONS[name])
    expected = by_the_paper(name, made, OPTIONS[name].get("kl", 0.0))
    gradients = [torch.autograd.grad(loss, made["now"])[0] for loss in (found, expected)]
    scale = gradients[1].abs().max()
    assert (gradients[0] - gradients[1]).abs().max() <= TOLERANCE * scale
    if name != "rloo":  # its loss has the same gradient, but is stated as a ratio
        assert found.item() == pytest.approx(expected.item(), rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_are_those_of_trl(name: str, seed: int) -> None:
    trainer = pytest.importorskip("trl").GRPOTrainer
    made = rollouts(seed, apart=0.002 if name == "gspo" else 0.3)
    # TRL keeps DAPO's equal groups in the divisor.
    ours, found = ours_of(name, made, **OPTIONS[name] | ({"skip_equal": False} if name == "dapo" else {}))
    high = ours.options.clip if ours.options.clip_high is None else ours.options.clip_high
    mask = (made["labels"] != IGNORE_INDEX).double()
    theirs = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (made["now"], torch.zeros_like(made["now"]), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        importance_sampling_level="sequence" if name == "gspo" else "token", beta=ours.options.kl,
        loss_type="grpo" if name == "gspo" else name, epsilon_low=ours.options.clip,
        epsilon_high=1 + high if name == "cispo" else high, max_completion_length=LONGEST,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    module = __import__(type(ours).__module__, fromlist=["advantages"])
    inputs = {
        "prompt_ids": made["labels"][:, :1], "prompt_mask": mask[:, :1], "completion_ids": made["labels"],
        "completion_mask": mask, "old_per_token_logps": made["old"], "ref_per_token_logps": made["reference"],
        "advantages": module.advantages(made["rewards"].view(PROMPTS, GROUP), ours.options.advantage).flatten(),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    expected = trainer._compute_loss(theirs, None, inputs)
    gradients = [torch.autograd.grad(loss, made["now"])[0] for loss in (found, expected)]
    assert (gradients[0] - gradients[1]).abs().max() <= TOLERANCE * gradients[1].abs().max()
    assert found.item() == pytest.approx(expected.item(), rel=TOLERANCE, abs=TOLERANCE)


def test_a_mismatch_of_the_sampler_is_corrected_up_to_a_limit() -> None:
    made, ours = rollouts(0, 0.0), objective("reinforce", completions=GROUP)
    batch = {
        "labels": made["labels"], "advantages": made["rewards"], "counts": torch.ones(len(made["rewards"])),
        "sampled": made["now"].detach() - math.log(1.5),
    }  # fmt: skip
    losses = torch.where(made["labels"] != IGNORE_INDEX, -made["now"], 0.0)
    plain = batch | {"sampled": made["now"].detach()}
    first, corrected = (ours.loss(losses, given).item() for given in (plain, batch))
    assert corrected == pytest.approx(1.5 * first, rel=1e-6)
    far = batch | {"sampled": made["now"].detach() - math.log(100)}
    assert ours.loss(losses, far).item() == pytest.approx(2.0 * first, rel=1e-6)


# ---- tokens in, tokens out


class _Guesses:
    """A policy that samples random tokens, and a dataset with random replies; remembers what it was given."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dataset: Any = self
        self.end_tokens = (END, 2)
        self.calls: dict[tuple[int, ...], tuple[list[int], Completion]] = {}

    def generate(
        self, prompts: Any, keys: Any, max_new_tokens: int, temperature: float, ends: tuple[int, ...]
    ) -> list[Completion]:
        found = []
        for prompt, key in zip(prompts, keys, strict=True):
            tokens = self.rng.integers(0, 20, max_new_tokens).tolist()
            stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
            found.append(Completion(tokens[:stop], (-self.rng.random(stop)).tolist()))
            assert key not in self.calls, "the same random numbers twice"
            self.calls[key] = prompt["input_ids"].tolist(), found[-1]
        return found

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def texts(self, rows: list[list[int]]) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]

    def reply(self, role: str, text: str) -> list[int]:
        if len(text) % 7 == 0:
            raise SampleError("a special token")
        return self.rng.integers(0, 20, len(text) % 7).tolist()


class _Talker(Environment):
    def reply(self, episode: Episode) -> str | None:
        return None if sum(episode.tokens) % 4 == 0 else episode.text


def test_ten_thousand_conversations_learn_exactly_the_sampled_tokens() -> None:
    module = __import__(Episode.__module__, fromlist=["Player"])
    player, seen = module.Player(5, 4, _Talker(None)), 0
    for seed in range(250):
        policy, rng = _Guesses(seed), np.random.default_rng(seed)
        rows = [torch.from_numpy(rng.integers(0, 20, int(rng.integers(1, 9)))) for _ in range(8)]
        data = {key: torch.nn.utils.rnn.pad_sequence(rows, True, IGNORE_INDEX) for key in ("input_ids", "answer")}
        episodes = player.play(MicroBatch(0, data, 0, tuple(range(8))), policy, 5, 1.0)
        batch = module.batch_of(episodes, None)
        for episode, ids, labels, sampled in zip(
            episodes, batch["input_ids"], batch["labels"], batch["sampled"], strict=True
        ):
            turns = [policy.calls[*episode.key, turn] for turn in range(len(episode.turns))]
            assert (*episode.key, len(turns)) not in policy.calls
            tokens = [token for _, completion in turns for token in completion.tokens]
            chances = [chance for _, completion in turns for chance in completion.log_probabilities]
            learned = labels != IGNORE_INDEX
            assert labels[learned].tolist() == tokens
            assert sampled[learned].tolist() == pytest.approx(chances)
            assert not sampled[~learned].any()
            whole = [int(ids[0]), *(int(i) for i in ids[1:])]
            for given, completion in turns:  # each turn continues what the row says, token for token
                assert whole[: len(given)] == given
                assert labels[len(given) - 1 : len(given) - 1 + len(completion.tokens)].tolist() == completion.tokens
            seen += 1
    assert seen == 10_000


def test_tokens_are_drawn_by_their_probabilities() -> None:
    from crosstrain.inference.policy import _draw

    logits = torch.tensor([[0.0, 1.0, 2.0, -1e9]]).repeat(4000, 1)
    random = [torch.Generator().manual_seed(i) for i in range(4000)]
    tokens, chances = _draw(logits, 0.5, random)
    expected = torch.softmax(logits[0] / 0.5, -1)
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert (shares - expected).abs().max() < 0.03  # four standard deviations
    assert torch.allclose(chances, expected[tokens].log(), atol=1e-6)
    assert shares[3] == 0
    assert _draw(logits[:2], 0.0, [])[0].tolist() == [2, 2]


# ---- runs


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a tiny model that has learned to answer sums with some digit."""
    return make_guesser(tmp_path_factory.mktemp("grpo"))


def _steps(project: str, options: tuple[str, ...], count: int) -> tuple[list[float], dict[int, Any]]:
    """Gradient norms of some steps, and the rows that this rank sampled."""
    trainer = make_trainer(project, options)
    stream, norms, rows = trainer.batches(), [], {}
    for _ in range(count):
        step = next(stream)
        rows |= {micro.first_sample: micro.data["input_ids"].tolist() for micro in step}
        norms.append(trainer.train_step(iter([step])).grad_norm)
    trainer.runner.close()
    return norms, rows


RUNNERS = ["ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2", "megatron_pp2@2"]


@pytest.mark.parametrize("runner", mostly_slow(RUNNERS, ["fsdp@2"]))
@pytest.mark.parametrize("kind", mostly_slow(["grpo", "stale"], ["grpo"]))
def test_every_runner_samples_the_same_completions(guesser: Path, tmp_path: Path, runner: str, kind: str) -> None:
    more = ("run.objective.kl=0.1", "run.objective.sampler_steps=2") if kind == "stale" else ()
    ((norms, rows),) = run_ranks(1, _steps, str(guesser / "grpo.yaml"), (f"run.output_dir={tmp_path}/1", *more), 4)
    name, _, size = runner.partition("@")
    options = (f"run.output_dir={tmp_path}/2", f"run.runner={name}", *more)
    ranks = run_ranks(int(size), _steps, str(guesser / "grpo.yaml"), options, 4, seconds=240)
    drawn: dict[int, Any] = {}
    for _, held in ranks:
        drawn |= held
    assert drawn == rows
    assert ranks[0][0] == pytest.approx(norms, rel=2e-6)


@pytest.mark.parametrize("layout", mostly_slow(["ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_pp2@2"], ["fsdp@2"]))
def test_bitwise_runs_end_with_the_same_bits_under_every_runner(guesser: Path, layout: str) -> None:
    bitwise = ("run.bitwise=true", "run.micro_batch_size=2")
    found = []
    for name, size in (("ddp", "1"), layout.split("@")):
        run = train(guesser / "grpo.yaml", f"bitwise_{name}_{size}", f"run.runner={name}", *bitwise, size=int(size))
        found.append((run.column("loss"), run.column("reward"), recorded(find_checkpoint(run.folder))))
    assert found[0] == found[1]
    assert found[0][2] is not None


@pytest.mark.slow
def test_a_resumed_run_continues_exactly_with_the_sampler_it_had(guesser: Path) -> None:
    options = ("run.objective.kl=0.1", "run.objective.sampler_steps=3", "run.lr_decay_iters=6")
    whole = train(guesser / "grpo.yaml", "whole", *options, "run.max_iters=6")
    train(guesser / "grpo.yaml", "halves", *options, "run.max_iters=4")
    halves = train(guesser / "grpo.yaml", "halves", *options, "run.max_iters=6")
    for key in ("loss", "grad_norm", "reward", "kl", "clipped", "parity"):
        assert halves.column(key) == whole.column(key), key
    assert whole.column("kl")[0] == 0
    assert whole.column("loss")[1] != 0, "the second step's completions are old"


def test_validation_is_greedy_and_its_loss_is_minus_the_reward(guesser: Path) -> None:
    run = train(guesser / "grpo.yaml", "validated", "run.eval_interval=2", "run.max_iters=2", "run.eval_iters=3")
    last = run.rows[-1]
    assert last["val_loss"] == pytest.approx(-last["val_reward"])
    assert last["val_reward/answer"] == last["val_reward"]
    assert 0 <= last["val_reward"] <= 1


def test_exact_parity_is_refused_where_rounding_differs(guesser: Path) -> None:
    with pytest.raises(AssertionError, match="the learner's log-probabilities differ from the sampler's"):
        train(guesser / "grpo.yaml", "exact", "run.objective.parity=exact")


# ---- rewards and environments


def reward(name: str, text: str, answer: str = "", tokens: int = 1, **options: Any) -> float:
    kind = registry.get("reward", name)
    episode = Episode((0, 0), [], answer, [5] * tokens, [-1.0] * tokens, [text], True)
    return float(kind(kind.Options(**options))(episode))


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("so 3 + 4 = 7", "7", 1), ("it is 8", "7", 0), ("1,000", "1000.0", 1), ("nothing", "7", 0), ("7", "none", 0),
        ("-3", "3", 0), ("7 or 8", "step 1: 9\n#### 8", 1),
    ],
)  # fmt: skip
def test_answers_are_compared_by_value(text: str, answer: str, right: int) -> None:
    assert reward("answer", text, answer) == right


def test_rewards_of_patterns_and_lengths() -> None:
    assert reward("answer", "the answer is B.", "B", pattern=r"\b([A-D])\b") == 1
    assert reward("matches", "<think>a\nb</think> 7") == 1
    assert reward("matches", "<think></think> 7") == 0
    assert [reward("overlong", "", tokens=n, longest=10, margin=4) for n in (6, 8, 10, 12)] == [0, -0.5, -1, -1]
    with pytest.raises(Exception, match="not a regular expression"):
        reward("matches", "", pattern="(")


def test_programs_run_with_limits(tmp_path: Path) -> None:
    code = "Here:\n```python\ndef double(x):\n    return 2 * x\n```"
    assert reward("program", code, "assert double(4) == 8") == 1
    assert reward("program", code, "assert double(4) == 9") == 0
    assert reward("program", "while True: pass", seconds=1) == 0
    assert reward("program", "x = ' ' * (1 << 31)") == 0
    assert reward("program", "import torch") == 0, "the user's packages are out of reach"
    assert reward("program", f"open({str(tmp_path / 'big')!r}, 'wb').write(b'x' * (1 << 22))") == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<calculator>3 * (4 + 5)</calculator>", "27"), ("<calculator>1/3</calculator>", "0.3333333333"),
        ("<calculator>2 ** 9999</calculator>", "error"), ("<calculator>__import__('os')</calculator>", "error"),
        ("<calculator>1/0</calculator>", "error"), ("27", None), ("<python>print(3)</python>", None),
    ],
)  # fmt: skip
def test_the_calculator(text: str, said: str | None) -> None:
    episode = Episode((0, 0), [], "", turns=[text])
    assert registry.get("environment", "calculator")(None).reply(episode) == said


def test_python_replies_with_its_output() -> None:
    kind = registry.get("environment", "python")
    episode = Episode((0, 0), [], "", turns=["<python>print(3 * 9)</python>"])
    assert kind(kind.Options()).reply(episode) == "27\n"


def test_a_reward_may_be_named_twice() -> None:
    options, kind = registry.get("reward", "matches").Options, registry.get("objective", "grpo")
    both = [Component("matches", options(weight, pattern)) for weight, pattern in ((1.0, "a.*"), (2.0, ".*b"))]
    made = kind(kind.Options(rewards=both))
    made.model = SimpleNamespace(record=lambda *_: None)
    episodes = [Episode((0, 0), [], "", [5], [-1.0], [text], True) for text in ("ab", "a", "b", "c")]
    assert made._measured(episodes)[:, 0].tolist() == [3, 1, 2, 0]


def test_mistakes_are_refused(guesser: Path) -> None:
    for option, said in [
        ("run.objective.rewards=[]", "needs at least one reward"),
        ("run.objective.turns=2", "turns"),
        ('run.objective.rewards=[{"name": "anser"}]', "did you mean answer"),
        ("run.objective.max_new_tokens=20", "lower max_new_tokens"),
    ]:
        with pytest.raises(Exception, match=said):
            train(guesser / "grpo.yaml", "refused", option)


def test_some_completions_are_recorded_with_their_rewards(guesser: Path) -> None:
    callback = 'run.callbacks=[{"name": "rollouts", "every": 2, "number": 3}]'
    run = train(guesser / "grpo.yaml", "recorded", callback, "run.max_iters=2")
    assert "generated" not in run.rows[0]
    shown = run.rows[1]["generated"]
    assert len(shown) == 3
    for each in shown:
        right = str(sum(map(int, each["prompt"].removesuffix("=").split("+"))))
        text, _, reward = each["text"].removesuffix("]").partition("  [reward ")
        assert float(reward) == (text == right)
