"""Logging to the terminal, above the progress bar, and to a file."""

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from crosstrain.utils.errors import printable
from crosstrain.utils.files import append

log = logging.getLogger("crosstrain")

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"  # for log files

# Silence messages that libraries print about their own code. Some libraries use names that torch 2.13 and 2.14
# deprecate; torch 2.15 keeps the old and the new names. On a CPU, bitsandbytes reports a missing package that it does
# not need. transformers imports torchao if it is installed, and torchao registers enums that torch 2.14 already has.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
)
for _name in ("bitsandbytes", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class _Handler(logging.Handler):
    """A handler that survives failed writes. Only the first failure, such as a full disk, is printed to stderr."""

    failed = False

    def __init__(self, name: str, write: Callable[[str], None]) -> None:
        super().__init__()
        self.place, self.write = name, write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Generated text, and names in a checkpoint, may contain control characters.
            self.write(printable(self.format(record)) + "\n")
        except OSError as error:
            if not self.failed:
                self.failed = True
                with suppress(OSError):
                    print(f"{self.place} cannot be written to ({error.strerror}); training continues", file=sys.stderr)


def _print_above_bar(text: str) -> None:
    from tqdm import tqdm  # here, because `crosstrain --help` should start fast

    tqdm.write(text, file=sys.stdout, end="")
    sys.stdout.flush()


def set_up_logging(log_file: Path | None, quiet: bool) -> None:
    """Log to the console and to `log_file`. With `quiet` (all ranks but the first) only warnings are logged."""
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.propagate = False
    log.handlers.clear()
    log.addHandler(_Handler("the console", _print_above_bar))
    if log_file is not None:
        file = _Handler(str(log_file), partial(append, log_file))
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt=TIME_FORMAT))
        log.addHandler(file)
