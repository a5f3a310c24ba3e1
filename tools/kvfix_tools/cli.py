"""The command `kvfix`: its subcommands and their options. Each subcommand has its own module.

Exit codes of all commands: 0 nothing found, 1 findings, 2 usage or unreadable input, 77 could not be checked here.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvfix
from kvfix_tools.lab.cli import app as lab


class _InOrder(TyperGroup):
    """List the commands in the order in which a user needs them."""

    def list_commands(self, ctx: object) -> list[str]:
        return [name for name in COMMANDS if name in self.commands]


#: {command: heading in the help}, in the order of use.
_CRASHED, _BEFORE, _RUNS, _MAINTAIN = "When it crashed", "Before you launch", "While it runs", "For maintainers"
COMMANDS = {
    "diagnose": _CRASHED, "search": _CRASHED, "explain": _CRASHED, "replay": _CRASHED,
    "status": _BEFORE, "run": _BEFORE, "doctor": _BEFORE, "roundtrip": _BEFORE,
    "verify": _RUNS, "look": _RUNS, "attach": _RUNS, "detach": _RUNS, "dump": _RUNS,
    "lab": _MAINTAIN, "conform": _MAINTAIN, "upstream": _MAINTAIN, "mcp": _MAINTAIN,
}  # fmt: skip

app = typer.Typer(
    cls=_InOrder,
    name="kvfix",
    help="Find and fix known bugs of KV-cache connectors in vLLM and LMCache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # "rich" markup would remove words in square brackets from the help
)

app.add_typer(lab, name="lab", rich_help_panel=_MAINTAIN)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvfix {kvfix.__version__}")
        raise typer.Exit


def _value(metavar: str, does: str, *names: str) -> Any:
    """Return an option with a value. names: if they differ from the parameter's name."""
    return typer.Option(*names, metavar=metavar, help=does)


def _several(metavar: str, does: str) -> Any:
    """Return an option that may be given several times."""
    return _value(metavar, f"{does}. May be given several times.")


def _flag(name: str, does: str) -> Any:
    return typer.Option(name, help=does)


_PID = "Process ID of the engine. kvfix includes all child processes of this process."
Pid = Annotated[int, typer.Argument(metavar="PID", help=_PID)]
Json = Annotated[bool, _flag("--json", "Print JSON.")]
Names = list[str] | None
Only = Annotated[Names, _several("CODE|SLUG", "Apply this fix and no others")]
Skip = Annotated[Names, _several("CODE|SLUG", "Leave out this fix")]
Plus = Annotated[Names, _several("CODE|SLUG", "Apply this opt-in fix too")]
Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]
#: Settings of a command whose arguments are a command of the user.
_ANY_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@app.callback()
def main_options(version: Version = False) -> None:
    """Options before the command."""


_PID_OR_FIX = "Show the fixes that are applied in a running engine (PID), or the rows of these fixes."
_OF_TRANSFER = "Count only bugs of the connectors in this value of vLLM's --kv-transfer-config."
_EFFECT = "Show rows of one effect: wrong-output, crash, hang, leak or lost-hits."
_RELEASED = "Show whether the newest LMCache and vLLM of the package index have changed the fixed functions (uses pip)."


@app.command(rich_help_panel=COMMANDS["status"])
def status(
    names: Annotated[Names, typer.Argument(metavar="[PID|KVF...]", help=_PID_OR_FIX)] = None,
    json: Json = False,
    everything: Annotated[bool, _flag("--all", "Show the row of every fix.")] = False,
    connector: Annotated[str, _value("NAME[,NAME]", "Count only bugs that concern these connectors.")] = "",
    transfer_config: Annotated[str, _value("JSON", _OF_TRANSFER, "--kv-transfer-config")] = "",
    severity: Annotated[str, _value("EFFECT", _EFFECT)] = "",
    probe: Annotated[bool, typer.Option(help="Import vLLM and LMCache, and run the behaviour probes.")] = False,
    released: Annotated[bool, _flag("--released", _RELEASED)] = False,
) -> None:
    """Show which known bugs this installation has and which of them kvfix fixes. Exit 1 if a bug is not fixed."""
    names = names or []
    if len(names) == 1 and names[0].isdigit():
        from kvfix_tools.look import attach

        raise typer.Exit(attach.status(int(names[0]), json))
    if released:
        if probe or everything or names or connector or severity or transfer_config:
            raise typer.BadParameter("--released takes no other option: it does not read the installation")
        from kvfix_tools import status_released

        raise typer.Exit(status_released.status(json))
    from kvfix_tools import status

    raise typer.Exit(status.status(json, probe, everything, names, connector, severity, transfer_config))


