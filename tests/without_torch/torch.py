"""Replace torch for `make quick`. In pytest, skip the test. In a program that a test starts, create a file and exit."""

import os

wanted = os.environ["KVFIX_TEST_WANTS_TORCH"]
if wanted.endswith(f"-{os.getpid()}"):
    import pytest
    from tests import quick

    pytest.skip(quick.WHY, allow_module_level=True)
open(wanted, "w").close()
os._exit(77)
