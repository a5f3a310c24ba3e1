"""Play the schedules of scenarios and of the fuzzer on a connector. Importing this module imports vLLM."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.request import RequestStatus

from kvfix.ledger import Finding
from kvfix_tools.conform import scenarios
from kvfix_tools.lab import releases
from kvfix_tools.lab.engine import vllm_objects
from kvfix_tools.lab.engine.lab_engine import LabEngine
from kvfix_tools.lab.fuzz import fuzz
from kvfix_tools.lab.fuzz.schedule import Schedule, draw
from kvfix_tools.lab.options import OF_VLLM, Options
from kvfix_tools.lab.pair.pair import Pair
from kvfix_tools.lab.pair.pair_engine import Engines
from kvfix_tools.lab.steps import Step

#: kvfix drops these fuzzer steps if `Subject.side` is None. The steps need LMCache or a way to make loads fail.
_NOT_OF_ANY = {"lose_loads", "evict", "timeout"}
#: Fuzzer features that are off if `Subject.side` is None. Only scenarios test several KV groups (SupportsHMA).
_NOT_DRAWN = {"ranks", "windows", "offloading", "roles", "stops"}
#: Fuzzer features that are off for a MultiConnector, which the lab plays with one rank and one KV group.
_NOT_DRAWN_OF_MULTI = {"ranks", "windows", "states", "offloading"}
_OF_REQUEST = {"abort", "preempt", "add_input", "end_input", "expect_unharmed"}
_STEPS = 50  # maximum number of engine steps for which `until_loading` and `until_running` wait


@dataclasses.dataclass(frozen=True)
class Subject:
    connector: str  # the class or name of the connector to test
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # the connector's kv_connector_extra_config
    lose: str = ""  # name of a function that deletes the connector's stored KV

    def options(self, **changed: Any) -> Options:
        """Return the options of the lab's engine for a scenario. Defaults: 64 blocks, 128 tokens in an engine step."""
        sizes: dict[str, Any] = {"num_blocks": 64, "max_num_batched_tokens": 128, **changed}
        if self.side is None:
            return Options(connector=self.connector, config=self.config, lose=self.lose, layers=2, **sizes)
        name = self.side.connector
        extra: dict[str, Any] = {}
        if name in OF_VLLM:  # ignore the memory size in the user's settings, because the lab chooses the size
            extra = {key: value for key, value in self.config.items() if not key.startswith("cpu_bytes_to_use")}
        return Options(connector=name, offloading=self.side.offloading, chunk_size=16, extra=extra, **sizes)

    def schedule(self, scenario: scenarios.Scenario) -> Schedule:
        """Return the schedule of a scenario. The steps are `Step` objects."""
        return Schedule(self.options(**scenario.options), tuple(scenario.schedule))

    @functools.cached_property
    def side(self) -> scenarios.Side | None:
        """How the lab plays this connector with a replaced part (a stand-in), or None if the lab replaces nothing."""
        return scenarios.side(self.connector, self.config)

    @functools.cached_property
    def lacks(self) -> set[str]:
        """Keys of `scenarios.NEEDS` that the connector does not meet. The connector's import may raise any error."""
        if self.side is not None:
            return self.side.lacks
        groups = KVConnectorFactory.supports_hma_config(vllm_objects.vllm_config(self.options()).kv_transfer_config)
        return {need for need, there in (("lose", self.lose), ("groups", groups)) if not there}

    def start(self) -> None:
        """Construct the connector in both roles, scheduler and worker. Raises any error of the connector."""
        (Pair if "alone" in self.lacks else Player)(self.options()).close()


