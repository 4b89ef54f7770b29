"""The web page in a real browser, against a server with a real checkpoint."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.serve.limits import Limits

from crosstrain.config.load import load_config
from crosstrain.data.splits import prepare_data
from fixtures_ranks import train
from fixtures_server import Server, served
from fixtures_vision import options, picture, shapes, write_project

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason="needs chromium and playwright"
)
QUESTIONS = ("how many things are there", "where is the green triangle", "is it large or small")


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model that sees, or of $CROSSTRAIN_PAGE_CHECKPOINT, which answers better."""
    if given := os.environ.get("CROSSTRAIN_PAGE_CHECKPOINT"):
        with served(Path(given), name="shapes", limits=Limits(batch=2)) as running:
            yield running
        return
    folder = tmp_path_factory.mktemp("page")
    project = write_project(folder / "project.yaml", shapes(folder))
    chosen = options({"run.max_iters": 2})
    prepare_data(load_config(project, chosen))
    checkpoint = train(project, "out", *chosen).checkpoint(2)
    with served(checkpoint, name="shapes", limits=Limits(batch=2)) as running:
        yield running


@pytest.fixture(scope="module")
def locked(speaker: Path) -> Iterator[Server]:
    """A server of text that wants a key."""
    with served(speaker, key="secret", limits=Limits(batch=2)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, server: Server) -> tuple[Any, list[str]]:
    """The page, and what it complains of or asks elsewhere."""
    page = browser.new_page(viewport={"width": 1180, "height": 760}, device_scale_factor=1)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    home = f"http://127.0.0.1:{server.port}/"
    page.on("request", lambda r: trouble.append(r.url) if not r.url.startswith((home, "data:")) else None)
    page.goto(home)
    return page, trouble


@needs_browser
@pytest.mark.slow
def test_the_page_talks_about_images(eyes: Server, browser: Any, tmp_path: Path) -> None:
    page, trouble = opened(browser, eyes)
    page.wait_for_function("() => document.title === 'shapes'")
    assert "takes images" in page.inner_text("#about")
    image = os.environ.get("CROSSTRAIN_PAGE_IMAGE") or str(picture(tmp_path / "0.png", 0, (160, 160)))
    page.set_input_files("#file", image)
    page.wait_for_selector("#images img")
    page.evaluate(
        "() => { const s = document.getElementById('temperature'); s.value = 0; s.dispatchEvent(new Event('input')); }"
    )
    page.fill("#max_tokens", "32")
    for question in QUESTIONS:
        page.fill("#text", question)
        page.press("#text", "Enter")
        page.wait_for_selector(".turn.assistant:last-child .note")
    assert page.locator(".turn.user").count() == page.locator(".turn.assistant").count() == len(QUESTIONS)
    assert page.locator(".turn.user img").count() == 1
    assert page.inner_text(".turn.user:first-child") == QUESTIONS[0]
    assert "tokens" in page.inner_text(".turn.assistant:last-child .note")
    if keep := os.environ.get("CROSSTRAIN_PAGE_SCREENSHOT"):
        page.screenshot(path=keep)
    page.click("#new")
    assert page.locator(".turn").count() == 0
    assert trouble == []
    page.close()


@needs_browser
@pytest.mark.slow
def test_the_page_asks_for_a_key_shows_refusals_and_stops(
    locked: Server, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, trouble = opened(browser, locked)
    page.wait_for_selector("#keybox:visible")
    assert "key is required" in page.inner_text("#about")
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    page.wait_for_function("() => document.title === 'tiny'")
    assert page.locator("#attach").is_hidden()
    page.fill("#max_tokens", "5000")
    page.fill("#text", "ban")
    page.click("#send")
    page.wait_for_selector(".note.error")
    assert "do not fit" in page.inner_text(".note.error")
    assert page.input_value("#text") == "ban"  # to send again
    evaluate = locked.runner.evaluate

    def slow(batch: Any) -> Any:
        page_waits.wait(0.1)
        return evaluate(batch)

    page_waits = threading.Event()
    monkeypatch.setattr(locked.runner, "evaluate", slow)
    page.fill("#max_tokens", "60")
    page.click("#send")
    page.wait_for_function("() => [...document.querySelectorAll('.turn.busy')].some(t => t.textContent.length > 2)")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    for _ in range(50):
        if locked.health()["running"] == 0:
            break
        page_waits.wait(0.05)
    assert locked.health()["running"] == 0, "who stops frees the place"
    assert [t for t in trouble if "status of 4" not in t] == []
    page.close()
