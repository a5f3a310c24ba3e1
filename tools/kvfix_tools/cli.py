"""The command `kvfix`. Each command's work is a module of its own; this file only names them and their options.

Exit codes of all commands: 0 nothing found, 1 findings, 2 usage or unreadable input, 77 could not be checked here.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Optional

import typer

import kvfix
from kvfix.config import MODES
from kvfix_tools.lab.cli import app as lab

app = typer.Typer(
    name="kvfix",
    help="Patch set and debugging toolkit for KV-cache connectors in vLLM, LMCache's first of all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(lab, name="lab")

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
# typer reads annotations at run time, also on Python 3.10: Optional, not `| None`, in this file.
Names = Annotated[Optional[list[str]], typer.Option(metavar="CODE|SLUG", help="May be given several times.")]  # noqa: UP045
Plus = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(metavar="CODE|SLUG", help="Apply this opt-in fix too. May be given several times."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvfix {kvfix.__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options before the command."""


@app.command()
def status(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[PID|KVF...]", help="Show what is applied in a running engine (PID), or the rows of these fixes."
        ),
    ] = None,
    json: Json = False,
    everything: Annotated[bool, typer.Option("--all", help="Show the row of every fix.")] = False,
    connector: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Count only bugs that concern these connectors.")
    ] = "",
    transfer_config: Annotated[
        str, typer.Option("--kv-transfer-config", metavar="JSON", help="Read the connectors from vLLM's own option.")
    ] = "",
    severity: Annotated[
        str,
        typer.Option(metavar="EFFECT", help="Show rows of one effect: wrong-output, crash, hang, leak or lost-hits."),
    ] = "",
    probe: Annotated[bool, typer.Option(help="Import vLLM and LMCache, and run the behaviour probes.")] = False,
    released: Annotated[
        bool,
        typer.Option("--released", help="Compare with the newest releases of the package index (uses pip)."),
    ] = False,
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


@app.command()
def explain(name: Annotated[str, typer.Argument(metavar="CODE|SLUG")], json: Json = False) -> None:
    """A fix (KVF...): symptom, cause, releases; a rule of the ledger (KVR...); a finding in logs (KVD...)."""
    from kvfix_tools import explain

    raise typer.Exit(explain.explain(name, json))


@app.command()
def search(
    text: Annotated[str, typer.Argument(metavar="TEXT|FILE|-", help="Words of a symptom, or a file with them.")],
    json: Json = False,
) -> None:
    """Find fixes, known problems and rules by the words of a text. Show the best three, and how to confirm each."""
    from kvfix_tools import search

    raise typer.Exit(search.search(text, json))


@app.command()
def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...")],
    router: Annotated[Path | None, typer.Option(metavar="LOG", help="Of the router between the engines.")] = None,
    json: Json = False,
) -> None:
    """Recorder files or bundles through the ledger again: what was violated, and its history. Exit 1 if anything was.

    Those of several processes, ranks and nodes are laid side by side, and of a prefill and a decode engine.
    """
    from kvfix_tools import replay

    raise typer.Exit(replay.replay(files, json, router))


@app.command()
def mcp(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Files are read below this folder only.")] = Path(),
) -> None:
    """A Model Context Protocol server on standard input and output, with kvfix's commands as tools (kvfix[mcp])."""
    from kvfix_tools import mcp_server

    raise typer.Exit(mcp_server.serve(root))


@app.command()
def conform(
    connector: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="Or what vLLM calls it: ExampleConnector.")],
    config: Annotated[
        str,
        typer.Option(metavar="JSON", help="Its kv_connector_extra_config, or @FILE. {dir}: a new folder each time."),
    ] = "{}",
    lose: Annotated[
        str,
        typer.Option(metavar="MODULE:FUNCTION", help="Called with the worker's connector: what it has stored is gone."),
    ] = "",
    seconds: Annotated[float, typer.Option(help="Of the fuzzer, after the scenarios.")] = 30.0,
    seeds: Annotated[str, typer.Option(metavar="A:B", help="Of the fuzzer.")] = "0:100000",
    fixes: Annotated[bool, typer.Option(help="With kvfix's fixes of vLLM, or as it was released.")] = True,
    json: Json = False,
    junit: Annotated[Optional[Path], typer.Option(metavar="FILE", help="JUnit XML.")] = None,  # noqa: UP045
) -> None:
    """Does a KV connector keep what vLLM expects? On the real scheduler, without a GPU. Exit 1: no; 2: not tested."""
    from kvfix_tools.conform import command

    first, _, last = seeds.partition(":")
    try:
        drawn = range(int(first), int(last or int(first) + 1))
    except ValueError:
        raise typer.BadParameter("--seeds is A:B, or one number") from None
    raise typer.Exit(command.conform(connector, config, lose, seconds, drawn, fixes, json, junit))


