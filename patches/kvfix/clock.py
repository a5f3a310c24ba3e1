"""The clock of the fixes and the connector events. The lab replaces `now` by its own clock."""

import time

#: The time in seconds of the monotonic clock.
now = time.monotonic
