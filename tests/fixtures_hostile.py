"""Checkpoints of an enemy, drawn from a seed, and a process that opens each and records what it does meanwhile.

The process imports the platform once and forks for every case. In the fork an audit hook records processes,
connections, and files that are opened or changed outside of what the case may touch; the kernel says how much memory
it took.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conftest import ENVIRONMENT, ROOT
from fixtures_tampering import seal

Change = Callable[[dict[str, Any]], object]  # of a checkpoint's configuration
_PROCESSES = (
    "subprocess.Popen",
    "os.exec",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
)
_CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind")
_CHANGES = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "os.chmod",
            "os.utime", "os.mkfifo", "shutil.rmtree", "shutil.copyfile",
            "tempfile.mkstemp", "tempfile.mkdtemp")  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Python, its libraries and the platform itself; what the kernel and the C library say of this machine.
_OURS = tuple(
    map(
        str,
        (
            "/proc/",
            "/sys/",
            "/usr/",
            "/etc/mime.types",
            "/dev/null",
            "/dev/urandom",
            sys.prefix,
            sys.base_prefix,
            ROOT / "platform",
            ROOT / "plugins",
            ROOT / "configs",
        ),
    )
)


@dataclass
class Case:
    """A checkpoint and the command that opens it; `{folder}`, `{run}` and `{out}` stand for paths."""

    name: str
    arguments: list[str]
    config: list[Change] = field(default_factory=list)
    files: list[Callable[[Path], object]] = field(
        default_factory=list
    )  # changes of the folder, after which it is sealed
    after: list[Callable[[Path], object]] = field(default_factory=list)  # and those that the manifest knows nothing of
    refused: bool = True


@dataclass
class Seen:
    """What opening a checkpoint came to."""

    code: int | None
    out: str
    err: str
    seconds: float
    peak: int  # bytes
    processes: list[str] = field(default_factory=list)
    connections: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # opened or changed, and none of the case's business
    made: list[str] = field(default_factory=list)  # what is there now and was not

    def complaints(self, refused: bool) -> list[str]:
        """What is wrong with it."""
        found = [
            f"{key}: {value}"
            for key, value in asdict(self).items()
            if key in ("processes", "connections", "files", "made") and value
        ]
        if "Traceback" in self.err + self.out or self.code not in (0, 1):
            found.append("a traceback")
        elif refused and self.code != 1:
            found.append("not refused")
        elif self.code == 1:
            lines = self.err.strip().splitlines()
            if not lines or not all(line.startswith(("error: ", "note: ")) for line in lines):
                found.append("not a sentence")
        if self.seconds > 20:
            found.append(f"{self.seconds:.1f} s")
        if self.peak > 2 << 30:
            found.append(f"{self.peak >> 20} MiB")
        return found


# ---------------------------------------------------------------------------------------------------------- the cases

EVALUATE = ["evaluate", "--checkpoint", "{folder}", "--nproc-per-node", "1"]
GENERATE = [*EVALUATE, "--generate", "ban ", "--max-new-tokens", "2"]
EXPORT = ["export", "--checkpoint", "{folder}", "--output", "{out}"]
SERVE = ["serve", "--checkpoint", "{folder}", "--nproc-per-node", "1", "--port", "0"]
REPORT = ["report", "{run}", "--output", "{out}"]

SCHEMES = (
    "http",
    "https",
    "ftp",
    "ftps",
    "sftp",
    "scp",
    "gs",
    "s3",
    "hf",
    "ais",
    "htgs",
    "file",
    "ssh",
    "data",
    "azure",
)
ODD_COMMANDS = (
    "pipe:{c}", "{{pipe:{c},a}}", "{{p,p}}ipe:{c}", "p{{i,i}}pe:{c}", "PIPE:{c}", " pipe:{c}", "Pipe://{c}",
    "pi\npe:{c}",
    "pipe:{c}{{0..3}}", "\tpipe:{c}", "pi\\pe:{c}", "{{pip,}}e:{c}", "pipe\u200b:{c}", "{{{{pipe:{c},b}},c}}",
)  # fmt: skip
BOMBS = (
    "{0..99999999999}", "{0..9}" * 8, "{a,b}" * 40, "{{a,b}{a,b}" + "{a,b}" * 30 + ",c}", "{" * 3000 + "}" * 3000,
    "/*/*/*/*/*/*/*/*/*/*.tar", "{1..99999999999999999999}", "{" + "a," * 10**6 + "b}", "{a..z}" * 9,
    "{0000000000..9}" * 7,
)  # fmt: skip
SPECIAL = ("/dev/zero", "/dev/stdin", "/dev/random", "/etc/passwd", "/proc/self/environ", "{place}/fifo",
           "{place}/socket",           "{place}/secret", "{place}", "{place}/loop", "\0", "x" * 5000)  # fmt: skip


def names(rng: random.Random, place: str) -> str:
    """The name of a shard, a file or an address that a stranger should not choose."""
    touch = f"touch {place}/harm"
    kinds: list[Callable[[], str]] = [
        lambda: rng.choice(ODD_COMMANDS).format(c=touch),
        lambda: f"{rng.choice(SCHEMES)}://{rng.choice(('127.0.0.1:9', 'example.com', 'bucket'))}/x.tar",
        lambda: rng.choice(BOMBS),
        lambda: rng.choice(SPECIAL).replace("{place}", place),
    ]
    return rng.choice(kinds)()


def dataset(rng: random.Random, place: str, depth: int = 0) -> dict[str, Any]:
    """A dataset that fetches, executes, reads or writes, at any depth of mixtures."""
    if depth < 3 and rng.random() < 0.3:
        parts = [{"dataset": dataset(rng, place, depth + 1), "ratio": 1.0} for _ in range(rng.randint(1, 3))]
        return {"name": "mixture", "parts": parts}
    name = lambda: names(rng, place)  # noqa: E731
    images = {"tokenizer": rng.choice([name(), "gpt2", "evil/model", f"{place}/fifo", None]), "image_tokens": 1}
    split = {"train": name(), "val": [name(), name()], "test": name()}
    prepare = {"input": rng.choice([name(), [{"name": "text", "path": name()}]]), "tokenizer": "gpt2"}
    return rng.choice(
        [
            {"name": "image_text", **images, **split, "cache": rng.choice([None, f"{place}/cache"])},
            {
                "name": "image_text",
                **images,
                **split,
                "prepare": {"images": name(), "annotations": name(), "output": f"{place}/packed"},
            },
            {"name": "shapes", "path": f"{place}/shapes", "images": rng.choice([8, 10**12]), "held_out": 4},
            {"name": "instructions", **images, "annotations": name(), "images": name(), "split": [1, 1, 1]},
            {"name": "text", "path": f"{place}/tokens", "seq_length": 8, "prepare": prepare},
            {"name": "text", "path": name(), "seq_length": 8, "tokenizer": name()},
            {"name": "text", "path": name(), "seq_length": 8, "vocab_file": name(), "merge_file": name()},
        ]
    )


MODELS: list[dict[str, Any]] = (
    [
        {"arch": "gpt2", key: value}
        for key, value in [
            ("n_embd", 10**9),
            ("n_layer", 10**7),
            ("n_layer", 10**12),
            ("make_vocab_size_divisible_by", 10**12),
            ("make_vocab_size_divisible_by", 0),
            ("make_vocab_size_divisible_by", 10**9),
            ("n_positions", 10**12),
            ("n_head", 0),
            ("vocab_size", 10**15),
            ("dropout", 7.5),
            ("n_embd", -64),
            ("make_vocab_size_divisible_by", 10**8),
        ]
    ]
    + [
        {"arch": "causal_lm", "config": {"model_type": kind, **more}}
        for kind, more in [
            ("gpt_neo", {"max_position_embeddings": 10**6}),
            ("gpt_neo", {"max_position_embeddings": 50_000}),
            ("gptj", {"n_positions": 10**9, "rotary_dim": 64}),
            ("codegen", {"n_positions": 10**5}),
            ("llama", {"num_hidden_layers": 10**9}),
            ("llama", {"hidden_size": 10**12}),
            ("mixtral", {"num_local_experts": 10**8}),
            ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 1e300, "short_factor": [1.0] * 10**6}}),
            ("bloom", {"n_layer": 10**8}),
            ("xglm", {"max_position_embeddings": 10**9}),
            ("opt", {"auto_map": {"AutoConfig": "e--m.C"}}),
            ("evil", {}),
            ("llama", {"_attn_implementation": "evil/kernels"}),
            ("llama", {"attn_implementation": "flash"}),
            ("mamba", {"num_hidden_layers": 10**9}),
            ("gpt_bigcode", {"n_positions": 10**6}),
            ("clip", {}),
            ("t5", {}),
        ]
    ]
    + [
        {"arch": "blip2_qwen", "vision": {"encoder": encoder, **more}, "language_model": {"model": {"name": "qwen"}}}
        for encoder, more in [
            ("eva_giant_patch14_224", {"depth": 10**9}),
            ("xcit_nano_12_p8_224", {"image_size": 10**6}),
            ("hf-hub:evil/model", {}),
            ("vit_tiny_patch16_224", {"image_size": 4000}),
            ("resnet18", {}),
            ("local-dir:/etc", {}),
        ]
    ]
    + [
        {"arch": "qwen", "num_hidden_layers": 10**9},
        {"arch": "qwen", "num_hidden_layers": 10**7},
        {"arch": "qwen", "max_position_embeddings": 10**15, "hidden_size": 10**10},
        {"arch": "qwen", "num_attention_heads": 0},
    ]
)


def pretrained(rng: random.Random, place: str) -> dict[str, Any]:
    """A model whose weights or sizes are to be fetched or read elsewhere."""
    source = rng.choice(
        [
            "gpt2",
            "evil/model",
            "http://127.0.0.1:9/m",
            f"{place}/model",
            f"{place}/fifo",
            "/dev/zero",
            "/etc",
            "hf://evil/model",
            "../..",
            f"{place}/secret",
        ]
    )
    language = {"name": "qwen", "pretrained": source}
    return rng.choice(
        [
            {"arch": "gpt2", "pretrained": source},
            {"arch": "qwen", "pretrained": source},
            {"arch": "causal_lm", "pretrained": source, "config": {"trust_remote_code": True}},
            {"arch": "blip2_qwen", "language_model": {"model": language}},
            *({"arch": "blip2_qwen", part: {"pretrained": source}} for part in ("vision", "qformer", "projector")),
        ]
    )


def run_options(rng: random.Random, place: str) -> dict[str, Any]:
    """Values of `run` by which a checkpoint would start, write or send something."""
    nvme = {"device": "nvme", "nvme_path": f"{place}/nvme", "buffer_count": 4}
    return rng.choice(
        [
            {"compile": "model"},
            {"compile": "blocks"},
            {"num_workers": 10**9},
            {"plugins": [f"{place}/plugins"]},
            {"runner": {"name": "deepspeed", "stage": 3, "offload_optimizer": nvme}},
            {"runner": {"name": "deepspeed", "stage": 3, "offload_param": nvme}},
            {"runner": {"name": "deepspeed", "stage": 2}},
            {"runner": {"name": "megatron", "tensor_parallel": 64}},
            {"runner": {"name": "fsdp", "cpu_offload": True}},
            {"trackers": [{"name": "wandb", "project": "x"}, {"name": "mlflow", "tracking_uri": "http://127.0.0.1:9"}]},
            {"profile": {"steps": [1, 2], "with_stack": True}},
            {"sample_prompts": ["x" * 10**5], "sample_tokens": 10**9},
            {"resume_from": f"{place}/fifo"},
            {"output_dir": f"{place}/out"},
            {"max_restarts": 10**9},
            {"optimizer": {"name": "evil"}},
            {"lr_sched": {"name": "../../evil"}},
            {"micro_batch_size": 10**12},
            {"collective_timeout": 1e-300},
            {"gradient_checkpointing": "offload"},
            {"freeze": ["*" * 1000]},
        ]
    )


def write_json(name: str, **more: Any) -> Callable[[Path], object]:
    """Adds keys to a JSON file of the checkpoint, which may not exist."""

    def change(folder: Path) -> None:
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | more))

    return change


def put(name: str, kind: str) -> Callable[[Path], object]:
    """Replaces a file by something that is none."""

    def change(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            os.mknod(path, stat.S_IFSOCK)
        else:
            path.symlink_to(kind)

    return change


def to_file(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


TOKENIZER_FILES = [
    write_json("tokenizer_config.json", vocab_file="/etc/passwd", tokenizer_file="/etc/passwd"),
    write_json("tokenizer_config.json", fast_tokenizer_files=["tokenizer./../../../../etc/passwd.json"]),
    write_json("tokenizer_config.json", init_inputs=["/etc/passwd"], gguf_file="/etc/passwd",
               name_or_path="evil/model"),
    write_json("tokenizer_config.json", tokenizer_class="MistralCommonBackend"),
    write_json("tokenizer_config.json", tokenizer_class="LlamaTokenizer", vocab_file="/dev/zero"),
    write_json("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil/model--t.T", "evil/model--t.T"]}),
    write_json("tokenizer_config.json", added_tokens_decoder={str(i): {"content": str(i)} for i in range(10**5)}),
    write_json("tokenizer_config.json", model_max_length="x", padding_side="evil"),
    write_json("tokenizer_config.json", eos_token=["a"], chat_template=7),
    write_json("config.json", auto_map={"AutoConfig": "evil/m--c.C", "AutoModelForCausalLM": "evil/m--c.C"}),
    write_json("config.json", architectures=["__import__"], model_type="evil",
               nested=[{"auto_map": {"AutoModel": "e--m.M"}}]),
    write_json("config.json", tokenizer_class="evil.Evil", _name_or_path="evil/model", trust_remote_code=True),
    write_json("generation_config.json", custom_generate="evil/generate", _name_or_path="evil/model"),
    write_json("processor_config.json", auto_map={"AutoProcessor": "evil/m--p.P"},
               audio_tokenizer_name_or_path="evil/m"),
    write_json("adapter_config.json", base_model_name_or_path="evil/model", peft_type="LORA"),
    to_file("tokenizer_config.json", "[]"), to_file("tokenizer_config.json", "[" * 10**5),
    to_file("config.json", "[" * 900 + "]" * 900),
    to_file("chat_template.jinja", "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"),
    *(to_file(name, "touch harm")
      for name in ("a.PY", "g.Pkl", "l.bin.gz", "custom_generate", "k.so.1", "TOKENIZER.JSON")),
]  # fmt: skip
SPECIAL_FILES = [
    put(name, kind)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
    )
    for kind in ("fifo", "/dev/zero", "/etc/passwd", "socket")
]


def cases(seed: int, place: str) -> Iterator[Case]:
    """Endless cases of everything above, alone and together. `place` is a folder that no case may touch."""
    rng = random.Random(seed)
    while True:
        chosen = rng.choice([EVALUATE, EVALUATE, GENERATE, EXPORT, SERVE])
        case = Case("", chosen, refused=chosen is EVALUATE)
        kinds = rng.sample(["dataset", "model", "pretrained", "run", "file", "special"], rng.choice([1, 1, 2, 3]))
        for kind in kinds:
            if kind == "dataset":
                case.config.append(setting("datasets", {"x": dataset(rng, place)}))
            elif kind in ("model", "pretrained") and not ("pretrained" in kinds and kind == "model"):
                given = pretrained(rng, place) if kind == "pretrained" else rng.choice(MODELS)
                case.config.append(setting("model", given, keep=given["arch"] == "gpt2"))
                case.refused = True
            elif kind == "run":
                case.config.append(setting("run", run_options(rng, place), keep=True))
            elif kind == "file":
                case.files.append(rng.choice(TOKENIZER_FILES))
            elif kind == "special":
                case.after.append(rng.choice(SPECIAL_FILES))
        if not case.config:  # else the run's own user may evaluate it
            case.config.append(setting("datasets", {"x": dataset(rng, place)}))
        case.name = f"{' '.join(chosen[:1] + chosen[5:6])}: {', '.join(kinds)}"
        yield case


def setting(section: str, value: dict[str, Any], keep: bool = False) -> Change:
    return lambda config: config.update({section: (config[section] if keep else {}) | value})


# ------------------------------------------------------------------------------------------------------ the process


def place_of_harm(folder: Path) -> Path:
    """A folder of things that nobody should open."""
    folder.mkdir()
    (folder / "secret").write_text("swordfish")
    os.mkfifo(folder / "fifo")
    put("socket", "socket")(folder)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "gpt2", "auto_map": {"AutoConfig": "evil.Evil"}}')
    (folder / "plugins").mkdir()
    (folder / "plugins" / "trap.py").write_text(f"from pathlib import Path\nPath({str(folder / 'harm')!r}).touch()\n")
    return folder


def prepare(case: Case, checkpoint: Path, folder: Path) -> None:
    """The case's checkpoint, as `folder`/run/checkpoints/step_000001."""
    made = folder / "run" / "checkpoints" / "step_000001"
    shutil.copytree(checkpoint, made)
    if case.config:
        state = json.loads((made / "state.json").read_text())
        for change in case.config:
            change(state["config"])
        (made / "state.json").write_text(json.dumps(state))
    for change_file in case.files:
        change_file(made)
    seal(made)
    for change_file in case.after:
        change_file(made)