@app.command()
def dump(
    pid: Annotated[int, typer.Argument(metavar="PID", help="The engine: this process and all below it.")],
    out: Annotated[Path, typer.Option("-o", metavar="DIR", help="Where the bundle goes.")] = Path(),
    json: Json = False,
) -> None:
    """A bundle (tar.gz) of a running or hung engine: stacks and flight recorders of its processes, and who waits."""
    from kvfix_tools.dump import command

    raise typer.Exit(command.dump(pid, out, json))


@app.command()
def look(
    pid: Annotated[
        Optional[int],  # noqa: UP045
        typer.Argument(metavar="PID", help="Any process of the engine."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw once a second, with rates.")] = False,
    request: Annotated[str, typer.Option(metavar="ID", help="One request in full.")] = "",
    json: Json = False,
    save: Annotated[str, typer.Option(metavar="FILE", help="The state, with each request's blocks.")] = "",
    core: Annotated[str, typer.Option(metavar="FILE", help="A core file in place of PID (kvfix[core]).")] = "",
) -> None:
    """Why nothing moves in a running engine, started with kvfix or without: the verdict, and who owes what to whom.

    Exit 0: nothing is known to be wrong. 1: a verdict. 77: it may not be read, and which setting is missing.
    """
    from kvfix_tools.look import command, core_file

    if (pid is None) == (not core):
        raise typer.BadParameter("give a PID, or --core FILE")
    if pid is None:
        raise typer.Exit(core_file.look(core, json))
    raise typer.Exit(command.look(pid, watch, request, json, save))


Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for a moment between two steps.")]


@app.command()
def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="The engine: this process and all below it.")],
    mode: Annotated[str, typer.Option(help="What kvfix does in it: fix, observe, check.")] = "fix",
    only: Names = None,
    plus: Plus = None,
    idle: Annotated[bool, typer.Option("--idle", help="Wait until no request is there.")] = False,
    wait: Wait = 60.0,
    json: Json = False,
) -> None:
    """Fixes into an engine that runs, between two of its steps. Exit 1 if one has to wait, or is not applied."""
    from kvfix_tools.look import attach

    raise typer.Exit(attach.attach(pid, mode, only, idle, wait, json, plus))


@app.command()
def detach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="The engine: this process and all below it.")],
    wait: Wait = 60.0,
    json: Json = False,
) -> None:
    """Fixes out of an engine that runs: every original is back."""
    from kvfix_tools.look import attach

    raise typer.Exit(attach.detach(pid, wait, json))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def doctor(
    command: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[-- CMD ...]", help="vllm serve ..., lmcache server ..."),
    ] = None,
    json: Json = False,
    server_http: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="HTTP port of the LMCache server, to ask it."),
    ] = "",
    names: Annotated[bool, typer.Option("--list", help="The checks, and what each looks at.")] = False,
) -> None:
    """What cannot work in this set-up, before it is launched. It starts nothing and changes nothing."""
    from kvfix_tools.doctor import command as work

    raise typer.Exit(work.doctor(command or [], json, server_http, names))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD ...", help="The program and its arguments.")],
    mode: Annotated[str, typer.Option(help=f"What kvfix does in it: {', '.join(MODES)}.")] = "fix",
    only: Names = None,
    skip: Names = None,
    plus: Plus = None,
    layers: Annotated[bool, typer.Option("--layers", help="Record hooks that run once per layer too.")] = False,
) -> None:
    """A program with kvfix in it and in all its children, also one that loads no vLLM plugins (lmcache server)."""
    from kvfix_tools import launch

    raise typer.Exit(launch.run(command, mode, only, skip, layers, plus))


upstream = typer.Typer(no_args_is_help=True, help="Patches ready to be sent to LMCache and vLLM.")
app.add_typer(upstream, name="upstream")


