"""Define the command `kvfix` with its subcommands and options. A subcommand imports slow modules only when it runs."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

import kvfix
from kvfix.config import Config
from kvfix_tools import mcp_server, screen, status, upstream
from kvfix_tools.command_options import ANY_WORDS, MODES, Json, Names, Only, Plus, Skip, end, flag, several, value
from kvfix_tools.conform import command as conform
from kvfix_tools.lab.cli import app as lab

_CRASHED, _BEFORE, _RUNS, _MAINTAIN = "When it crashed", "Before you launch", "While it runs", "For maintainers"
#: {command: its heading in the help}, in the order in which a user needs the commands.
COMMANDS = {
    "diagnose": _CRASHED, "search": _CRASHED, "explain": _CRASHED, "replay": _CRASHED,
    "status": _BEFORE, "run": _BEFORE, "doctor": _BEFORE, "roundtrip": _BEFORE,
    "verify": _RUNS, "look": _RUNS, "attach": _RUNS, "detach": _RUNS, "dump": _RUNS,
    "lab": _MAINTAIN, "conform": _MAINTAIN, "upstream": _MAINTAIN, "mcp": _MAINTAIN,
}  # fmt: skip


_EXIT = """Most commands exit with 0 (no bug was found), 1 (a bug or violation was found), 2 (wrong usage, or a file
cannot be read or written) or 77 (the check could not run here)."""


class _InOrder(TyperGroup):
    def list_commands(self, ctx: object) -> list[str]:
        return [name for name in COMMANDS if name in self.commands]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvfix {kvfix.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_InOrder,
    result_callback=end,
    name="kvfix",
    help=f"Find and fix known bugs of KV-cache connectors in vLLM and LMCache.\n\n{_EXIT}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # "rich" markup would remove words in square brackets from the help
)

app.add_typer(lab, name="lab", rich_help_panel=_MAINTAIN)
app.add_typer(upstream.app, name="upstream", rich_help_panel=_MAINTAIN)
app.command("status", rich_help_panel=COMMANDS["status"])(status.status)
app.command("conform", rich_help_panel=COMMANDS["conform"])(conform.conform)
app.command("mcp", rich_help_panel=COMMANDS["mcp"])(mcp_server.serve)

_PID = "Process ID of the engine. kvfix includes all child processes of this process."
Pid = Annotated[int, typer.Argument(metavar="PID", help=_PID)]
Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]
Wait = Annotated[float, value("SECONDS", "Wait at most this many seconds until the engine is between two steps.")]
_AUDIT = """Only with --mode check or strict. vLLM recomputes this fraction (0 to 1) of the hits. kvfix compares the
result with the cached KV."""
_SYMPTOM = "Describe the symptom, or name a file with the description (-: stdin)."
_LAUNCHED = "The command that you will launch: vllm serve ..., lmcache server ..."
_SERVER = "Read the options and the release of the LMCache server from its HTTP port."
_FAIL_ON = """With certain, exit 1 if a finding is certain. With an effect (crash, wrong, hang, leak, slow or risk; the
worst first), exit 1 if a finding has this effect or a worse effect."""
_CORE = "Read a core file (needs kvfix[core]). Exit 1: at the time of the core file, a thread was in the connector."
_ISSUE = "Write a bug report to post, with versions, settings, a summary of the log, and links to known issues."
_DECODE = "Address of a decode instance. Give this address if the server is a router of prefill and decode instances."


@app.callback()
def main_options(version: Version = False) -> None:
    """Declare the options that a user types before the command."""


@app.command(context_settings=ANY_WORDS, rich_help_panel=COMMANDS["run"])
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD ...", help="The program and its arguments.")],
    mode: Annotated[str, typer.Option(help=f"{MODES} strict: also raise on a violation.")] = "fix",
    only: Only = None,
    skip: Skip = None,
    plus: Plus = None,
    layers: Annotated[bool, flag("--layers", "Also record hooks that run once per layer. Not with mode fix.")] = False,
    audit: Annotated[float, typer.Option(help=_AUDIT)] = 0,
) -> int:
    """Run a program, such as `vllm serve` or `lmcache server`, with the fixes in all its processes.

    The program replaces kvfix, so the exit code is the program's. 127: no such program. 126: the program cannot run.
    """
    try:
        choice = Config(mode, only, skip, layers, plus, audit)
    except ValueError as error:
        return screen.error(f"kvfix run: {error}")
    program = shutil.which(command[0])
    if program is None:
        return screen.error(f"kvfix run: {command[0]}: no such program on PATH", 127)
    if not Config.is_off(os.environ.get("KVFIX")):
        kvfix.apply(choice.mode, choice.only, choice.skip, choice.layers, choice.plus, choice.audit)
    else:
        print("kvfix run: KVFIX=off is set, so the program runs unpatched. To patch it: unset KVFIX", file=sys.stderr)
    bootstrap = str(Path(kvfix.__file__).with_name("bootstrap"))
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([bootstrap, *(each for each in places if each not in ("", bootstrap))])
    try:
        os.execv(program, list(command))
    except OSError as error:
        return screen.error(f"kvfix run: {program}: {error.strerror}", 126)


@app.command(rich_help_panel=COMMANDS["explain"])
def explain(name: Annotated[str, typer.Argument(metavar="CODE|SLUG")], json: Json = False) -> None:
    """Explain a fix (KVF...), a finding in logs (KVD...) or a rule (KVR..., LAB...) by its code or its name (slug)."""
    from kvfix_tools import explain

    raise typer.Exit(explain.explain(name, json))


@app.command(rich_help_panel=COMMANDS["search"])
def search(text: Annotated[str, typer.Argument(metavar="TEXT|FILE|-", help=_SYMPTOM)], json: Json = False) -> None:
    """Find the fix, known problem or rule that explains a symptom. Show the three best matches."""
    from kvfix_tools import search

    raise typer.Exit(search.search(text, json))


@app.command(rich_help_panel=COMMANDS["replay"])
def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recorder files, or bundles of kvfix dump.")],
    router: Annotated[Path | None, value("LOG", "Also read this log of the router in front of the engines.")] = None,
    json: Json = False,
) -> None:
    """Check the events that kvfix recorded in engines. Exit 1 if an event violates a rule.

    Print the history of each violation. Files may come from several processes, ranks and nodes.
    """
    from kvfix_tools import replay

    raise typer.Exit(replay.replay(files, json, router))


@app.command(rich_help_panel=COMMANDS["dump"])
def dump(
    pid: Pid,
    out: Annotated[Path, value("DIR", "Write the bundle into this folder.", "-o")] = Path(),
    json: Json = False,
) -> None:
    """Write one tar.gz with the stacks of a running or hung engine, and the events that kvfix recorded in the engine.

    Exit 0: the bundle is written. 77: the bundle is written, but kvfix could read no process of the engine.
    """
    from kvfix_tools.dump import command

    raise typer.Exit(command.dump(pid, out, json))


@app.command(rich_help_panel=COMMANDS["look"])
def look(
    pid: Annotated[int | None, typer.Argument(metavar="PID", help="Any process of the engine.")] = None,
    watch: Annotated[bool, flag("--watch", "Redraw once a second, and show each counter's growth per second.")] = False,
    request: Annotated[str, value("ID", "Show one request in full.")] = "",
    json: Json = False,
    save: Annotated[str, value("FILE", "Save the state, with the blocks of each request.")] = "",
    core: Annotated[str, value("FILE", _CORE)] = "",
) -> None:
    """Show why a running engine makes no progress, and what to do. The engine does not need kvfix.

    Exit 0: no problem. 1: a problem was found. 77: kvfix cannot read the process.
    """
    from kvfix_tools.look import command

    if (pid is None) == (not core):
        raise typer.BadParameter("give a PID, or --core FILE")
    if pid is None:
        raise typer.Exit(command.look_at_core(core, json))
    raise typer.Exit(command.look(pid, watch, request, json, save))


@app.command(rich_help_panel=COMMANDS["attach"])
def attach(
    pid: Pid,
    mode: Annotated[str, typer.Option(help=MODES)] = "fix",
    only: Only = None,
    plus: Plus = None,
    idle: Annotated[bool, flag("--idle", "Wait until the engine has no request, then apply the fixes.")] = False,
    wait: Wait = 60.0,
    json: Json = False,
) -> None:
    """Apply the fixes to a running engine, between two of its steps.

    Exit 0: all processes have the fixes. 1: a failure, and the output says why. 77: kvfix cannot trace a process.
    """
    from kvfix_tools.look import attach

    raise typer.Exit(attach.attach(pid, mode, only, idle, wait, json, plus))


@app.command(rich_help_panel=COMMANDS["detach"])
def detach(pid: Pid, wait: Wait = 60.0, json: Json = False) -> None:
    """Remove all fixes from a running engine.

    Exit 0: no process has a fix now. 1: a process failed, and the output says why. 77: kvfix cannot trace a process.
    """
    from kvfix_tools.look import attach

    raise typer.Exit(attach.detach(pid, wait, json))


@app.command(context_settings=ANY_WORDS, rich_help_panel=COMMANDS["doctor"])
def doctor(
    command: Annotated[Names, typer.Argument(metavar="[-- CMD ...]", help=_LAUNCHED)] = None,
    json: Json = False,
    server_http: Annotated[str, value("HOST:PORT", _SERVER)] = "",
    names: Annotated[bool, flag("--list", "List the checks.")] = False,
) -> None:
    """Check a set-up before you launch it. Starts nothing and changes nothing.

    Exit 0: no problem was found. 1: a problem was found. 77: no essential check could run here.
    """
    from kvfix_tools.doctor import command as work

    raise typer.Exit(work.doctor(command or [], json, server_http, names))


@app.command(rich_help_panel=COMMANDS["diagnose"])
def diagnose(
    paths: Annotated[list[str], typer.Argument(metavar="PATH... | -", help="Read these logs or folders. -: stdin.")],
    json: Annotated[bool, flag("--json", "Print JSON. This is the same as --format json.")] = False,
    output_format: Annotated[str, value("text|json|github", "Choose the output format.", "--format")] = "",
    select: Annotated[Names, several("CODE", "Show only findings whose code begins with CODE")] = None,
    ignore: Annotated[Names, several("CODE", "Leave out findings whose code begins with CODE")] = None,
    fail_on: Annotated[str, value("WHAT", _FAIL_ON)] = "certain",
    exit_zero: Annotated[bool, flag("--exit-zero", "Exit 0 even if there are findings.")] = False,
    request: Annotated[str, value("ID", "Show the whole history of one request.")] = "",
    html: Annotated[str, value("FILE", "Write a self-contained HTML page.")] = "",
    brief: Annotated[str, value("FILE", "Write a summary of the log, at most 8 kB. FILE may be - for stdout.")] = "",
    issue: Annotated[str, value("FILE", _ISSUE)] = "",
    everything: Annotated[bool, flag("--all", "Show every finding in full.")] = False,
    version: Version = False,
) -> None:
    """Find known bugs in a log. Exit 1 if a finding is certain.

    For each finding, show the values in the log, the cause, and what to do.
    """
    from kvfix_tools.diagnose import command
    from kvfix_tools.diagnose.command import FORMATS, Options

    printed = output_format or ("json" if json else "text")
    if printed not in FORMATS:
        raise typer.BadParameter("--format is text, json or github")
    options = Options(
        format=printed, request=request, html=html, brief=brief, issue=issue,
        everything=everything, select=tuple(select or ()), ignore=tuple(ignore or ()), fail_on=fail_on,
        exit_zero=exit_zero,
    )  # fmt: skip
    raise typer.Exit(command.main(paths, options))


@app.command(add_help_option=False, context_settings=ANY_WORDS, rich_help_panel=COMMANDS["roundtrip"])
def roundtrip(arguments: Annotated[Names, typer.Argument(metavar="[OPTIONS]")] = None) -> int:
    """Check that every byte of KV survives the copy to the host and back."""
    if find_spec("torch") is None:
        what = "kvfix roundtrip: torch is not installed for this Python. Run kvfix roundtrip with the engine's Python"
        return screen.error(what, 77)
    from kvfix_tools.roundtrip import command

    return command.main(arguments or [])


@app.command(rich_help_panel=COMMANDS["verify"])
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of vLLM's server: http://localhost:8000")],
    model: Annotated[str, value("NAME", "Test this model. Default: the first model of the server.")] = "",
    decode: Annotated[str, value("URL", _DECODE)] = "",
    requests: Annotated[int, typer.Option(min=16, help="Test this many prompts. More prompts find rarer errors.")] = 48,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 1200,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk. 0: measure the chunk size.")] = 0,
    clients: Annotated[int, typer.Option(min=2, help="Send this many requests at once to put load on the server.")] = 8,
    seconds: Annotated[float, typer.Option(help="Stop after this many seconds.")] = 300.0,
    api_key_env: Annotated[str, value("NAME", "Read the API key from this environment variable.")] = "",
    dry_run: Annotated[bool, flag("--dry-run", "Print how many requests are needed. Send no prompt.")] = False,
    json: Json = False,
) -> int:
    """Check that a running server gives the same answers with and without KV from the connector.

    Exit 0: the answers are the same. 1: answers differ. 2: the server cannot be reached, refuses a request, or ends in
    the middle of an answer. 77: the check could not decide, and the output says why.
    """
    if find_spec("httpx") is None or find_spec("prometheus_client") is None:
        return screen.error("kvfix verify needs httpx and prometheus_client: pip install httpx prometheus_client", 77)
    from kvfix_tools.verify import command

    options = command.Options(
        url, model, decode, requests, prompt_tokens, chunk, clients, seconds, api_key_env, json, dry_run
    )
    return command.verify(options)


def main() -> None:
    app()


def main_diagnose() -> None:
    """Entry point of `kvfix-diagnose`, a program that has only the command `diagnose`."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(diagnose)
    alone(prog_name="kvfix-diagnose")


if __name__ == "__main__":
    main()
