"""The clock of the fixes and of the connector events, in monotonic seconds. `kvfix lab` replaces `now`."""

import time

now = time.monotonic
