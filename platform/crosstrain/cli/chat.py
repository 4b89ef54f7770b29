"""`crosstrain chat`: talk with a server on the command line. Needs nothing but Python."""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import mimetypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crosstrain.cli.flags import positive
from crosstrain.utils.errors import UserError, os_errors_as, printable, sentence

_SECONDS = 600.0  # without a word
_HELP = "/image FILE adds an image, /new forgets what was said, /exit or Ctrl-D ends"


@dataclass
class Client:
    """A server of OpenAI's interface."""

    url: str
    key: str | None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            self._port = parts.port
        except ValueError:
            raise UserError(f"--url: {self.url} has no usable port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url: {self.url} is no address such as http://127.0.0.1:8000")
        self._secure, self._host = parts.scheme == "https", parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The answer, its body unread; UserError with the server's own sentence where it refuses."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            connection = kind(self._host, self._port, timeout=_SECONDS)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, f"{self._path}{path}", data, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"--url: {self.url} does not answer ({error or type(error).__name__})") from None
        if answer.status != 200:
            raise UserError(_complaint(answer))
        return answer

    def model(self) -> str:
        """The first of the server's models."""
        try:
            return json.load(self.send("GET", "/v1/models"))["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise UserError(f"--url: {self.url} does not tell its models as OpenAI's interface does") from None

    def answer(self, request: dict[str, Any]) -> Iterator[str]:
        """The pieces of an answer. Closing the iterator leaves the rest."""
        answer = self.send("POST", "/v1/chat/completions", request | {"stream": True})
        try:
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                document = json.loads(line[6:])
                if "error" in document:
                    raise UserError(str(document["error"]["message"]))
                for choice in document["choices"]:
                    yield choice["delta"].get("content") or ""
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"the answer of {self.url} broke off ({type(error).__name__})") from None
        finally:
            answer.close()


def _complaint(answer: http.client.HTTPResponse) -> str:
    try:
        return f"{json.load(answer)['error']['message']} ({answer.status})"
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return f"the server answers {answer.status} {answer.reason}"


@dataclass
class Talk:
    """A conversation that goes on."""

    history: list[dict[str, Any]]
    images: list[dict[str, Any]] = field(default_factory=list)  # that the next words are about

    def asking(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": [*self.images, {"type": "text", "text": text}] if self.images else text}

    def remember(self, asked: dict[str, Any], said: str) -> None:
        self.history += [asked, {"role": "assistant", "content": said}]
        self.images = []

    def add_image(self, file: str) -> None:
        with os_errors_as(UserError, f"/image: {file} cannot be read"):
            content = Path(file).expanduser().read_bytes()
        kind = mimetypes.guess_type(file)[0] or "image/png"
        url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="default: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="default: $CROSSTRAIN_API_KEY")
    parser.add_argument("--model", metavar="NAME", help="default: the server's first")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="of an answer (default: what fits)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int)


def run(arguments: argparse.Namespace) -> int:
    """Converse until the end of the input; returns the exit code."""
    client = Client(arguments.url, arguments.api_key or os.environ.get("CROSSTRAIN_API_KEY"))
    request: dict[str, Any] = {"model": arguments.model or client.model(), "temperature": arguments.temperature}
    chosen = {"top_p": arguments.top_p, "max_tokens": arguments.max_tokens, "seed": arguments.seed}
    request |= {key: value for key, value in chosen.items() if value is not None}
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    talk = Talk(list(system))
    print(f"talking with {sentence(request['model'])}; {_HELP}")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return 0
        word, _, rest = text.partition(" ")
        try:
            if word in ("/exit", "/quit"):
                return 0
            if word == "/new":
                talk = Talk(list(system))
            elif word == "/image" and rest:
                talk.add_image(rest.strip())
            elif word.startswith("/"):
                print(_HELP)
            elif text:
                asked = talk.asking(text)
                talk.remember(asked, _say(client, request | {"messages": [*talk.history, asked]}))
        except UserError as error:  # the conversation goes on
            print(f"error: {sentence(error)}")


def _say(client: Client, request: dict[str, Any]) -> str:
    """Show an answer as it comes; Ctrl-C ends it early, and it counts as far as it came."""
    said = ""
    try:
        for piece in client.answer(request):
            said += piece
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" ...")
    finally:
        sys.stdout.write("\n")
    return said