class Player(Engines):
    """A lab engine with the methods that scenarios call. gone: the engines that `restart` has shut down."""

    def __init__(self, options: Options) -> None:
        self.gone: list[LabEngine] = []
        self.engine = LabEngine(options)

    @property
    def engines(self) -> Sequence[LabEngine]:  # type: ignore[override]
        return [self.engine]

    def do(self, step: str, *arguments: Any, **keywords: Any) -> None:
        """Run the step with this name. Skip a step whose request kvfix has removed while it shrinks the schedule."""
        if step not in _OF_REQUEST or arguments[0] in self.engine.requests:
            getattr(self, step, functools.partial(self.engine.do, step))(*arguments, **keywords)

    def admit(self, name: str, prompt: list[int], max_tokens: int = 1, in_other: bool = False, **more: Any) -> None:
        """Admit a request. in_other: True if the other connector of a MultiConnector has the request's KV."""
        if in_other:
            self.engine.has_in_other_connector(name)
        if self.engine.is_free(name):
            self.engine.admit(name, prompt, max_tokens, **more)

    def preempt(self, name: str) -> None:
        if self.engine.requests[name].status == RequestStatus.RUNNING:
            self.engine.preempt(name)

    def store(self, name: str, prompt: list[int], max_tokens: int = 1, **more: Any) -> None:
        """Run a request until the request and its stores have finished. Then empty vLLM's own prefix cache."""
        self.admit(name, prompt, max_tokens, **more)
        self.engine.run()
        self.engine.step(4)
        self.engine.reset_prefix_cache()

    def restart(self) -> None:
        """Shut down the engine, and start a new engine whose connector uses the old engine's folder."""
        before = self.engine
        before.connector.close(keep=True)
        self.gone.append(before)
        self.engine = LabEngine(dataclasses.replace(before.options, config=before.connector.config))
        self.engine.connector.folder = before.connector.folder

    def _until(self, status: RequestStatus, name: str) -> None:
        for _ in range(_STEPS):
            request = self.engine.requests.get(name)
            if request is None or request.status == status or request.is_finished():
                return
            self.engine.step()

    until_loading = functools.partialmethod(_until, RequestStatus.WAITING_FOR_REMOTE_KVS)
    until_running = functools.partialmethod(_until, RequestStatus.RUNNING)


def play(schedule: Schedule) -> fuzz.Played:
    return fuzz.played(Player(schedule.options), _play_steps, schedule, 2000)


def _play_steps(player: Player, schedule: Schedule, end: int) -> None:
    for step in schedule.steps:
        Step(*step).play(player)
    fuzz.ends(player.engine, end)


def drawn(seed: int, subject: Subject) -> Schedule:
    """Draw a random schedule with aborts, preemptions, few blocks, resets, drafts, sessions and pauses."""
    side = subject.side
    if side is not None and side.offloading:
        schedule = draw(seed, side.connector, lacks={*releases.lacking(), *_NOT_DRAWN_OF_MULTI})
        return schedule._replace(options=dataclasses.replace(schedule.options, offloading=side.offloading))
    if side is not None:
        return draw(seed, side.connector, lacks=releases.lacking())
    schedule = draw(seed, subject.connector, lacks={*releases.lacking(), *_NOT_DRAWN})
    steps = [step for step in schedule.steps if step[0] not in _NOT_OF_ANY]
    failed = [("lose_stored",)] if subject.lose else []
    steps = [each for step in steps for each in (failed if step[0] == "fail_load" else [step])]
    options = dataclasses.replace(schedule.options, config=subject.config, lose=subject.lose, layers=2)
    return Schedule(options, tuple(steps))


def shortest(
    schedule: Schedule, wanted: str, seconds: float, player: Callable[[Schedule], fuzz.Played], done: fuzz.Played
) -> tuple[Sequence[Any], Finding, fuzz.Played]:
    """Shrink a schedule that has a finding with signature `wanted`. Return the steps, the finding and the results."""
    found = fuzz.shrink(schedule, wanted, seconds, player)
    for candidate, played in ((found, player(found)), (schedule, done)):
        finding = next((each for each in played.findings if fuzz.signature(each) == wanted), None)
        if finding is not None:
            return candidate.steps, finding, played
    raise AssertionError(wanted)
