"""The time that corrections go by. The lab puts its own in its place."""

from __future__ import annotations

import time

#: Seconds; the same clock for all, and it never goes back.
now = time.monotonic
