"""A checkpoint's tokenizer, which a stranger may have made: prompts are encoded in processes that can be killed.

A regular expression of a tokenizer and a chat template may never end, or take all memory.
"""

import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from crosstrain.checkpoint.manifest import read_json
from crosstrain.data.tokenizer import CONFIG, load_tokenizer, stored_tokenizer
from crosstrain.utils.assets import GENERATION_CONFIG, end_tokens
from crosstrain.utils.errors import CheckpointError, ConfigError, UserError, first_line, sentence
from crosstrain.utils.processes import main_hidden

Kind = Literal["text", "chat", "words"]
_SECONDS = 4.0  # for one prompt
_PATIENCE = 0.5  # seconds after which a prompt has to make way for others
_LOADING = 60.0  # seconds for the tokenizer to be loaded
_MEMORY = 1 << 29  # bytes that a process may take beyond the tokenizer


class EncodingError(UserError):
    """A prompt that has no token ids."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code  # as in the server's errors; "busy": the same prompt may be encoded later


def open_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of a checkpoint, to decode with. CheckpointError where it cannot be loaded or lets text grow."""
    from transformers import PreTrainedTokenizerFast

    try:
        # Not AutoTokenizer, which opens whatever files and imports whatever class the folder's own files name.
        tokenizer = PreTrainedTokenizerFast(**stored_tokenizer(checkpoint))
    except Exception as error:  # of many kinds, from Python and from Rust
        raise CheckpointError(f"{checkpoint}: its tokenizer cannot be loaded ({first_line(error)})") from error
    check_decoder(tokenizer, checkpoint)
    return tokenizer


def check_stored(checkpoint: Path) -> None:
    """ConfigError unless a tokenizer is stored with the checkpoint."""
    if not (checkpoint / CONFIG).is_file():
        raise ConfigError(
            f"{checkpoint}: no tokenizer is stored with it, so text is not possible; train with one "
            f"(datasets.<name>.tokenizer)"
        )


