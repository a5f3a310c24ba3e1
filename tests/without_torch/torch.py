"""In place of torch, for `make quick`: the test is skipped. A program of a test ends, and makes a file that says so."""

import os

wanted = os.environ["KVFIX_TEST_WANTS_TORCH"]
if wanted.endswith(f"-{os.getpid()}"):
    import pytest
    from tests import quick

    pytest.skip(quick.WHY, allow_module_level=True)
open(wanted, "w").close()
os._exit(77)