def open_all(found: list[Case], checkpoint: Path, place: Path, root: Path, trusting: bool = False) -> list[Seen]:
    """Open each checkpoint in a process of its own; what each did. `trusting`: as if all were the user's own."""
    jobs = []
    for number, case in enumerate(found):
        folder = root / str(number)
        prepare(case, checkpoint, folder)
        made = folder / "run" / "checkpoints" / "step_000001"
        words = {"{folder}": str(made), "{run}": str(folder / "run"), "{out}": str(folder / "out")}
        jobs.append({"folder": str(folder), "arguments": [words.get(word, word) for word in case.arguments]})
    request = root / "jobs.json"
    request.write_text(json.dumps({"jobs": jobs, "place": str(place), "trusting": trusting}))
    alone = ["unshare", "-n"] if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0 else []
    paths = os.pathsep.join(map(str, (ROOT / "platform", ROOT / "tests", ROOT)))
    environment = {key: value for key, value in ENVIRONMENT.items() if not key.startswith(("HF_", "XDG_"))}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a module that a case imports first is not compiled into a file
    done = subprocess.run(
        [*alone, sys.executable, __file__, str(request)],
        env=environment | {"PYTHONPATH": paths, "HOME": str(root / "home")},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    return [Seen(**json.loads((Path(job["folder"]) / "seen.json").read_text())) for job in jobs]


def _serve(request: Path) -> None:
    """The process: import everything, then fork for each job."""
    import transformers
    from crosstrain_plugins.builtin.commands.serve import command as serve
    from crosstrain_plugins.builtin.evaluations.answers import vqa  # noqa: F401

    from crosstrain.api import evaluate  # noqa: F401
    from crosstrain.cli.main import main
    from crosstrain.config.registry import registry
    from crosstrain.inference import open_checkpoint

    for lazy in ("PreTrainedTokenizerFast", "PreTrainedModel", "AutoModelForCausalLM"):
        getattr(transformers, lazy)
    for kind, known in (
        ("model", ("gpt2", "qwen", "causal_lm", "blip2_qwen")),
        ("runner", ("ddp",)),
        ("dataset", ("text", "image_text", "shapes", "instructions", "mixture")),
    ):
        for name in known:
            registry.get(kind, name)
    wanted = json.loads(request.read_text())
    serve.launch = lambda *_: 0
    if wanted["trusting"]:
        open_checkpoint.is_own = lambda *_: True
    for job in wanted["jobs"]:
        pid = os.fork()
        if pid == 0:
            try:
                _open(main, job, wanted["place"])
            finally:
                os._exit(0)
        _await(pid, 60)
        if not (Path(job["folder"]) / "seen.json").exists():
            (Path(job["folder"]) / "seen.json").write_text(
                json.dumps(asdict(Seen(None, "", "it never ended", 60.0, 0)))
            )


def _await(pid: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, 9)
        time.sleep(0.01)


def _open(main: Callable[[list[str]], int], job: dict[str, Any], place: str) -> None:
    folder = Path(job["folder"])
    (folder / "work").mkdir()
    os.chdir(folder / "work")
    texts = [os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
    os.dup2(texts[0], 1), os.dup2(texts[1], 2)
    seen = Seen(None, "", "", 0.0, 0)
    there = _tree(folder, place)
    recording, own_process = [True], os.getpid()
    allowed = tuple(str(folder / name) for name in ("out", ".out"))
    own = (str(folder / "run"), *_OURS)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not recording[0]:
            return
        told = f"{event} {str(arguments)[:200]}"
        if os.getpid() != own_process and event.startswith((*_PROCESSES, *_CONNECTIONS)):  # in a fork, such as for text
            recording[0] = False
            (folder / "harm of a fork").write_text(told)
        if event.startswith(_PROCESSES):
            seen.processes.append(told)
        elif event.startswith(_CONNECTIONS):
            seen.connections.append(told)
        elif event == "open" and isinstance(arguments[0], (str, bytes)):
            path, writes = os.path.abspath(os.fsdecode(arguments[0])), bool((arguments[2] or 0) & _WRITING)
            if not path.startswith(allowed) and path != str(folder) and (writes or not path.startswith(own)):
                seen.files.append(told)
        elif event.startswith(_CHANGES) and arguments[-1] in (-1, None):  # else in a folder whose own removal is told
            paths = [os.path.abspath(os.fsdecode(a)) for a in arguments if isinstance(a, (str, bytes))]
            seen.files += [told] if any(not path.startswith(allowed) and path != str(folder) for path in paths) else []

    sys.addaudithook(hook)
    start = time.monotonic()
    try:
        seen.code = main(job["arguments"])
    except BaseException:
        traceback.print_exc()
    seen.seconds = time.monotonic() - start
    recording[0] = False
    sys.stdout.flush(), sys.stderr.flush()
    seen.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    seen.made = sorted(_tree(folder, place) - there)
    seen.out, seen.err = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    (folder / "seen.json").write_text(json.dumps(asdict(seen)))


def _tree(folder: Path, place: str) -> set[str]:
    """Everything beside the case's output, and where harm would be done."""
    found = {str(path) for root in (folder, Path(place), folder.parent / "home") for path in root.rglob("*")}
    return {path for path in found if not path.startswith(str(folder / "out"))}


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
