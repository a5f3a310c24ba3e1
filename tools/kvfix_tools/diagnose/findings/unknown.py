"""The last two rungs: a failure that no finding and no record of its own code knows, of a general kind or of none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import pasted, pasted_ends, pasted_named, problems, problems_cut
from kvfix_tools.diagnose.failures import HOOKS, is_cut
from kvfix_tools.diagnose.findings import Answer, LogRule, Severity, find, finding, first_error
from kvfix_tools.diagnose.findings.described import cut_off, described, is_head, quoted
from kvfix_tools.diagnose.findings.memory import PASTE
from kvfix_tools.diagnose.findings.pastes import is_paste
from kvfix_tools.diagnose.findings.prose import beside_few_lines, general_words, symptom, too_large_in_words
from kvfix_tools.diagnose.grammar_vllm import RELEASE_IN

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: What a text may name as the cause, and what it says of any engine that dies.
_OF_ANY_DEATH = {"EngineDeadError", "RuntimeError", "Exception"}
_CLASS = re.compile(rb"\b[A-Z]\w*(?:Error|Exception)\b")
#: {line that a start did not get beyond: (class and text of the exception, its record)}; None: the text has none
_ENDS_OF_STARTS = {
    "blender": (None, "KVD746"),
    "joins_controller": (("IndexError", "list index out of range"), "KVD1128"),
}
#: Findings of these explain why an engine is dead.
_EXPLAINS = (Severity.CRASH, Severity.HANG)


@finding("KVD199", "unknown-failure", Severity.CRASH, on=[""])
def unknown_failure(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Something failed, and kvfix does not know it. What is shown is the first error, not what followed from it.

    Cause: not known to this release of kvfix.

    Setting: look at the code and the hook that the sentence names; report it there with
    `kvfix-diagnose LOG --issue FILE.md`. `kvfix run --mode strict -- CMD` says which rule of a connector broke first.
    """
    instead = described(log, {found.rule.code for found in log.findings}) if log.findings and _in_doubt(log) else None
    if instead is not None or any(found.rule.severity in _EXPLAINS for found in log.findings):
        return instead
    first = log.failures.first
    worse = any(found.rule.severity is not Severity.RISK for found in log.findings)  # a risk explains no error
    if first is not None and worse and (first.name == "logged" or is_cut(first)):
        return _beside_doubts(log)  # what was found says it already, if it is certain
    if first is not None and first is log.memory.get("handler"):
        return None  # KVD212
    heading = log.failures.heading if first is not None and not first.fields.get("frames") else None
    general = problems.general(first) if first is not None else None
    general = general or (problems.general(heading) if heading is not None else None)
    known = cut_off(log) or _asserted(log, first) or _ended_start(log, first) or _by_what_is_left(log, first, general)
    if known is not None:
        return known
    if first is None:
        return _without_failure(log)
    if is_cut(first):
        return _of_a_cut(log, first, general)
    if is_head(first):
        return _not_certain(log, first, find("KVD1148"))
    return _general_answer(log, first, general)


def _in_doubt(log: Diagnosis) -> bool:
    """Whether nothing that was found is certain."""
    return all(found.verdict == "unknown" for found in log.findings)


def _general_answer(log: Diagnosis, first: LogLine, general: problems.Problem | None) -> Answer:
    instead = described(log, {general.code}) if general is not None else None
    if instead is not None:
        return instead._replace(evidence=first_error.evidence(log, first))
    return Answer(
        first_error.sentence(log, first),
        request=str(first.fields.get("request", "")),
        verdict="violated" if general is None or general.sure else "unknown",
        evidence=first_error.evidence(log, first),
        record=general,
    )


def _without_failure(log: Diagnosis) -> Answer | None:
    """No line of a log says that something failed: of what the text names."""
    has_lines = _has_lines(log)
    dead = _of_the_dead(log) if has_lines else None
    known = dead or (_in_prose(log) if _may_be_prose(log) else _beside_risks(log) or described(log))
    if known is not None or has_lines:
        return known or (None if log.findings else quoted(log)) or beside_few_lines(log)
    # What a setting tells is more than what is complained of.
    return None if log.findings else quoted(log) or symptom(log)