@app.command(rich_help_panel=COMMANDS["explain"])
def explain(name: Annotated[str, typer.Argument(metavar="CODE|SLUG")], json: Json = False) -> None:
    """Explain a fix (KVF...), a rule (KVR...) or a finding in logs (KVD...)."""
    from kvfix_tools import explain

    raise typer.Exit(explain.explain(name, json))


_SYMPTOM = "Describe the symptom, or name a file with the description."


@app.command(rich_help_panel=COMMANDS["search"])
def search(
    text: Annotated[str, typer.Argument(metavar="TEXT|FILE|-", help=_SYMPTOM)],
    json: Json = False,
) -> None:
    """Find fixes, known problems and rules by the words of a text. Show the best three, and how to confirm each."""
    from kvfix_tools import search

    raise typer.Exit(search.search(text, json))


@app.command(rich_help_panel=COMMANDS["replay"])
def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...")],
    router: Annotated[Path | None, _value("LOG", "Read the log of the router between the engines too.")] = None,
    json: Json = False,
) -> None:
    """Check recorder files or bundles again, and print the history of each violation. Exit 1 if there is a violation.

    The files may come from several processes, ranks and nodes, and from prefill and decode instances.
    """
    from kvfix_tools import replay

    raise typer.Exit(replay.replay(files, json, router))


@app.command(rich_help_panel=COMMANDS["mcp"])
def mcp(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Read files only below this folder.")] = Path(),
) -> None:
    """Run a Model Context Protocol server, which offers commands of kvfix to a language model (needs kvfix[mcp])."""
    from kvfix_tools import mcp_server

    raise typer.Exit(mcp_server.serve(root))


_CONNECTOR = "The connector's class, or its name in vLLM: ExampleConnector."
_CONFIG = """kv_connector_extra_config as JSON, or @FILE to read it from a file. kvfix replaces {dir} by a new, empty
folder for each engine."""
_LOSE = "Call this function to make the connector lose what it has stored."


@app.command(rich_help_panel=COMMANDS["conform"])
def conform(
    connector: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help=_CONNECTOR)],
    config: Annotated[str, _value("JSON", _CONFIG)] = "{}",
    lose: Annotated[str, _value("MODULE:FUNCTION", _LOSE)] = "",
    seconds: Annotated[float, typer.Option(help="Fuzz for this many seconds after the scenarios.")] = 30.0,
    seeds: Annotated[str, _value("A:B", "Draw schedules with these seeds.")] = "0:100000",
    fixes: Annotated[bool, typer.Option(help="Run vLLM with the fixes of kvfix, or as released.")] = True,
    json: Json = False,
    junit: Annotated[Path | None, _value("FILE", "Write JUnit XML.")] = None,
) -> None:
    """Test a KV connector against vLLM's connector interface, without a GPU. Exit 1 if a rule is violated."""
    from kvfix_tools.conform import command

    first, _, last = seeds.partition(":")
    try:
        drawn = range(int(first), int(last or int(first) + 1))
    except ValueError:
        raise typer.BadParameter("--seeds is A:B, or one number") from None
    raise typer.Exit(command.conform(connector, config, lose, seconds, drawn, fixes, json, junit))


@app.command(rich_help_panel=COMMANDS["dump"])
def dump(
    pid: Pid,
    out: Annotated[Path, _value("DIR", "Write the bundle into this folder.", "-o")] = Path(),
    json: Json = False,
) -> None:
    """Save stacks and flight recorders of a running or hung engine in one bundle (tar.gz)."""
    from kvfix_tools.dump import command

    raise typer.Exit(command.dump(pid, out, json))


@app.command(rich_help_panel=COMMANDS["look"])
def look(
    pid: Annotated[int | None, typer.Argument(metavar="PID", help="Any process of the engine.")] = None,
    watch: Annotated[bool, _flag("--watch", "Redraw once a second, with rates per second.")] = False,
    request: Annotated[str, _value("ID", "Show one request in full.")] = "",
    json: Json = False,
    save: Annotated[str, _value("FILE", "Save the state, with the blocks of each request.")] = "",
    core: Annotated[str, _value("FILE", "Read a core file instead of a process (needs kvfix[core]).")] = "",
) -> None:
    """Show why a running engine makes no progress, and what to do. The engine does not need kvfix.

    Exit 0: no problem was found. 1: a problem was found. 77: kvfix cannot read the engine.
    """
    from kvfix_tools.look import command, core_file

    if (pid is None) == (not core):
        raise typer.BadParameter("give a PID, or --core FILE")
    if pid is None:
        raise typer.Exit(core_file.look(core, json))
    raise typer.Exit(command.look(pid, watch, request, json, save))