@upstream.command(name="list")
def upstream_list(json: Json = False) -> None:
    """Each patch: its fix, the release it is for, its subject."""
    from kvfix_tools import upstream

    raise typer.Exit(upstream.show(json))


@upstream.command(name="export")
def upstream_export(
    name: Annotated[str, typer.Argument(metavar="CODE|SLUG")],
    dist: Annotated[Optional[str], typer.Option(help="lmcache or vllm; both if not given.")] = None,  # noqa: UP045
    version: Annotated[Optional[str], typer.Option(help="The release; all if not given.")] = None,  # noqa: UP045
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where to.")] = Path("."),
) -> None:
    """Write a fix as a patch for `git am`, with its test, signed off by you (from git config)."""
    from kvfix_tools import upstream

    raise typer.Exit(upstream.export(name, dist, version, output))


@app.command()
def diagnose(
    paths: Annotated[list[str], typer.Argument(metavar="PATH... | -", help="Logs, folders, .gz, .zst; - is stdin.")],
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    output_format: Annotated[str, typer.Option("--format", metavar="text|json|github", help="What is printed.")] = "",
    select: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="CODE", help="Only these findings; a beginning of a code is enough. Several times."),
    ] = None,
    ignore: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="CODE", help="Not these findings."),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="Exit 1 for: certain findings, or crash, wrong, hang, leak, slow, risk and worse."
        ),
    ] = "certain",
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Exit 0, whatever is found.")] = False,
    request: Annotated[str, typer.Option(metavar="ID", help="One request's history in full.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="One self-contained page.")] = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="Chrome trace JSON, for ui.perfetto.dev.")] = "",
    brief: Annotated[
        str,
        typer.Option(metavar="FILE", help="The log in 8 kB, for a person or a language model; - prints it."),
    ] = "",
    issue: Annotated[
        str, typer.Option(metavar="FILE", help="A bug report to post: versions, settings, excerpt, known threads.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every finding in full.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Find known bugs in a log: findings with their arithmetic, cause and remedy. Exit 1 if one is certain."""
    from kvfix_tools.diagnose import command
    from kvfix_tools.diagnose.options import Format, Options

    printed = output_format or ("json" if json else "text")
    if printed not in {each.value for each in Format}:
        raise typer.BadParameter("--format is text, json or github")
    options = Options(
        format=Format(printed), request=request, html=html, perfetto=perfetto, brief=brief, issue=issue,
        everything=everything, select=tuple(select or ()), ignore=tuple(ignore or ()), fail_on=fail_on,
        exit_zero=exit_zero,
    )  # fmt: skip
    raise typer.Exit(command.main(paths, options))


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def roundtrip(arguments: Annotated[Optional[list[str]], typer.Argument(metavar="[OPTIONS]")] = None) -> None:  # noqa: UP045
    """Is every byte of KV what it was? To the host and back, by LMCache's and vLLM's own code. `roundtrip --help`."""
    if find_spec("torch") is None:
        print("kvfix roundtrip: there is no torch for this Python; run it where the engine runs", file=sys.stderr)
        raise typer.Exit(77)
    from kvfix_tools.roundtrip import command

    raise typer.Exit(command.main(arguments or []))


@app.command()
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="vLLM's server: http://localhost:8000")],
    model: Annotated[str, typer.Option(metavar="NAME", help="The model; the server's first one if not given.")] = "",
    decode: Annotated[
        str, typer.Option(metavar="URL", help="Decode instance, if URL is the router of prefill and decode instances.")
    ] = "",
    requests: Annotated[int, typer.Option(min=16, help="Prompts. More prompts find rarer errors.")] = 48,
    prompt_tokens: Annotated[int, typer.Option(help="Longest prompt.")] = 1200,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk. 0: find out.")] = 0,
    clients: Annotated[int, typer.Option(min=2, help="Requests at once in the load round.")] = 8,
    seconds: Annotated[float, typer.Option(help="Stop after this time.")] = 300.0,
    api_key_env: Annotated[str, typer.Option(metavar="NAME", help="Environment variable with the API key.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent.")] = False,
    json: Json = False,
) -> None:
    """Check that a running server answers the same with KV from the connector as without.

    Exit 0: same. 1: different. 2: the server cannot be reached or refuses. 77: nothing is proven.
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