def _of_a_cut(log: Diagnosis, first: LogLine, general: problems.Problem | None) -> Answer:
    """A traceback without its exception: by its frames, or by what was logged besides."""
    # A hook of a connector mostly hands on: what failed lies deeper, in the part that was cut off, unless the line
    # that is left is one that a record knows to fail.
    handed_on = first.fields["frames"][-1][2] in HOOKS
    classes = {found.decode() for text in log.pasted for found in _CLASS.findall(text)} - _OF_ANY_DEATH
    source = str(first.fields["source"])
    within = problems.by_frames(first.fields["frames"], source, classes)
    known_by = [each for each in within if each.concerns(log) and (not handed_on or each.fails_at(source))]
    if len(known_by) == 1:
        return _not_certain(log, first, known_by[0])
    if general is not None:
        return _general_answer(log, first, general)
    said = ((line, problems.general(line)) for line in log.failures.lines if line.name == "logged")
    for logged, record in said:
        if record is not None:
            return _general_answer(log, logged, record)
    asserted = pasted_named.by_assertion(log)
    if asserted is not None:
        return _beside(log, first, asserted[1], asserted[0])
    large = too_large_in_words(log)
    if large is not None:
        return _beside(log, first, large, large.record)
    return _not_certain(log, first, find("KVD1148"))


def _beside(log: Diagnosis, first: LogLine, answer: Answer, record: LogRule | problems.Problem | None) -> Answer:
    """Of what the text names beside the traceback."""
    return answer._replace(request="", verdict="unknown", evidence=first_error.evidence(log, first), record=record)


def _not_certain(log: Diagnosis, first: LogLine, record: LogRule | problems.Problem | None) -> Answer:
    return Answer(first_error.sentence(log, first), "", "unknown", first_error.evidence(log, first), record)


def _asserted(log: Diagnosis, first: LogLine | None) -> Answer | None:
    """The finding of an assertion without its frames, whose function the text names or the releases have."""
    found: tuple[LogRule | problems.Problem, Answer] | None
    if first is None:
        found = pasted_named.by_assertion_in_function(log) if _may_be_prose(log) else None
    elif first.name != "raised" or first.fields["type"] != "AssertionError" or first.fields["frames"]:
        return None
    else:
        found = pasted_named.by_assertion_in_function(log, f"{first.fields['text']} {first.fields['source']}")
        if found is None and not first.fields["source"] and problems.general(first) is None:
            found = pasted_named.by_assertion(log)
    return None if found is None else found[1]._replace(request="", verdict="unknown", record=found[0])


def _ended_start(log: Diagnosis, first: LogLine | None) -> Answer | None:
    """By how far a start came, where no exception has its frames."""
    raised = None
    if first is not None and not is_cut(first):
        if first.name != "raised" or first.fields["frames"]:
            return None
        raised = (first.fields["type"], first.fields["text"])
    ends = (code for name, (what, code) in _ENDS_OF_STARTS.items() if log.counts[name] and raised == what)
    record = next(map(problems.find, ends), None)
    if record is None or log.counts["asked"]:
        return None
    if first is None:
        return Answer("the engine dies after `Creating blender`", "", "unknown", record=record)
    return _not_certain(log, first, record)


