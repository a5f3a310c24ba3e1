"""`python -m kvfix_tools.roundtrip`, which needs only torch for the backend `torch`."""

import sys

from kvfix_tools.roundtrip.command import main

if __name__ == "__main__":
    sys.exit(main())
