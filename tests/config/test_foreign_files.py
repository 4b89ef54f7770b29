"""Other programs' files: a script's options are those that bash would pass, or are named; nothing hangs or is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.migrate.foreign_files import read_foreign
from crosstrain_plugins.builtin.commands.migrate.literals import value_of
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from conftest import ENVIRONMENT
from crosstrain.cli.main import main
from crosstrain.utils.errors import ConfigError, UserError

SCRIPTS = sorted((Path(__file__).parent / "launch_scripts").glob("*.sh"))
LAUNCHERS = ("python", "torchrun", "deepspeed", "accelerate", "mpirun", "scontrol", "nvidia-smi", "hostname", "module")
COUNTS = {"nproc_per_node", "nnodes", "num_processes", "num_nodes", "num_gpus"}  # the launcher's, not the program's


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of launchers that write down their arguments; srun runs the shell that it is given."""
    folder = tmp_path_factory.mktemp("bin")
    for name in LAUNCHERS:
        (folder / name).write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" $'\\1' >> \"$RECORD\"\n")
    (folder / "srun").write_text(
        '#!/bin/bash\nwhile [ $# -gt 0 ] && [ "$1" != bash ] && [ "$1" != torchrun ]; do shift; done\n"$@"\n'
    )
    for stub in folder.iterdir():
        stub.chmod(0o755)
    return folder


def options(words: list[str]) -> dict[str, list[str]]:
    """The words behind each option, as argparse has them: the last one of a name counts, `=` takes one word."""
    found = dict[str, list[str]]()
    last: list[str] | None = None
    for word in words:
        if option := re.fullmatch(r"--?([A-Za-z_][\w.-]*)(=.*)?", word, re.DOTALL):
            last = found[option[1].replace("-", "_").lower()] = [option[2][1:]] if option[2] else []
            last = None if option[2] else last
        elif last is not None:
            last.append(word)
    return found


def received(script: str, folder: Path, stubs: Path) -> list[tuple[str, dict[str, list[str]]]]:
    """Run a script with bash; return the Python programs that it starts and their options."""
    record = folder / "record"
    record.write_text("")
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "RECORD": str(record), "HOME": str(folder)}
    subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, timeout=20, stdin=subprocess.DEVNULL
    )
    calls = [call.split("\0")[:-1] for call in record.read_text().split("\1\0")[:-1]]
    programs = [(call, next((i for i, word in enumerate(call) if word.endswith(".py")), None)) for call in calls]
    return [(call[at], options(call[at + 1 :])) for call, at in programs if at is not None]


def same(words: list[str], value: Any) -> bool:
    """True if a value is that of an option's words; numbers and booleans may be written differently."""
    if value is True and not words:
        return True
    if isinstance(value, (dict, list)) and len(words) == 1:
        return bool(json.loads(words[0].replace("a]", '"a"]').replace("data/", "")) == value)
    values = value if isinstance(value, list) else [value]
    plain = [word.strip("'\"") for word in words]

    def equal(word: str, value: Any) -> bool:
        if isinstance(value, bool):
            return word.lower() == str(value).lower()
        return float(word) == value if isinstance(value, (int, float)) else word == value

    return len(plain) == len(values) and all(map(equal, plain, values))


