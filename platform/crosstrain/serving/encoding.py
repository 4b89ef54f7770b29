"""Encode prompts in processes that can be killed: a stranger's chat template or tokenizer may never end."""

from __future__ import annotations

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
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from crosstrain.data.tokenizer import load_tokenizer, stored_tokenizer
from crosstrain.serving.api_error import ApiError
from crosstrain.utils.errors import CheckpointError, first_line, sentence

Kind = Literal["text", "chat", "words"]
_SECONDS = 4.0  # for one prompt
_PATIENCE = 0.5  # seconds after which a prompt has to make way for others
_MEMORY = 1 << 29  # bytes that a process may take beyond the tokenizer


@dataclass(eq=False)
class _Worker:
    pid: int
    connection: Connection

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


class Encoders:
    """Processes that turn texts and chats into token ids. Every call has one to itself, so one that hangs delays no
    other. A host process loads the tokenizer once, and forks the others from itself.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()  # of the host
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, float] = {}  # since when
        self._closed = False
        self._start()

    @property
    def stuck(self) -> int:
        """Prompts whose encoding takes unusually long."""
        return sum(time.monotonic() - since > 2 * _PATIENCE for since in list(self._busy.values()))

    def encode(self, kind: Kind, given: Any, param: str) -> list[int]:
        """Token ids of a text; of a chat, by the tokenizer's template; or of words, in which no token is special.

        Raises ApiError 400 naming `param` for an error, and for what takes too long or too much memory.
        """
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._fork()
        self._busy[worker] = time.monotonic()
        again = False
        try:
            worker.connection.send_bytes(json.dumps([kind, given]).encode())
            again = worker.connection.poll(_PATIENCE)
            if not again:
                os.setpriority(os.PRIO_PROCESS, worker.pid, 10)
                if not worker.connection.poll(_SECONDS - _PATIENCE):
                    late = f"{param}: the tokenizer or its chat template has no result after {_SECONDS:g} s"
                    raise ApiError(400, late, param, "encoding_timeout")
            answer = worker.connection.recv_bytes()
        except (OSError, EOFError):
            again = False
            died = f"{param}: the tokenizer or its chat template crashed or took too much memory"
            raise ApiError(400, died, param, "encoding_failed") from None
        finally:
            del self._busy[worker]
            if again:
                self._idle.append(worker)
            else:
                worker.kill()
        if answer[:1] == b"!":
            what = "the chat template refuses them" if kind == "chat" else "the tokenizer fails"
            raise ApiError(400, f"{param}: {what} ({answer[1:].decode()})", param)
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
        self._host.start()
        theirs.close()

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                reduction.send_handle(self._control, theirs.fileno(), self._host.pid)
                return _Worker(int(self._control.recv_bytes()), Connection(ours.detach()))
            except (OSError, EOFError):  # the host was killed, for want of memory, say
                if not self._closed:
                    self._start()
                raise ApiError(503, "encoding starts again; try again later", code="busy", retry=5) from None


def check_decoder(tokenizer: Any, checkpoint: Path) -> None:
    """CheckpointError unless text grows no faster than its tokens: the server itself decodes."""
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


def _host(checkpoint: Path, control: Connection) -> None:
    """Fork a process for each socket that comes, until the server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when to stop
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # transformers then does without: seconds and memory
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(**stored_tokenizer(checkpoint))
    ways: dict[str, Any] = {"text": partial(_text, tokenizer), "chat": partial(_chat, tokenizer)}
    with suppress(Exception):  # a tokenizer that conversations in training cannot have had
        ways["words"] = load_tokenizer(checkpoint).encode
    with suppress(EOFError, OSError):
        while True:
            handle = reduction.recv_handle(control)
            if not (pid := os.fork()):
                control.close()
                _work(Connection(handle), ways)
            os.close(handle)
            control.send_bytes(b"%d" % pid)


def _text(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return _text(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _work(connection: Connection, ways: dict[str, Any]) -> None:
    """Answer what is asked: `=` and ids, or `!` and why there are none. Never returns."""
    with suppress(EOFError, OSError, MemoryError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust tells there what it died of
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
        while True:
            kind, given = json.loads(connection.recv_bytes())
            # Beside the server's own clock: for when it is killed.
            cpu = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(cpu.ru_utime + cpu.ru_stime + _SECONDS) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            try:
                answer = b"=" + array("q", [-1 if i is None else i for i in ways[kind](given)]).tobytes()
            except Exception as error:  # of jinja, the tokenizer, or whatever the template raises
                answer = b"!" + first_line(error)[:1000].encode(errors="replace")
            connection.send_bytes(answer)
    os._exit(0)
