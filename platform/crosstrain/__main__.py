"""`python -m crosstrain`."""

import sys

from crosstrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
