"""Processes that a fork leaves hanging are started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import ENVIRONMENT

PROGRAM = """
import os, sys, time
from crosstrain.utils import forks

def hang():  # as a lock that a thread held at the fork makes the child
    try:
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
        time.sleep(600)
    except FileExistsError:
        pass

os.register_at_fork(after_in_child=hang)
forks.PATIENCE = 1.0
context = forks.CheckedForkContext()
answers = context.SimpleQueue()
child = context.Process(target=lambda: answers.put("done"))
child.start()
child.join()
print(answers.get(), child.exitcode)
"""


def test_a_process_that_never_begins_is_started_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "hung")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "done 0\n", done.stderr
    assert (tmp_path / "hung").exists()


MANY_FILES = """
import os
from crosstrain.utils import forks

held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # select() takes no descriptor above 1023
child = forks.CheckedForkContext().Process(target=lambda: None)
child.start()
child.join()
print(child.exitcode)
"""


def test_a_process_begins_beside_a_thousand_open_files() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY_FILES], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "0\n", done.stderr
