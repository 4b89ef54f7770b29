"""Evaluate a checkpoint and generate text: python evaluate.py --checkpoint output/quickstart"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "platform"))

from crosstrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
