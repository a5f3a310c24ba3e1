"""The configuration: a mode and a choice of fixes. The environment variable KVFIX holds the configuration as text.

`activation.apply` describes the modes. Examples:

    KVFIX=fix                      apply all fixes that are not opt-in
    KVFIX="fix only=KVF001"        apply only the named fixes
    KVFIX="fix skip=KVF001,KVF002" apply all fixes that are not opt-in, except for the named fixes
    KVFIX="fix plus=KVF017"        apply all fixes that are not opt-in, and the named opt-in fixes
    KVFIX="check skip=KVF001"      use mode `check`, and apply the fixes as with "fix skip=KVF001"
    KVFIX="observe layers=yes"     use mode `observe`, and also count the hooks that run once per layer
    KVFIX="check audit=0.001"      use mode `check`, and compare one cached hit in a thousand with computed KV
    KVFIX=off                      apply no fixes, even if a program calls kvfix.apply()
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

#: fix applies fixes. observe also records hooks. check also checks rules. strict also raises violations as exceptions.
MODES = ("fix", "observe", "check", "strict")


class Config:
    """A configuration. The attributes `only`, `skip` and `plus` contain codes of fixes, never slugs.

    If `only` is None, the configuration wants all fixes that are not opt-in. If `audit` is 0, there is no audit. The
    constructor raises ValueError for a wrong argument.
    """

    def __init__(
        self,
        mode: str,
        only: Iterable[str] | None = None,
        skip: Iterable[str] | None = None,
        layers: bool = False,
        plus: Iterable[str] | None = None,
        audit: float | str = 0,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
        if layers and mode == "fix":
            raise ValueError(f"mode fix does not record hooks, so layers needs mode {' or '.join(MODES[1:])}")
        self.audit = _fraction(audit)
        if self.audit and mode not in MODES[2:]:
            raise ValueError(f"mode {mode} checks no rule, so audit needs mode {' or '.join(MODES[2:])}")
        self.mode = mode
        self.only = None if only is None else _codes(only)
        self.skip = _codes(skip or ())
        self.layers = bool(layers)
        self.plus = _codes(plus or ())

    @classmethod
    def parse(cls, text: str) -> Config:
        """Parse the text that `__str__` returns. Raise ValueError if the text is not a configuration."""
        mode, *rest = text.split()
        lists: dict[str, list[str]] = {}
        for word in rest:
            key, equals, value = word.partition("=")
            if key not in ("only", "skip", "plus", "layers", "audit") or not equals or key in lists:
                raise ValueError(f"{word!r} is not understood")
            if key == "layers" and value != "yes":
                raise ValueError(f"{word!r} is not understood: write layers=yes, or leave it out")
            lists[key] = [name for name in value.split(",") if name]
        audit = ",".join(lists.get("audit", ["0"]))
        return cls(mode, lists.get("only"), lists.get("skip"), "layers" in lists, lists.get("plus"), audit)

    @staticmethod
    def is_off(text: str | None) -> bool:
        return text is not None and text.strip().lower() in ("off", "0", "no", "none", "false")

    def __str__(self) -> str:
        only = "" if self.only is None else f" only={','.join(sorted(self.only))}"
        skip = f" skip={','.join(sorted(self.skip))}" if self.skip else ""
        plus = f" plus={','.join(sorted(self.plus))}" if self.plus else ""
        audit = f" audit={self.audit}" if self.audit else ""
        return self.mode + only + skip + plus + (" layers=yes" if self.layers else "") + audit

    def takes(self, code: str, opt_in: bool = False) -> bool:
        """Return True if the configuration wants this fix. An opt-in fix must be in `only` or `plus`."""
        if code in self.skip:
            return False
        return code in self.plus or (not opt_in if self.only is None else code in self.only)


def _fraction(value: float | str) -> float:
    """Return `audit` as a float. Raise ValueError for anything but a number from 0 to 1."""
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise ValueError(f"audit={value} is not understood: write a fraction of the hits, such as audit=0.001")
    return found


def _codes(names: Iterable[str]) -> frozenset[str]:
    names = names.split(",") if isinstance(names, str) else list(names)
    if not names:
        return frozenset()
    from kvfix import engine_log, fixes  # imported only here, because the import takes 20 ms

    known = {code: slug for code, (slug, _) in fixes.modules().items()}
    by_slug = {slug: code for code, slug in known.items()}
    codes = set()
    for name in names:
        code = name.strip().upper()
        if code in fixes.RETIRED:
            engine_log.warning(f"{code} is retired and left out: {fixes.RETIRED[code]}")
            continue
        if code not in known:
            code = by_slug.get(name.strip().lower(), "")
        if not code:
            raise ValueError(f"unknown fix {name!r}: {_like(name, known)}")
        codes.add(code)
    return frozenset(codes)


def _like(name: str, known: dict[str, str]) -> str:
    """Return advice for an unknown name of a fix. known: {code: slug}."""
    from difflib import get_close_matches

    if not known:
        return "this installation of kvfix has no fixes; reinstall it"
    # Compare only slugs, because all codes are similar to each other.
    near = get_close_matches(name.strip().lower(), known.values(), n=1)
    guess = "".join(f"did you mean {code} ({slug})? " for code, slug in known.items() if slug in near)
    return f"{guess}`kvfix status --all` lists the known fixes"
