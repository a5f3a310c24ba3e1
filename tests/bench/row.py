"""One measured promise."""

from typing import NamedTuple


class Row(NamedTuple):
    """A measured value in `unit`. context: other values of the same run, such as the value to compare with."""

    what: str
    measured: float
    unit: str
    context: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def promise(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g} {self.unit}"
        return f">= {self.at_least:g} {self.unit}"

    @property
    def kept(self) -> bool:
        if self.at_most is not None:
            return self.measured <= self.at_most
        return self.at_least is None or self.measured >= self.at_least