Wait = Annotated[float, _value("SECONDS", "Wait at most this long for the end of a step.")]
_MODES = "fix: apply the fixes. observe: also record events. check: also check the rules."


@app.command(rich_help_panel=COMMANDS["attach"])
def attach(
    pid: Pid,
    mode: Annotated[str, typer.Option(help=_MODES)] = "fix",
    only: Only = None,
    plus: Plus = None,
    idle: Annotated[bool, _flag("--idle", "Wait until the engine has no request.")] = False,
    wait: Wait = 60.0,
    json: Json = False,
) -> None:
    """Apply the fixes to a running engine, between two of its steps. Exit 1 if a fix is not applied."""
    from kvfix_tools.look import attach

    raise typer.Exit(attach.attach(pid, mode, only, idle, wait, json, plus))


@app.command(rich_help_panel=COMMANDS["detach"])
def detach(pid: Pid, wait: Wait = 60.0, json: Json = False) -> None:
    """Remove all fixes from a running engine."""
    from kvfix_tools.look import attach

    raise typer.Exit(attach.detach(pid, wait, json))


_LAUNCHED = "The command that you will launch: vllm serve ..., lmcache server ..."
_SERVER = "Read the options and the release of the LMCache server from its HTTP port."


@app.command(context_settings=_ANY_WORDS, rich_help_panel=COMMANDS["doctor"])
def doctor(
    command: Annotated[Names, typer.Argument(metavar="[-- CMD ...]", help=_LAUNCHED)] = None,
    json: Json = False,
    server_http: Annotated[str, _value("HOST:PORT", _SERVER)] = "",
    names: Annotated[bool, _flag("--list", "List the checks.")] = False,
) -> None:
    """Check a set-up before you launch it. Starts nothing and changes nothing."""
    from kvfix_tools.doctor import command as work

    raise typer.Exit(work.doctor(command or [], json, server_http, names))


_AUDIT = """With --mode check: vLLM computes this fraction of the hits, and kvfix compares the computed KV with the
cache."""


@app.command(context_settings=_ANY_WORDS, rich_help_panel=COMMANDS["run"])
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD ...", help="The program and its arguments.")],
    mode: Annotated[str, typer.Option(help=f"{_MODES} strict: also raise on a violation.")] = "fix",
    only: Only = None,
    skip: Skip = None,
    plus: Plus = None,
    layers: Annotated[bool, _flag("--layers", "Also record the hooks that run once per layer.")] = False,
    audit: Annotated[float, typer.Option(help=_AUDIT)] = 0,
) -> None:
    """Run a program, such as `vllm serve` or `lmcache server`, with kvfix in all its processes."""
    from kvfix_tools import launch

    raise typer.Exit(launch.run(command, mode, only, skip, layers, plus, audit))


upstream = typer.Typer(no_args_is_help=True, help="List and export patches for LMCache and vLLM.")
app.add_typer(upstream, name="upstream", rich_help_panel=_MAINTAIN)


@upstream.command(name="list")
def upstream_list(json: Json = False) -> None:
    """List the patches with their fix, release and subject."""
    from kvfix_tools import upstream

    raise typer.Exit(upstream.show(json))


@upstream.command(name="export")
def upstream_export(
    name: Annotated[str, typer.Argument(metavar="CODE|SLUG")],
    output: Annotated[Path, _value("DIR", "Write into this folder.", "-o", "--output")] = Path("."),
) -> None:
    """Write a fix and its test as a patch for `git am`. The sign-off has your name from git config."""
    from kvfix_tools import upstream

    raise typer.Exit(upstream.export(name, output))


_FAIL_ON = """certain: exit 1 if a finding is certain. An effect: exit 1 for findings with this effect or a worse one:
crash, wrong, hang, leak, slow, risk."""
_ISSUE = "Write a bug report to post: versions, settings, excerpt, known threads."


