"""Run `crosstrain compare` on the museum, and judge its answers: caught, phase, parameter, cause and seconds.

Exhibits of one project share a call of `compare`; the reference is ddp with one worker. Results are collected in the
JSON file `--results`, and a second call runs only exhibits without a result. `--table` writes the tables of the page.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "platform"))

REFERENCE = "ddp@1"
MARK = "<!-- the rest is written by: python benchmarks/museum --table docs/museum.md -->\n"
WORDS = [f"{a}{b}" for a in ("ba", "de", "ki", "lo", "mu") for b in ("n", "r", "s", "t")]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MODEL = {"arch": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 320, "dropout": 0.0}
QWEN = {
    "arch": "qwen", "family": "qwen2", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "arch": "causal_lm",
    "config": {
        "model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
RUN = {
    "output_dir": "out", "max_iters": 50, "lr_decay_iters": 50, "global_batch_size": 12, "micro_batch_size": 2,
    "init_lr": 1e-2, "weight_decay": 0.1, "grad_norm_clip": 0.5, "log_interval": 1, "device": "cpu", "trackers": [],
    "amp": {"loss_scale": 1024},
}  # fmt: skip


@dataclass(frozen=True)
class Exhibit:
    """A runner of the museum."""

    name: str
    bug: str  # description in one line
    link: str  # empty for healthy variants
    expected: Any  # an `Expected`

    @property
    def label(self) -> str:
        """The runner with two workers, as an argument of `compare`."""
        options = "".join(f", {key}: {str(value).lower()}" for key, value in self.expected.options.items())
        return f"{{name: {self.name}{options}}}@2"


def exhibits() -> list[Exhibit]:
    """Import all exhibits, and return them in order of their names."""
    from crosstrain.config.registry import registry

    registry.add_folder(HERE)
    found = []
    for entry in registry.entries("runner"):
        if entry.file.parent == HERE:
            module = importlib.import_module(entry.module)
            bug, _, link = (module.__doc__ or "").partition("\n\n")
            found.append(Exhibit(entry.name, " ".join(bug.split()), link.strip(), module.EXPECTED))
    return found


def write_projects(folder: Path) -> dict[str, Path]:
    """Write a project file for each kind of model and data; return name -> path. The texts have structure to learn."""
    from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
    from crosstrain_plugins.builtin.commands.prepare.prepare import prepare

    rng = random.Random(0)
    follow = {word: rng.sample(WORDS, 3) for word in WORDS}

    def words(count: int) -> str:
        said = [rng.choice(WORDS)]
        while len(said) < count:
            said.append(rng.choice(follow[said[-1]]))
        return " ".join(said)

    def write(name: str, rows: Iterable[dict[str, Any]]) -> str:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / name)

    def turns() -> list[dict[str, str]]:
        said = [{"role": "user", "content": words(rng.randint(1, 3))}]
        return [*said, {"role": "assistant", "content": words(rng.choice((1, 2, 9)))}]

    text = write("text.jsonl", ({"text": words(120)} for _ in range(60)))
    prepare(PrepareOptions(input=text, train_tokenizer=320), folder / "tokens", progress=False)
    talk = write("talk.jsonl", ({"messages": turns()} for _ in range(300)))
    plain = {"name": "text", "path": str(folder / "tokens"), "seq_length": 32, "split": [80, 10, 10]}
    chat = {
        "name": "chat", "path": talk, "tokenizer": str(folder / "tokens"), "seq_length": 64,
        "chat_template": TEMPLATE, "split": [80, 10, 10],
    }  # fmt: skip
    grpo = {
        "name": "grpo", "rewards": [{"name": "matches", "pattern": ".*[ae].*"}], "completions": 4,
        "max_new_tokens": 4, "temperature": 0.7, "average": "tokens",
    }  # fmt: skip
    lora = {"name": "lora", "rank": 4, "alpha": 8}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
        "gpt2": ({"dropout": 0.1}, plain, {}),
        "still": ({}, plain, {}),
        "muon": ({}, plain, {"optimizer": "muon"}),
        "qwen": (QWEN, plain, {}),
        "experts": (EXPERTS, plain, {}),
        "chat": ({}, chat, {}),
        "packed": ({}, chat | {"packing": True}, {}),
        "adapter": ({"adapter": lora}, plain, {}),
        "policy": (QWEN, chat | {"name": "prompts", "seq_length": 48}, {"objective": grpo}),
    }
    paths = {}
    for name, (model, data, run) in kinds.items():
        document = {
            "model": model if "arch" in model else MODEL | model,
            "datasets": {"data": data},
            "run": RUN | {"plugins": [str(HERE)]} | run,
        }
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump(document))
    return paths


def compare(project: Path, chosen: list[Exhibit], steps: int, flags: list[str], options: list[str]) -> dict[str, Any]:
    """Run `crosstrain compare`, and return label -> answer about each chosen exhibit, with the elapsed seconds."""
    output = project.parent / "results.json"
    output.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "crosstrain", "compare", "--cfg-path", str(project), "--steps", str(steps),
        "--output", str(output), *flags, "--runners", REFERENCE, *(exhibit.label for exhibit in chosen),
        *(["--options", *options] if options else []),
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "platform"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    said, seconds, started = list[str](), dict[str, float](), time.monotonic()
    with subprocess.Popen(
        command, cwd=project.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            said.append(line)
            label = line.rstrip("\n").partition(": failed: ")[0]
            if label == REFERENCE or label in {exhibit.label for exhibit in chosen}:  # its steps are done
                seconds.setdefault(label, time.monotonic() - started)
                started = time.monotonic()
    if not output.exists():
        sys.exit(f"compare failed: {' '.join(command)}\n{''.join(said)[-5000:]}")
    answers = json.loads(output.read_text())
    return {exhibit.label: answers[exhibit.label] | {"elapsed": seconds[exhibit.label]} for exhibit in chosen}


# ---- judging

# Pattern of a sentence -> phases, for results without a `finding`. The first match counts.
PHASES = {
    r"ended at sample|micro batches of step \d+ begin": ("samples",),
    r"in evaluation mode, the loss is": ("forward", "evaluation"),
    r"the loss of step 1 is": ("forward",),
    r"different gradients|gradient of|every gradient": ("gradients",),
    r"learning rate \S+ instead": ("learning rate",),
    r"gradient norm of step \d+ is .* with equal gradients": ("norm",),
    r"different weights|of the way|the (loss|gradient norm) of step": ("update",),
    r"lacks|besides|the optimizer's": ("state",),
}
_NAME = re.compile(r"\b(?:transformer|lm|lm_head|model)\.[\w.]+\b")


@dataclass(frozen=True)
class Verdict:
    """The correct parts of an answer about an exhibit; None: this part is not judged."""

    caught: bool
    phase: bool | None = None
    parameter: bool | None = None
    cause: bool | None = None


def judge(expected: Any, result: dict[str, Any]) -> Verdict:
    """Compare an answer with the expected one. An exhibit that fails to train counts as caught, in no known phase."""
    finding = result.get("finding")
    sentence = (finding or {}).get("sentence") or result.get("problem") or result.get("error")
    if not sentence:
        return Verdict(False)
    if expected.phase is None:
        return Verdict(True)
    if finding:
        phases = ("state", "export") if finding["phase"] == "checkpoint" else (finding["phase"],)
        names = finding["parameters"]
        cause = f"{finding.get('cause') or ''} {sentence}"
    else:
        phases = next((found for pattern, found in PHASES.items() if re.search(pattern, sentence)), ())
        names, cause = _NAME.findall(sentence), sentence
    parameter = None
    if expected.parameter is not None:
        parameter = bool(names) and all(fnmatch.fnmatch(name, expected.parameter) for name in names)
    return Verdict(True, expected.phase in phases, parameter, bool(re.search(expected.cause, cause, re.I)))


def show(value: bool | None) -> str:
    return {True: "yes", False: "**no**", None: "-"}[value]


def share(values: Iterable[bool | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known)} of {len(known)} ({sum(known) / max(len(known), 1):.0%})"


def table(found: list[Exhibit], results: dict[str, dict[str, Any]]) -> str:
    """Return the page's tables in Markdown, with the exhibits that have results."""
    lines = [
        "| exhibit | bug | wrong in | caught | phase | tensor | cause | seconds |",
        "|---|---|---|---|---|---|---|--:|",
    ]
    sick = [(e, results[e.name]) for e in found if e.expected.phase is not None and e.name in results]
    verdicts = [judge(exhibit.expected, result) for exhibit, result in sick]
    for (exhibit, result), verdict in zip(sick, verdicts, strict=True):
        thread = re.sub(r"https://github.com/([^/]+/)?([^/]+)/(?:pull|issues)/(\d+)", r"\2 \3", exhibit.link)
        right = [show(getattr(verdict, key)) for key in ("caught", "phase", "parameter", "cause")]
        lines.append(
            f"| `{exhibit.name}` | {exhibit.bug} ([{thread}]({exhibit.link})) | {exhibit.expected.phase} | "
            f"{' | '.join(right)} | {result['elapsed']:.0f} |"
        )
    totals = [share(getattr(v, key) for v in verdicts) for key in ("caught", "phase", "parameter", "cause")]
    lines += [f"| **all** | {len(sick)} exhibits | | {' | '.join(totals)} | |", ""]
    lines += ["| healthy variant | what is different | alarm | seconds |", "|---|---|---|--:|"]
    for exhibit in found:
        if exhibit.expected.phase is None and exhibit.name in results:
            result = results[exhibit.name]
            alarm = "**yes**" if judge(exhibit.expected, result).caught else "no"
            lines.append(f"| `{exhibit.name}` | {exhibit.bug} | {alarm} | {result['elapsed']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="patterns of exhibit names (default: all exhibits without a result)")
    parser.add_argument("--results", type=Path, default=Path("museum.json"), help="JSON file to read and extend")
    parser.add_argument(
        "--table", type=Path, help="Markdown file to write; in a page with the mark, only the text below it is replaced"
    )
    parser.add_argument("--batch", type=int, default=12, help="exhibits per call of compare (default: 12)")
    parser.add_argument("--flags", default="--deep", help="additional flags of compare (default: --deep)")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="KEY=VALUE", help="options of the projects, such as run.amp=bf16"
    )
    a = parser.parse_args()
    found = exhibits()
    results: dict[str, dict[str, Any]] = json.loads(a.results.read_text()) if a.results.exists() else {}
    chosen = [e for e in found if any(fnmatch.fnmatch(e.name, name) for name in a.names)]
    chosen = chosen if a.names else [e for e in found if e.name not in results]

    def kind(exhibit: Exhibit) -> tuple[str, int]:
        return exhibit.expected.project, exhibit.expected.steps

    with tempfile.TemporaryDirectory(prefix="museum-") as temporary:
        projects = write_projects(Path(temporary)) if chosen else {}
        for (project, steps), members in groupby(sorted(chosen, key=kind), kind):
            group = list(members)
            for start in range(0, len(group), a.batch):
                batch = group[start : start + a.batch]
                answers = compare(projects[project], batch, steps, a.flags.split(), a.options)
                for exhibit in batch:
                    answer = answers[exhibit.label]
                    kept = {key: answer[key] for key in ("problem", "error", "finding") if key in answer}
                    results[exhibit.name] = kept | {"elapsed": answer["elapsed"]}
                    print(f"{exhibit.name}: {kept.get('error') or kept.get('problem')}", flush=True)
                a.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    page = table(found, results)
    if a.table:  # if the page has the mark, replace only the text below it
        above, mark, _ = a.table.read_text().partition(MARK) if a.table.exists() else ("", "", "")
        a.table.write_text(above + mark + "\n" * bool(mark) + page)
    print(page)


if __name__ == "__main__":
    main()
