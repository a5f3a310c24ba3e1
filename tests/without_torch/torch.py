"""This module replaces torch for `make quick`. It skips the test in pytest, and ends a test's program after a note."""

import os

wanted = os.environ["KVFIX_TEST_WANTS_TORCH"]
if wanted.endswith(f"-{os.getpid()}"):
    import pytest
    from tests import quick

    pytest.skip(quick.WHY, allow_module_level=True)
open(wanted, "w").close()
os._exit(77)
