"""Run `python -m kvfix_tools.roundtrip`. With `--backend torch`, this command needs no package except torch."""

import sys

from kvfix_tools.roundtrip.command import main

if __name__ == "__main__":
    sys.exit(main())
