"""Define the options that several commands of `kvfix` share, and helpers that define an option of one command."""

from typing import Annotated, Any

import typer


def value(metavar: str, does: str, *names: str) -> Any:
    """Return an option with a value. names: the option's names, if they differ from the parameter's name."""
    return typer.Option(*names, metavar=metavar, help=does)


def several(metavar: str, does: str) -> Any:
    return value(metavar, f"{does}. May be given several times.")


def flag(name: str, does: str) -> Any:
    return typer.Option(name, help=does)


def end(code: int | None, **_: Any) -> None:
    """End the program with the exit code that a command has returned."""
    raise typer.Exit(code or 0)


Json = Annotated[bool, flag("--json", "Print JSON.")]
Names = list[str] | None
_LISTED = "(kvfix status --json lists CODE and SLUG)"
Only = Annotated[Names, several("CODE|SLUG", f"Apply only this fix {_LISTED}")]
Skip = Annotated[Names, several("CODE|SLUG", f"Leave out this fix {_LISTED}")]
Plus = Annotated[Names, several("CODE|SLUG", f"Apply this opt-in fix too {_LISTED}")]
MODES = "fix: apply the fixes. observe: also record events. check: also check the rules."
#: Typer's settings for a command whose arguments are another command line, such as `vllm serve ...`.
ANY_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
