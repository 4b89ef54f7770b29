"""Compare `crosstrain serve` with transformers' own server on a GPT-2: tokens/s and time to the first token.

Both serve the same weights, and get the same requests from OpenAI's client, in turn: streamed greedy completions of a
fixed length. Prints a Markdown table of ratios, crosstrain / transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, Result, Sizes, ratio, rounds, table, write_project

PROMPT = "the quick brown fox jumps over the lazy dog and " * 4


def make_model(folder: Path, sizes: Sizes) -> tuple[Path, Path]:
    """Train a GPT-2 on a few words, so that it never stops; return (run folder, exported model)."""
    from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
    from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenWriter, best_dtype

    words = folder / "words"
    run = {
        "runner": "ddp", "max_iters": 40, "global_batch_size": 4, "output_dir": str(folder / "run"), "device": "cpu",
        "init_lr": 1e-3, "eval_interval": None,
    }  # fmt: skip
    project = write_project(folder, sizes, run)
    tokenizer = train_bpe([PROMPT * 50], sizes.vocabulary)
    tokenizer.save(words)
    with TokenWriter(folder / "tokens", best_dtype(sizes.vocabulary)) as writer:
        writer.add([tokenizer.encode(PROMPT * 200)])
    for program in (
        [str(ROOT / "train.py"), "--cfg-path", str(project), "--options", f"datasets.random.tokenizer={words}"],
        ["-m", "crosstrain", "export", "--checkpoint", str(folder / "run"), "--output", str(folder / "model")],
    ):
        subprocess.run(
            [sys.executable, *program],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "platform")},
        )
    return folder / "run", folder / "model"


@contextlib.contextmanager
def serving(command: list[str], port: int) -> Iterator[str]:
    """Start a server, and yield its base URL when it is ready."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "platform")},
    )
    try:
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command} does not serve")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


async def ask(url: str, model: str, tokens: int, at_once: int, requests: int) -> Result:
    """Measure `requests` streamed completions, with `at_once` of them at a time."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=600)
    gate, firsts, counts = asyncio.Semaphore(at_once), list[float](), list[int]()

    async def one(number: int) -> None:
        async with gate:
            started, first, pieces = time.monotonic(), None, 0
            stream = await client.completions.create(
                model=model, prompt=f"{number} {PROMPT}", max_tokens=tokens, temperature=0, stream=True
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].text:
                    first = first or time.monotonic() - started
                    pieces += 1
            firsts.append(first or 0.0)
            counts.append(pieces)

    await one(-1)  # the warm-up, with compilation
    firsts.clear()
    started = time.monotonic()
    await asyncio.gather(*(one(i) for i in range(requests)))
    seconds = time.monotonic() - started
    return {
        "rate": requests * tokens / seconds,
        "first": statistics.median(firsts),
        "pieces": statistics.mean(counts) / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[8], help="of our server, as --batch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run, model = make_model(
            Path(scratch), Sizes(arguments.layers, arguments.hidden, arguments.hidden // 64, 256, 280)
        )
        ours = [sys.executable, "-m", "crosstrain", "serve", "--checkpoint", str(run), "--name", "m", "--port"]
        theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu"]
        theirs += ["--host", "127.0.0.1", "--port"]
        with contextlib.ExitStack() as stack:
            urls = {
                f"--batch {size}": (stack.enter_context(serving([*ours, str(p), "--batch", str(size)], p)), "m")
                for p, size in enumerate(arguments.batches, 8701)
            }
            urls["transformers"] = (stack.enter_context(serving([*theirs, "8700"], 8700)), str(model))
            rows = []
            for at_once in arguments.at_once:
                requests = max(arguments.requests if at_once > 1 else arguments.requests // 4, 1)
                results = rounds(
                    list(urls),
                    lambda name, n=at_once, r=requests: asyncio.run(ask(*urls[name], arguments.tokens, n, r)),
                    arguments.rounds,
                )
                for name in list(urls)[:-1]:
                    pair = results[name], results["transformers"]
                    rows.append([at_once, name, ratio(*pair, "rate"), ratio(*pair, "first")])
    print(
        table(["requests at once", "ours", "tokens/s, ours / theirs", "time to the first token, ours / theirs"], rows)
    )


if __name__ == "__main__":
    main()