def check_decoder(tokenizer: Any, checkpoint: Path) -> None:
    """CheckpointError unless decoding takes time in proportion to the tokens: it has no process of its own."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = [json.loads(decoder.__getstate__())] if decoder is not None else []
    for step in steps:
        steps += step.get("decoders", [])
        fixed = step.get("pattern", {}).get("String")
        if step["type"] == "Replace" and (fixed is None or len(step["content"]) > len(fixed)):
            raise CheckpointError(
                f"{checkpoint}: its tokenizer's decoder replaces {sentence(step['pattern'])}; only a fixed text may be "
                f"replaced, by one that is no longer"
            )


@dataclass(eq=False)
class _Worker:
    pid: int
    connection: Connection

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


class Encoders:
    """Processes that turn texts and chats into token ids. Every call has one to itself, so that none delays another.

    A host process loads the tokenizer once, and forks the others from itself. It starts at once; `load` waits for it.
    """

    def __init__(self, checkpoint: Path) -> None:
        check_stored(checkpoint)
        self._checkpoint = checkpoint
        self._lock = threading.Lock()  # of the host
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, float] = {}  # since when
        self._closed = False
        self._start()

    @property
    def stuck(self) -> int:
        """Number of prompts whose encoding takes unusually long."""
        return sum(time.monotonic() - since > 2 * _PATIENCE for since in list(self._busy.values()))

    def load(self) -> Any:
        """The tokenizer, to decode with. Raises CheckpointError where it cannot be loaded, in little time."""
        with self._lock:
            self._wait()
        return open_tokenizer(self._checkpoint)  # which the host has survived

    def ends(self, tokenizer: Any) -> set[int]:
        """Tokens that end an answer: the tokenizer's end of text, and those of the model's generation_config.json."""
        path = self._checkpoint / GENERATION_CONFIG
        settings = read_json(path, most_bytes=1 << 20) if path.exists() else {}
        return {tokenizer.eos_token_id} | end_tokens(settings)

    def encode(self, kind: Kind, given: Any) -> list[int]:
        """Token ids of a text; of a chat, by the tokenizer's template; or of words, in which no token is special.

        Raises EncodingError for any error, and for what takes too long or too much memory.
        """
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._fork()
        self._busy[worker] = time.monotonic()
        whose = "the tokenizer or its chat template" if kind == "chat" else "the tokenizer"
        again = False
        try:
            worker.connection.send_bytes(json.dumps([kind, given]).encode())
            again = worker.connection.poll(_PATIENCE)
            if not again:
                os.setpriority(os.PRIO_PROCESS, worker.pid, 10)
                if not worker.connection.poll(_SECONDS - _PATIENCE):
                    raise EncodingError(f"{whose} has no result after {_SECONDS:g} s", "encoding_timeout")
            answer = worker.connection.recv_bytes()
        except (OSError, EOFError):
            again = False
            raise EncodingError(f"{whose} crashed or took too much memory", "encoding_failed") from None
        finally:
            del self._busy[worker]
            if again:
                self._idle.append(worker)
            else:
                worker.kill()
        if answer[:1] == b"!":
            problem = "the chat template refuses them" if kind == "chat" else "the tokenizer fails"
            raise EncodingError(f"{problem} ({answer[1:].decode()})")
        return array("q", answer[1:]).tolist()

    def close(self) -> None:
        """End every process."""
        self._closed = True
        for worker in [*self._idle, *self._busy]:
            worker.kill()
        self._host.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._host = context.Process(target=_host, args=(self._checkpoint, theirs), name="encoding", daemon=True)
        with main_hidden():
            self._host.start()
        self._loaded = False
        theirs.close()

    def _wait(self) -> None:
        """Wait for the host to have loaded the tokenizer."""
        if self._loaded:
            return
        problem = f"it takes more than {_LOADING:g} s"
        with suppress(OSError, EOFError):
            if self._control.poll(_LOADING):
                problem = "it crashes"
                problem = self._control.recv_bytes().decode()
        if problem:
            self._host.kill()
            raise CheckpointError(f"{self._checkpoint}: its tokenizer cannot be loaded ({problem})")
        self._loaded = True

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                self._wait()
                reduction.send_handle(self._control, theirs.fileno(), self._host.pid)
                return _Worker(int(self._control.recv_bytes()), Connection(ours.detach()))
            except (OSError, EOFError):  # the host was killed, for want of memory, say
                if not self._closed:
                    self._start()
                raise EncodingError("encoding starts again; try again later", "busy") from None


def _host(checkpoint: Path, control: Connection) -> None:
    """Fork a process for each socket that comes, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust's panics; what matters goes to the parent
    cpu_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (2 * int(_LOADING), cpu_limit[1]))  # for when the parent is killed
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # transformers then does without: seconds and memory
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast(**stored_tokenizer(checkpoint))

        def text(given: Any) -> list[int]:
            return tokenizer(given, add_special_tokens=False)["input_ids"]

        def chat(messages: list[dict[str, str]]) -> list[int]:
            return text(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

        ways: dict[str, Any] = {"text": text, "chat": chat}
        with suppress(Exception):  # a tokenizer that conversations in training cannot have had
            ways["words"] = load_tokenizer(checkpoint).encode
        resource.setrlimit(resource.RLIMIT_CPU, cpu_limit)
        control.send_bytes(b"")
    except BaseException as error:  # a panic in Rust is no Exception
        control.send_bytes(first_line(error)[:1000].encode(errors="replace"))
        return
    with suppress(EOFError, OSError):
        while True:
            handle = reduction.recv_handle(control)
            if not (pid := os.fork()):
                control.close()
                _work(Connection(handle), ways)
            os.close(handle)
            control.send_bytes(b"%d" % pid)


def _work(connection: Connection, ways: dict[str, Any]) -> None:
    """Answer requests: `=` and ids, or `!` and the reason why there are none. Never returns."""
    with suppress(EOFError, OSError, MemoryError):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
        while True:
            kind, given = json.loads(connection.recv_bytes())
            # Beside the parent's own clock: for when the parent is killed.
            cpu = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(cpu.ru_utime + cpu.ru_stime + _SECONDS) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            try:
                answer = b"=" + array("q", [-1 if i is None else i for i in ways[kind](given)]).tobytes()
            except Exception as error:  # of jinja, the tokenizer, or whatever the template raises
                answer = b"!" + first_line(error)[:1000].encode(errors="replace")
            connection.send_bytes(answer)
    os._exit(0)
