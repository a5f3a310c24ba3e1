"""`make bench` runs __main__.py, which runs the other modules of this folder."""

from math import inf
from typing import NamedTuple


class Row(NamedTuple):
    """A promised limit and the measured value, both in `unit`. context: further values of the run, for comparison."""

    what: str
    measured: float
    unit: str
    context: str
    at_most: float = inf
    at_least: float = -inf

    @property
    def promise(self) -> str:
        return f"<= {self.at_most:g} {self.unit}" if self.at_most < inf else f">= {self.at_least:g} {self.unit}"

    @property
    def kept(self) -> bool:
        return self.at_least <= self.measured <= self.at_most