def differences(script: str, folder: Path, stubs: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the options with other values than bash passes, but for those that are named, and the settings."""
    (path := folder / "script.sh").write_text(script)
    tree = read_foreign(path)
    calls = received(script, folder, stubs)
    named = {name for name, value in tree.items() if value == "???"}
    program = max(calls, key=lambda call: len(call[1]))[0]
    runs = [found for name, found in calls if name == program]
    wrong: list[Any] = [
        (name, words, tree.get(name, "absent"))
        for found in runs
        for name, words in found.items()
        if name not in named and not (name in tree and same(words, tree[name]))
    ]
    others = {re.sub(r"^.*/", "", name) for name, _ in calls if name != program}
    if others:
        assert any("only the command with the most options is read" in why for why in tree["???"].values())
    passed = {name for found in runs for name in found} | named | COUNTS | {"???"}
    settings_of_their_own = {name for name in tree if "." in name}  # NAME=VALUE, which is no option
    return wrong + [("never passed", name) for name in tree.keys() - passed - settings_of_their_own], tree


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_launcher_receives_what_is_read_or_the_option_is_named(path: Path, tmp_path: Path, stubs: Path) -> None:
    wrong, tree = differences(path.read_text(), tmp_path, stubs)
    assert wrong == []
    reason = re.compile(r"line \d+: |.* different values in lines|only the command with the most options")
    assert all(reason.match(why) for why in tree.get("???", {}).values())


def test_there_are_thirty_scripts() -> None:
    assert len(SCRIPTS) >= 30


CARRIED: dict[str, dict[str, Any]] = {
    "arrays_of_arguments": {"num_layers": 24, "global_batch_size": 64, "lr": 6e-5, "fp16": True, "nnodes": 1},
    "text_of_arguments": {"nproc_per_node": 8, "nnodes": 2, "lr": 0.00015, "save_interval": 500, "ddp_impl": "local"},
    "options_and_eval": {
        "seq_length": 2048, "lr": 2e-4, "split": "98,2,0", "zero_stage": 1, "deepspeed": True, "fp16": True,
        "train_tokens": 300_000_000_000, "data_path": "data/pile", "vocab_file": "???", "checkpoint_activations": "???",
        "moe_expert_parallel_size": "???",
    },
    "heredoc_hostfile": {"lr": 3e-4, "bf16": True, "zero_stage": 2, "deepspeed_config": "ds_config.json"},
    "conditions_on_one_line": {"init_lr": "???", "weight_decay": 0.1, "clip": 1.0, "seed": 1, "resume": "???"},
    "comments_with_backslashes": {"lr": 6e-4, "steps": 100, "warmup": 10},
    "comment_between_lines": {"lr": 1e-4, "steps": 100},
    "main_function": {"lr": 5e-5, "epochs": 3, "output_dir": "out/gpt2", "text": "two words", "num_processes": 2},
    "case_of_sizes": {"hidden_size": "???", "num_layers": "???", "swiglu": True, "lr": 1.5e-4},
    "slurm_srun": {"lr": 2e-4, "global_batch_size": 1024, "job": "???", "nnodes": 4, "nproc_per_node": 8},
    "slurm_launcher_text": {"lr": 6e-5, "pp_partition_method": "type:transformer|embedding", "nnodes": 2},
    "mpirun_environment": {"lr": 1e-4, "data_path": "0.3 a 0.7 b", "mask_prob": 0.15},
    "loop_over_nodes": {"lr": 1e-4, "steps": 50, "tag": "???"},
    "preprocessing_first": {"lr": 1e-3, "data_path": "data/tokens_text_document", "num_layers": 2},
    "two_stages": {"model": "gpt2", "batch": 8, "steps": 100, "lr": "???", "load": "???"},
    "after_the_end": {"lr": 1e-4, "steps": 7},
    "defaults_of_expansions": {"seed": 1234, "workers": 4, "lr": 2e-5, "name": "my run", "length": 1024},
    "words_and_quotes": {
        "prompt": "a  long   text", "rope": {"type": "linear", "factor": 2.0}, "list": ["a", "b", "c"],
        "escaped": "a b", "dollar": "$LR", "mixed": "prefix of all/end", "flag": True, "pattern": "*.txt",
    },
    "arithmetic": {"world": 32, "accum": 16, "iters": 143, "half": 2, "negative": -3, "rest": 2, "octal": "???"},
    "optional_parts": {"bf16": True, "steps": 5, "num_experts": "???", "fp8_format": "???", "sequence_parallel": "???"},
    "launcher_by_condition": {"lr": 1e-4, "steps": 10, "batch": "???"},
    "module_and_overrides": {"model.optim.lr": 1e-4, "trainer.devices": 2, "exp_manager.name": "my run"},
    "subshells_and_groups": {"lr": 1e-4, "wd": 0.1, "clip": 1, "seed": 1},
    "indexed_arrays": {"first": "???", "names": ["first one", "second"], "split": ["first", "one"]},
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_settings_without_doubt_are_carried(name: str) -> None:
    tree = read_foreign(Path(__file__).parent / "launch_scripts" / f"{name}.sh")
    assert {key: tree.get(key) for key in CARRIED[name]} == CARRIED[name]


def read(folder: Path, text: str, name: str = "a.sh") -> dict[str, Any]:
    (folder / name).write_text(text)
    return read_foreign(folder / name)


def test_reasons_name_the_line_and_the_words(tmp_path: Path) -> None:
    tree = read(
        tmp_path, 'A=\'--lr 1\'\nif x; then\n A="$A --wd 2"\nfi\npython a.py $A --save `pwd`/x --seed $SEED "$@"'
    )
    assert tree == {
        "lr": 1,
        "wd": "???",
        "save": "???",
        "seed": "???",
        "???": {
            "wd": "line 3: 'A=\"$A --wd 2\"' is known only at run time",
            "save": "line 5: '`pwd`' is known only at run time",
            "seed": "line 5: '$SEED' is known only at run time",
            "words without an option": "line 5: '$@' is known only at run time",
        },
    }


def test_an_option_before_the_next_command_has_no_value(tmp_path: Path) -> None:
    """Neither a further command nor the end of the file belongs to the last option."""
    for end in ("\nset +x", "; set +x", " && echo done", " > log 2>&1", " | tee log", " &\nwait", " \\\n", ""):
        assert read(tmp_path, f"python a.py --lr 1 --bf16 --sequence-parallel{end}") == {
            "lr": 1,
            "bf16": True,
            "sequence_parallel": True,
        }, end


def test_layers_of_experts_and_ranks_to_profile_are_read_as_they_are_written(tmp_path: Path) -> None:
    line = "python a.py --moe-layer-freq '([0]*3+[1]*58)' --other \"[0,1,1]\" --profile-ranks 0 --more 0 1"
    assert read(tmp_path, line) == {
        "moe_layer_freq": "([0]*3+[1]*58)",
        "other": [0, 1, 1],
        "profile_ranks": 0,
        "more": [0, 1],
    }


def test_an_option_that_may_follow_takes_no_words_of_the_one_before(tmp_path: Path) -> None:
    tree = read(tmp_path, "test -f x && E=--fast\npython a.py --lr 1 $E 2 --wd 3 $E --data a $E\n")
    assert (tree["lr"], tree["wd"], tree["data"], tree["fast"]) == ("???", 3, "a", "???")


def test_blanks_between_expansions_in_quotes_are_kept(tmp_path: Path) -> None:
    tree = read(tmp_path, 'A=3\nB="--lr $((A+1)) $(date) `pwd` ${A:+--c} $A  $A"\npython a.py --x "$A $A" --wd 2 $B\n')
    assert {key: value for key, value in tree.items() if key != "???"} == {
        "x": "3 3",
        "wd": 2,
        "lr": "???",
        "c": [3, 3],
    }


def test_a_program_is_the_same_in_different_folders(tmp_path: Path) -> None:
    tree = read(tmp_path, "D=`pwd`\ncd a && python $D/../a.py --lr 1 --wd 2\npython a.py --lr 3 --wd 2\n")
    assert (tree["lr"], tree["wd"]) == ("???", 2)
    assert tree["???"] == {"lr": "a.py is started with different values in lines 2 and 3"}


def test_a_script_for_a_shell_of_its_own_has_no_variables_but_its_own(tmp_path: Path) -> None:
    """Python's -c is no script of bash."""
    text = "LR=1\npython -c 'import torch; print(\"(\")'\nbash -c 'python a.py --lr $LR --wd 2'\n"
    assert {key: value for key, value in read(tmp_path, text).items() if key != "???"} == {"lr": "???", "wd": 2}


def test_words_of_echo_in_a_substitution_are_options(tmp_path: Path) -> None:
    tree = read(tmp_path, "X=--deep\npython a.py --lr 1 $([ $F ] && echo --fp16) $(echo $X)\n")
    assert (tree["fp16"], tree["deep"]) == ("???", "???")


def test_a_file_that_is_no_script_is_refused_with_its_line(tmp_path: Path) -> None:
    for text in ("python a.py --lr 1\n'open", "python a.py --lr 1\n)\n", "for x in; python a.py --lr 1"):
        with pytest.raises(
            ConfigError, match=r"a\.sh: cannot be read \(Unreadable: line \d: .* is not a bash statement"
        ):
            read(tmp_path, text)


def test_a_parser_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    with pytest.raises(UserError, match=r"needs the package tree_sitter_bash.*pip install 'crosstrain\[report\]'"):
        read(tmp_path, "python a.py --lr 1")


NAMES = st.sampled_from("ABC")  # of texts; arrays are D and E
WORD = st.sampled_from(
    [
        "1",
        "2e-4",
        "x",
        "$A",
        "${B}",
        "${C:-5}",
        '"$A"',
        "'q r'",
        '"a $B"',
        "$((1+2))",
        "$(echo hi)",
        "--a",
        "--b 3",
        "--lr",
        "$1",
        "$@",
        "--a=$B",
        "${A:+--c}",
        "x$A",
        "$ENV",
        '"${D[@]}"',
        "${E[@]}",
        "${D[0]}",
    ]
)
WORDS = st.lists(WORD, max_size=4).map(" ".join)
CONDITION = st.sampled_from(["true", "false", "[ 1 -eq 1 ]", '[ -z "$A" ]', "[[ $A == 1 ]]", "! true"])
PLAIN = st.one_of(
    st.builds('{}="{}"'.format, NAMES, WORDS.map(lambda text: text.replace('"', ""))),
    st.builds('{}+=" {}"'.format, NAMES, WORDS.map(lambda text: text.replace('"', ""))),
    st.builds("{}{}=({})".format, st.sampled_from("DE"), st.sampled_from(["", "+"]), WORDS),
)


def _inside(statement: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(statement, min_size=1, max_size=3).map("\n".join)
    return st.one_of(
        st.builds("if {}; then\n{}\nelse\n{}\nfi".format, CONDITION, body, body),
        st.builds("if {}; then {}\nfi".format, CONDITION, body),
        st.builds("{} && {}".format, CONDITION, PLAIN),
        st.builds("for {} in {} 1; do\n{}\n{}\ndone".format, NAMES, WORDS, body, st.sampled_from(["", "break"])),
        st.builds("case $A in 1|x) {} ;; *) {} ;; esac".format, body, body),
        st.builds(
            "f() {{\n{}\n{}\n{}\n}}\nf {}".format,
            st.sampled_from(["", "local A=3", "local B"]),
            body,
            st.sampled_from(["", "true && return"]),
            WORDS,
        ),
        st.builds("( {} )".format, body),
    )


SCRIPT = st.lists(st.recursive(PLAIN, _inside, max_leaves=6), min_size=1, max_size=5).map("\n".join)
TAIL = st.builds(
    " --x {} {} {} --end".format,
    st.sampled_from(["1", "$A"]),
    st.sampled_from(["$B", "${D[@]}"]),
    st.sampled_from(["", "--z $C", "--lr ${E[@]}"]),
)


def _agrees(folder: Path, stubs: Path, script: str) -> None:
    try:
        wrong, _ = differences(script, folder, stubs)
    except subprocess.TimeoutExpired:  # texts that double in loops
        reject()
    assert not wrong, (wrong, script)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(script=SCRIPT, tail=TAIL)
@example(script="D=($1 $2)", tail=" --x 1 ${D[@]:+--z 4} --end")  # an array of two fields that are not there
def test_scripts_of_all_kinds_differ_from_bash_in_nothing_unnamed(
    tmp_path_factory: pytest.TempPathFactory, stubs: Path, script: str, tail: str
) -> None:
    _agrees(tmp_path_factory.getbasetemp(), stubs, f"{script}\npython train.py{tail}\n")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None)
@given(script=SCRIPT, tail=TAIL)
def test_many_scripts_differ_from_bash_in_nothing_unnamed(
    tmp_path_factory: pytest.TempPathFactory, stubs: Path, script: str, tail: str
) -> None:
    _agrees(tmp_path_factory.getbasetemp(), stubs, f"{script}\npython train.py{tail}\n")


NUMBER = st.one_of(st.integers(-99, 99), st.floats(0.01, 99, allow_nan=False).map(lambda x: round(x, 3))).map(str)
ARITHMETIC = st.recursive(
    NUMBER,
    lambda inner: st.builds("({}){}({})".format, inner, st.sampled_from(["+", "-", "*", "/", "//"]), inner),
    max_leaves=6,
)


@given(expression=ARITHMETIC)
def test_arithmetic_is_pythons(expression: str) -> None:
    try:
        wanted = eval(expression)  # of digits and operators
    except ZeroDivisionError:
        wanted = "???"
    assert value_of(expression, {}) == wanted


@pytest.mark.parametrize(("expression", "value"), [
    ("[0] * 3 + [1] * 2", [0, 0, 0, 1, 1]), ("{'train': 'a', 'test': ['b', N]}", {"train": "a", "test": ["b", 7]}),
    ("torch.bfloat16", "bfloat16"), ("'a' 'b' + 'c'", "abc"), ("-N", -7), ("2**10", 1024), ("C['lr'] * 2", 0.2),
    ("True", True), ("(1, 2)", [1, 2]), ("None", "???"), ("f(1)", "???"), ("x", "???"), ("lipsum(n=9)", "???"),
    ("'%999999999d' % 1", "???"), ("'a' * 10**9", "???"), ("10**9 * [0]", "???"), ("9**9**9**9", "???"),
    ("9**64 * 9**64", "???"), ("'a'.ljust(10**9)", "???"), ("1e999", "???"),
    ("(" * 300, "???"), ("-" * 9999 + "1", "???"), ("[" * 300, "???"),
    ("__import__('os').getpid()", "???"), ("[open('ran', 'w')]", "???"), ("f'{N}'", "???"), ("range(3)", "???"),
])  # fmt: skip
def test_values_of_literals(expression: str, value: object) -> None:
    assert value_of(expression, {"N": 7, "C": {"lr": 0.1}}) == value


HOSTILE = {
    "globals.py": "batch_size = lipsum(n=99999999)",
    "product.py": "x = 'a' * 60000\n" + "x = x * 9\n" * 40 + "batch_size = x",
    "shared.py": "a = [1, 2, 3, 4]\n" + "a = [a, a, a, a]\n" * 40,
    "texts.py": "a = 'x' * 60000\n" + "".join(f"b{i} = a\n" for i in range(9000)),
    "chain.py": "x = y" + ".a()" * 60000,
    "sum.py": "x = " + "1+" * 100_000 + "1",
    "deep.toml": "a = " + "[" * 50_000 + "]" * 50_000,
    "dots.toml": "a." * 60_000 + "a = 1",
    "quoted.toml": "x = {" + "'a' . " * 40_000 + "a = 1}",
    "deep.json": "[" * 90_000,
    "levels.json": '{"a":' * 400 + "1" + "}" * 400,
    "keys.json": json.dumps(dict.fromkeys(map(str, range(12_000)), 1)),
    "aliases.yaml": "a: &a [1, 1]\n"
    + "".join(f"a{i}: &a{i} [*a{i - 1 or ''}, *a{i - 1 or ''}]\n" for i in range(1, 40)),
    "words.sh": f"A='{'x ' * 30_000}'\npython t.py " + "$A " * 20_000,
    "doubled.sh": "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60 + "python t.py --lr $A",
    "itself.sh": "f() { f; f; }\nf\npython t.py --lr 1",
    "calls.sh": "".join(f"f{i}() {{ f{i + 1}; f{i + 1}; }}\n" for i in range(40)) + "f0\npython t.py --lr 1",
    "loops.sh": "for a in 1; do " * 60 + "A=1;" + " done" * 60 + "\npython t.py --lr 1",
    "parts.sh": "python t.py --lr " + "$(" * 20_000 + "x" + ")" * 20_000,
    "evals.sh": 'A=\'eval "$A $A"\'\neval "$A"\n' * 9,
    "tests.sh": "[[ ( " * 30_000,
    "documents.sh": "cat <<A\n" * 9_000,
}


READ = {"globals.py", "product.py", "parts.sh", "documents.sh", "loops.sh"}  # small once they are read


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_read_or_refused_in_bounded_time(tmp_path: Path, name: str) -> None:
    started, said = time.process_time(), ""
    try:
        read(tmp_path, HOSTILE[name], name)
    except ConfigError as error:
        said = str(error)
    assert name in said or name in READ
    assert "micro_batch_size" not in said
    assert "RecursionError" not in said
    assert time.process_time() - started < 15


@pytest.mark.parametrize(("name", "text"), [
    ("a.json", '{"a":' * 9_000 + "1" + "}" * 9_000), ("a.py", "x = " + "1+" * 100_000 + "1"),
    ("a.sh", "if true; then " * 2_000 + "python t.py --lr 1" + "; fi" * 2_000),
])  # fmt: skip
def test_a_file_that_is_too_deep_is_refused_in_a_sentence(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read \(it is nested too deeply\)$"):
        read(tmp_path, text, name)


def test_a_file_that_names_itself_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.sh").write_text(
        "source a.sh\nbash a.sh\npython t.py --config_file a.sh --deepspeed a.sh --learning_rate 1\n"
    )
    assert main(["migrate", "a.sh", "--from", "transformers"]) == 0
    Path("a.json").write_text('{"deepspeed": "a.json", "max_steps": 3}')
    assert main(["migrate", "a.json", "--from", "transformers", "--output", "b.yaml"]) == 0


def test_a_migration_ends_in_time(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("A=1\n" * 9000 + "python t.py --learning_rate 1\n")
    code = (
        "import crosstrain.cli.main as main; import crosstrain_plugins.builtin.commands.migrate.command as verb; "
        "verb._SECONDS = 0.05; "
        "raise SystemExit(main.main(['migrate', 'a.sh', '--from', 'transformers']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    wanted = "error: reading a.sh took more than 0.1 s of CPU time; give its settings only\n"  # 0.05, rounded
    assert (done.returncode, done.stderr) == (1, wanted)
    assert not (tmp_path / "project.yaml").exists()