@finding("KVD1148", "traceback-is-cut", Severity.CRASH, on=[])
def traceback_is_cut(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The log ends in a traceback, before the exception: what is there says where, and not what.

    Cause: an excerpt, a viewer or a limit of the logger cut it. `ensure_kv_transfer_initialized` among its functions:
    the connector could not be made (settings, a module, a port); `register_kv_caches`: memory or layout;
    `execute_model` or `step`: a hook of the connector, or the model; `_initialize_kv_caches`: what a worker says;
    `launch_core_engines`: the API server only waits for its engines, whose own lines say why they do not come.

    Setting: `grep -nE '^.{0,120}(Error|Exception)\\b' LOG | head` names the exceptions; then kvfix-diagnose with the
    whole log, of every rank.

    Good: what the exception says.
    """
    return None


def _by_what_is_left(log: Diagnosis, first: LogLine | None, general: problems.Problem | None) -> Answer | None:
    record, words = _left(log, first, general)
    if record is None:
        return None
    return Answer(words, "", "unknown", record=record) if first is None else _not_certain(log, first, record)


def _left(
    log: Diagnosis, first: LogLine | None, general: problems.Problem | None
) -> tuple[problems.Problem | None, str]:
    """The record whose sign is there in part, if there is one; and what says so where no line of a log is there."""
    record = problems_cut.raised(log, first, general) if first is not None else None
    if record is None and (_may_be_prose(log) if first is None else is_cut(first)):
        record = problems_cut.in_prose(log)
    if record is not None:
        return record, "the text names this exception and its function"
    # Of a few lines the words count too: source that a sentence quotes, a message without its frame.
    may_be = first is not None or log.failures.dead or _may_be_prose(log) or is_paste(log)
    known = pasted.known_by_words(log, general is not None) if may_be else None
    said = described(log) if known is not None and known.record.announces and first is None else None
    if said is not None:  # more than a line that only heads a traceback
        return said.record, said.sentence
    if known is not None:
        return known.record, f"the text has its words: {known.words}"
    if general is not None or (log.findings and first is None):
        return None, ""
    named = pasted_named.by_exception(log, particular=True) if first is not None and is_cut(first) else None
    if named is not None:
        return named.record, named.sentence
    ended = pasted_ends.by_its_end(log, first)
    if ended is None:
        return None, ""
    # What the text complains of is more than a warning of a start.
    said = described(log) if first is None and ended[0].severity is not Severity.CRASH else None
    return (said.record, said.sentence) if said is not None else (ended[0], f"the text ends in {ended[1][-200:]}")


def _has_lines(log: Diagnosis) -> bool:
    """Whether there are lines of a log, beyond those that name a release."""
    return any(log.counts[name] for name in log.counts.keys() - RELEASE_IN)


def _may_be_prose(log: Diagnosis) -> bool:
    """Whether words outside of the log's lines count: there are no such lines, or they say nothing and have a title."""
    return not _has_lines(log) or (not log.findings and any(text.startswith(b"# ") for text in log.pasted))


def _in_prose(log: Diagnosis) -> Answer | None:
    """What a text names that is not in a line of a log."""
    asserted = pasted_named.by_assertion(log) or pasted_named.by_place(log)
    if asserted is not None:
        rule, answer = asserted
        return answer._replace(request="", verdict="unknown", record=rule)
    named = pasted_named.by_exception(log)
    said = described(log) if named is None or named.record.general else None
    if said is not None or named is not None:
        return said or named
    return general_words(pasted.general_by_words(log))


def _beside_risks(log: Diagnosis) -> Answer | None:
    """The exception that a sentence names beside a few lines, which are no more than a risk."""
    if not log.findings or log.hit or log.counts.total() > PASTE or log.failures.raised:
        return None
    return pasted_named.by_exception(log, particular=True)


def _beside_doubts(log: Diagnosis) -> Answer | None:
    """The exception that a sentence names beside a few lines of which no finding is certain."""
    if not _in_doubt(log) or log.counts.total() > PASTE or not all(map(is_cut, log.failures.raised)):
        return None
    return pasted_named.by_exception(log, particular=True)


def _of_the_dead(log: Diagnosis) -> Answer | None:
    """What is left of a failure whose own lines the log does not have: an engine's quotation of it, or the death."""
    quoted, death = log.failures.quoted, log.failures.death
    if quoted is not None:
        of_release = (each for each in problems.at(quoted) if each.concerns(log))
        known = next(of_release, None) or problems.general(quoted)
        sentence = f"a worker's exception, of which the log has no more than its words: {quoted.fields['text'][:200]}"
        return Answer(sentence, request="", verdict="unknown", evidence=(quoted.evidence,), record=known)
    if not log.failures.dead:
        return None
    sentence = "the engine is dead, and the log does not show why"
    if death is None:
        return Answer(sentence, request="")
    sentence = f"{sentence}: {death.evidence.text[:160]}"
    return Answer(sentence, request="", verdict="unknown", evidence=(death.evidence,), record=problems.general(death))


@finding("KVD198", "unknown-warning", Severity.RISK, on=[""])
def unknown_warning(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """KV code warns of something that fails, and kvfix does not know the warning: no request works, or it floods.

    Cause: not known to this release of kvfix.

    Setting: look at the code that the line names, and at the first warning of the same process; report it there with
    `kvfix-diagnose LOG --issue FILE.md`.
    """
    warned = log.failures.warning
    if log.findings or log.failures.first is not None or log.failures.dead or warned is None:
        return None
    warning, many = warned
    general = problems.general(warning)
    return Answer(
        f"{many} times: {warning.evidence.text[:200]}" if many > 1 else warning.evidence.text[:200],
        request="",
        verdict="unknown",
        evidence=(warning.evidence,),
        record=general,
    )
