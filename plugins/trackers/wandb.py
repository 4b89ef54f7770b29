"""Weights & Biases. https://docs.wandb.ai/ref/python"""

import os
import secrets
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

from crosstrain import Row, Text, TrackedRun, Tracker, UserError, registry, require, scalars, texts


@registry.register_tracker("wandb")
class WandbTracker(Tracker):
    """Weights & Biases, on its servers or on disk for `wandb sync`."""

    remote = True

    @dataclass
    class Options:
        project: Text = "crosstrain"  # name of the project; created if it does not exist
        entity: Text | None = None  # user or team; None: the account's default
        run_name: Text | None = None  # name of the run; None: the name of the run's folder
        group: Text | None = None  # group of related runs; None: no group
        tags: list[Text] = field(default_factory=list)  # tags for filtering runs
        mode: Literal["online", "offline"] | None = None  # None: WANDB_MODE, else online

    @classmethod
    def check(cls, options: Options) -> None:
        wandb = require("wandb", "tracker 'wandb'")
        if (options.mode or os.environ.get("WANDB_MODE", "online")) != "online":
            return
        try:
            logged_in = wandb.login(prompt=False, verify=False)
        except wandb.Error as error:
            raise UserError(f"wandb: {error}") from error
        if not logged_in:
            raise UserError("wandb is not logged in; run `wandb login`, set WANDB_API_KEY, or set mode: offline")

    def __init__(self, options: Options, run: TrackedRun) -> None:
        super().__init__(options, run)
        wandb = self._wandb = require("wandb", "tracker 'wandb'")
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.run_name or run.name,
            group=options.group,
            tags=options.tags or None,
            mode=options.mode,
            config=run.config,
            dir=str(run.folder.resolve()),
            id=run.remembered("wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            reinit="create_new",
            # log.txt already has the console output, and a tracker should not upload the project's code.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )

    def log(self, row: Row) -> None:
        # wandb ignores steps that the interrupted run already sent.
        pages = {tag: self._wandb.Html(f"<pre>{escape(text)}</pre>") for tag, text in texts(row)}
        self._run.log(dict(scalars(row)) | pages, step=row["step"])

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0)

    def place(self) -> str:
        return f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)