@app.command(rich_help_panel=COMMANDS["diagnose"])
def diagnose(
    paths: Annotated[list[str], typer.Argument(metavar="PATH... | -", help="Logs, folders, .gz, .zst; - is stdin.")],
    json: Annotated[bool, _flag("--json", "Print JSON. This is the same as --format json.")] = False,
    output_format: Annotated[str, _value("text|json|github", "Choose the output format.", "--format")] = "",
    select: Annotated[Names, _several("CODE", "Show only findings whose code begins with CODE")] = None,
    ignore: Annotated[Names, _several("CODE", "Leave out findings whose code begins with CODE")] = None,
    fail_on: Annotated[str, _value("WHAT", _FAIL_ON)] = "certain",
    exit_zero: Annotated[bool, _flag("--exit-zero", "Exit 0 even if there are findings.")] = False,
    request: Annotated[str, _value("ID", "Show the whole history of one request.")] = "",
    html: Annotated[str, _value("FILE", "Write a self-contained HTML page.")] = "",
    brief: Annotated[str, _value("FILE", "Write a summary of the log in 8 kB; - prints it.")] = "",
    issue: Annotated[str, _value("FILE", _ISSUE)] = "",
    everything: Annotated[bool, _flag("--all", "Show every finding in full.")] = False,
    version: Version = False,
) -> None:
    """Find known bugs in a log. Exit 1 if a finding is certain.

    Each finding has its numbers, its cause and its remedy.
    """
    from kvfix_tools.diagnose import command
    from kvfix_tools.diagnose.command import Format, Options

    printed = output_format or ("json" if json else "text")
    if printed not in {each.value for each in Format}:
        raise typer.BadParameter("--format is text, json or github")
    options = Options(
        format=Format(printed), request=request, html=html, brief=brief, issue=issue,
        everything=everything, select=tuple(select or ()), ignore=tuple(ignore or ()), fail_on=fail_on,
        exit_zero=exit_zero,
    )  # fmt: skip
    raise typer.Exit(command.main(paths, options))


@app.command(add_help_option=False, context_settings=_ANY_WORDS, rich_help_panel=COMMANDS["roundtrip"])
def roundtrip(arguments: Annotated[Names, typer.Argument(metavar="[OPTIONS]")] = None) -> None:
    """Check that every byte of KV survives the copy to the host and back."""
    if find_spec("torch") is None:
        print(
            "kvfix roundtrip: torch is not installed for this Python. Run kvfix roundtrip with the engine's Python",
            file=sys.stderr,
        )
        raise typer.Exit(77)
    from kvfix_tools.roundtrip import command

    raise typer.Exit(command.main(arguments or []))


_DECODE = "Address of a decode instance, if URL is a router of prefill and decode."


@app.command(rich_help_panel=COMMANDS["verify"])
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of vLLM's server: http://localhost:8000")],
    model: Annotated[str, _value("NAME", "Test this model. Default: the first model of the server.")] = "",
    decode: Annotated[str, _value("URL", _DECODE)] = "",
    requests: Annotated[int, typer.Option(min=16, help="Send this many prompts. More prompts find rarer errors.")] = 48,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 1200,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk. 0: measure the chunk size.")] = 0,
    clients: Annotated[int, typer.Option(min=2, help="Send this many requests at once in the load round.")] = 8,
    seconds: Annotated[float, typer.Option(help="Stop after this many seconds.")] = 300.0,
    api_key_env: Annotated[str, _value("NAME", "Read the API key from this environment variable.")] = "",
    dry_run: Annotated[bool, _flag("--dry-run", "Print the requests, and send none.")] = False,
    json: Json = False,
) -> None:
    """Check that a running server gives the same answers with and without KV from the connector.

    Exit 0: the answers are the same. 1: answers differ. 2: the server cannot be reached, or it refuses requests. 77:
    the check could not decide, and the output says why.
    """
    if find_spec("httpx") is None or find_spec("prometheus_client") is None:
        print("kvfix verify needs httpx and prometheus_client: pip install httpx prometheus_client", file=sys.stderr)
        raise typer.Exit(77)
    from kvfix_tools.verify import command

    options = command.Options(
        url, model, decode, requests, prompt_tokens, chunk, clients, seconds, api_key_env, json, dry_run
    )
    raise typer.Exit(command.verify(options))


def main() -> None:
    """Entry point of the console script."""
    app()


def main_diagnose() -> None:
    """Entry point of `kvfix-diagnose`, which is the command `diagnose` alone."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(diagnose)
    alone(prog_name="kvfix-diagnose")


if __name__ == "__main__":
    main()
