"""`crosstrain chat`: talk with a server on the command line. Needs nothing but Python."""

import argparse
import base64
import json
import mimetypes
import os
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crosstrain.cli.flags import ask, positive
from crosstrain.utils.errors import UserError, os_errors_as, printable, sentence
from crosstrain.utils.program import command

_SECONDS = 600.0  # without a word
_HELP = "/image FILE adds an image, /new forgets what was said, /exit or Ctrl-D ends"
_UNLIKE_OPENAI = (ValueError, LookupError, TypeError, AttributeError)


class Client:
    """A server of OpenAI's interface. Every method raises UserError where the server cannot be used."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise UserError(f"--url: {url} has no usable port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url: {url} is no address such as http://127.0.0.1:8000")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.url, self._connect = url, partial(kind, parts.hostname, port, timeout=_SECONDS)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def send(self, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Return the response, its body unread. The UserError has the server's own sentence where it refuses."""
        try:
            connection = self._connect()
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, f"{self._path}{path}", data, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            what = f"--url: {self.url} does not answer ({error or type(error).__name__})"
            raise UserError(f"{what}; `{command('serve', '--checkpoint')} FOLDER` starts a server") from None
        if response.status != 200:
            try:
                complaint = f"{json.load(response)['error']['message']} ({response.status})"
            except (OSError, HTTPException, *_UNLIKE_OPENAI):
                complaint = f"the server answers {response.status} {response.reason}"
            raise UserError(complaint)
        return response

    def model(self) -> str:
        """Return the name of the server's first model."""
        try:
            return json.load(self.send("GET", "/v1/models"))["data"][0]["id"]
        except _UNLIKE_OPENAI:
            raise UserError(f"--url: {self.url} does not tell its models as OpenAI's interface does") from None

    def answer(self, request: dict[str, Any]) -> Iterator[str]:
        """Yield the pieces of an answer. Closing the iterator stops the server's work on the rest."""
        response = self.send("POST", "/v1/chat/completions", request | {"stream": True})
        try:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                document = json.loads(line[6:])
                if "error" in document:
                    raise UserError(str(document["error"]["message"]))
                for choice in document["choices"]:
                    yield choice["delta"].get("content") or ""
        except (OSError, HTTPException, *_UNLIKE_OPENAI) as error:
            raise UserError(f"the answer of {self.url} broke off ({type(error).__name__})") from None
        finally:
            response.close()


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
    request: dict[str, Any] = {"model": arguments.model or client.model()}
    chosen = {key: getattr(arguments, key) for key in ("temperature", "top_p", "max_tokens", "seed")}
    request |= {key: value for key, value in chosen.items() if value is not None}
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    history: list[dict[str, Any]] = list(system)
    images: list[dict[str, Any]] = []  # that the next words are about
    print(f"talking with {sentence(request['model'])}; {_HELP}")
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return 0
        word, _, rest = text.partition(" ")
        try:
            if word in ("/exit", "/quit"):
                return 0
            if word == "/new":
                history, images = list(system), []
            elif word == "/image" and rest:
                images.append(_image(rest.strip()))
                print(f"added {printable(rest.strip())}; your next words are about {len(images)} image(s)")
            elif word.startswith("/"):
                print(_HELP)
            elif text:
                asked = {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}
                said = _say(client, request | {"messages": [*history, asked]})
                history += [asked, {"role": "assistant", "content": said}]
                images = []
        except UserError as error:  # the conversation goes on
            print(f"error: {sentence(error)}")


def _image(file: str) -> dict[str, Any]:
    with os_errors_as(UserError, f"/image: {file} cannot be read"):
        content = base64.b64encode(Path(file).expanduser().read_bytes()).decode()
    url = f"data:{mimetypes.guess_type(file)[0] or 'image/png'};base64,{content}"
    return {"type": "image_url", "image_url": {"url": url}}


def _say(client: Client, request: dict[str, Any]) -> str:
    """Show an answer as it comes; Ctrl-C ends it early, and it counts as far as it came."""
    said = ""
    try:
        for piece in client.answer(request):
            said += piece
            print(printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    finally:
        print()
    return said
