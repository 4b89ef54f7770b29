"""Processes that are spawned without running the main script again, which may lack `if __name__ == "__main__"`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def main_hidden() -> Iterator[None]:
    """Hide the main module from processes that are spawned in the block; what they run must be importable."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file
    try:
        yield
    finally:
        sys.modules["__main__"] = main
