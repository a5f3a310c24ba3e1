"""Plays with a fix that lacks something. What is found is in `result`."""

from dataclasses import replace

import kvfix
from kvfix import catalogue
from kvfix.wrapping import before
from kvfix_tools.lab import runner, scenario
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.lab import two_engines

with runner.quiet():
    from kvfix_tools.lab.lab_engine import LabEngine


def with_targets(code, change, play):
    fix = catalogue.find(code)
    whole = fix.targets
    object.__setattr__(fix, "targets", tuple(change(whole)))
    try:
        return [str(found) for found in play()]
    finally:
        object.__setattr__(fix, "targets", whole)


def capped():
    return runner.play(scenario.find("max-load-unaligned"), fixes=True).findings


def shared():
    kvfix.apply()
    try:
        engine = two_engines.until_its_load_failed()
        return [*two_engines.end(engine), "the load has failed"]
    finally:
        kvfix.revert()


def in_flight():
    return runner.play(scenario.find("failed-load-stored-under-way"), fixes=True).findings


def fails_again():
    """The load of `r` fails, and would fail again when it is scheduled next."""
    kvfix.apply()
    try:
        engine = LabEngine(Options(max_num_batched_tokens=512, async_scheduling=True))
        engine.admit("first", prompt(192))
        engine.run()
        engine.reset_prefix_cache()
        engine.fail_load("r")
        engine.admit("r", prompt(193), max_tokens=4)
        engine.step(2)
        engine.fail_load("r")
        engine.run()
        engine.settle()
        return [*engine.findings, *(["a load has failed"] * engine.counts["loads_failed"])]
    finally:
        kvfix.revert()


def without(function):
    return lambda targets: [target for target in targets if not target.function.endswith(function)]


def fails(*_):
    raise LookupError("absent")


def failing(targets):
    return [replace(target, fix=lambda module: before(lambda impl, *_: None, when=fails)) for target in targets]


def whole(targets):
    return targets


result = {
    "KVF003": with_targets("KVF003", whole, capped),
    "KVF003 fails": with_targets("KVF003", failing, capped),
    "KVF007": with_targets("KVF007", whole, shared),
    "KVF007 without the note": with_targets("KVF007", without("_update_requests_with_invalid_blocks"), shared),
    "KVF007 without its memory": with_targets("KVF007", without("get_block_ids_with_load_errors"), in_flight),
    "KVF205": with_targets("KVF205", whole, fails_again),
    "KVF205 without the lookup": with_targets("KVF205", without("get_num_new_matched_tokens"), fails_again),
    # Last: it leaves notes.
    "KVF007 without what follows": with_targets("KVF007", without("build_connector_meta"), shared),
}
