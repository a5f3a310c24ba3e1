"""`python -m kvfix_tools.roundtrip`: needs torch, and for the backend `torch` nothing else."""

import sys

from kvfix_tools.roundtrip.command import main

if __name__ == "__main__":
    sys.exit(main())
