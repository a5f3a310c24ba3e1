"""Check the hook calls of a connector that the lab does not know, and find request ids that the connector keeps."""

import pickle
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from kvfix_tools.lab.connectors.connector import OtherConnector
from kvfix_tools.lab.engine import rules

if TYPE_CHECKING:
    from kvfix_tools.lab.connectors.any_connector import AnyConnector

_MANY = (dict, set, frozenset, list, tuple, deque)
#: `kept_requests` does not search in these attributes, because they hold objects of vLLM.
_NOT_ITS_OWN = {"_vllm_config", "_kv_transfer_config", "_kv_cache_config", "_kv_cache_manager", "_connector_metadata"}


class Load(NamedTuple):
    """Tokens [start, end) that the connector has promised and must load. asynchronous: the load runs between steps."""

    start: int
    end: int
    asynchronous: bool


class Contract:
    """Checks each hook call of a connector against the docstrings of vLLM's base class (v1/base.py 0.32.0)."""

    def __init__(self, owner: "AnyConnector") -> None:
        self._owner = owner
        #: {request: (computed tokens, True if the load runs between steps)} of the request's last lookup
        self._promised: dict[str, tuple[int, bool]] = {}
        connector = owner.in_scheduler
        self._ask, self._grant = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        self._build = connector.build_connector_meta
        connector.get_num_new_matched_tokens = self.get_num_new_matched_tokens
        connector.update_state_after_alloc = self.update_state_after_alloc
        connector.build_connector_meta = self.build_connector_meta
        for name in ("request_finished", "request_finished_all_groups"):
            if hasattr(connector, name):
                setattr(connector, name, self._finished(name, getattr(connector, name)))

    def _kind(self, name: str, hook: str, wanted: str, answer: Any) -> None:
        self._owner.events.violated(rules.WRONG_KIND, name, f"{hook} answers {answer!r:.80}; expected: {wanted}")

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        """Call the hook twice, because vLLM may call it twice. The hook must have no side effects (base.py:10-11)."""
        name, first = request.request_id, self._ask(request, computed)
        answer = self._ask(request, computed)
        right = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], bool)
        right = right and (answer[0] is None or isinstance(answer[0], int))
        if not right:
            self._kind(name, "get_num_new_matched_tokens", "a number of tokens or None, and a bool", answer)
        elif answer[0] == 0 and answer[1]:
            self._kind(name, "get_num_new_matched_tokens", "(0, False) if there is nothing to load", answer)
        if first != answer and first[0] is not None:
            message = f"the first lookup at {computed} computed tokens promises {first}, the second promises {answer}"
            self._owner.events.violated(rules.ASKED_AGAIN, name, message)
        self._promised[name] = computed, answer[1]
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> Any:
        if external:
            computed, asynchronous = self._promised[request.request_id]
            self._owner.granted(request.request_id, Load(computed, computed + external, asynchronous))
        return self._grant(request, blocks, external)

    def build_connector_meta(self, output: Any) -> Any:
        """Check that the hook does not change the scheduler's output (base.py:585)."""
        before = {name: repr(value) for name, value in vars(output).items()}
        metadata = self._build(output)
        self._owner.output = output
        changed = [name for name, value in vars(output).items() if repr(value) != before[name]]
        if changed:
            self._owner.events.violated(rules.NOT_ITS_TO_CHANGE, "", f"build_connector_meta changes {changed[0]}")
        if not isinstance(metadata, KVConnectorMetadata):
            self._kind("", "build_connector_meta", "a KVConnectorMetadata", metadata)
        try:
            pickle.dumps(metadata)
        except Exception as error:  # noqa: BLE001 - pickle raises many types
            text = f"build_connector_meta: its metadata cannot be sent to another process ({error!r:.80})"
            self._owner.events.violated(rules.WRONG_KIND, "", text)
        self._owner.handed_out()
        return metadata

    def _finished(self, hook: str, finished: Any) -> Any:
        def request_finished(request: Any, blocks: Any) -> Any:
            answer = finished(request, blocks)
            right = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool)
            if not (right and (answer[1] is None or isinstance(answer[1], dict))):
                self._kind(request.request_id, hook, "a bool, and a dict or None", answer)
            if answer[0]:
                self._owner.sending.add(request.request_id)
            return answer

        return request_finished

    def reported(self, report: Any) -> None:
        """Check that each reported transfer was in flight (base.py:395-396). Else vLLM raises or frees used blocks."""
        owner = self._owner
        sent, received = (report.finished_sending, owner.sending), (report.finished_recving, owner.loading())
        for kind, (names, known) in {"sent": sent, "received": received}.items():
            for name in sorted(set(names or ()) - known):
                message = f"the connector reports the request as {kind}, but the request has no transfer in flight"
                owner.events.violated(rules.NOT_IN_FLIGHT, name, message)
        if not isinstance(report.invalid_block_ids, (set, frozenset)):
            self._kind("", "get_block_ids_with_load_errors", "a set of block ids", report.invalid_block_ids)


def kept_requests(connector: Any, ids: set[str]) -> dict[str, set[str]]:
    """Return {attribute: ids that the attribute holds}. Search the connector and its objects from the same package."""
    found: dict[str, set[str]] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [(type(connector).__name__, connector, 0)]
    packages: set[str] = set()
    while waiting:
        where, each, depth = waiting.pop()
        if id(each) in seen or depth > 4:
            continue
        seen.add(id(each))
        if isinstance(each, KVConnectorBase_V1):  # children of a MultiConnector may be in other packages
            kinds = [kind.__module__ for kind in type(each).__mro__ if issubclass(kind, KVConnectorBase_V1)]
            packages |= {module.rpartition(".")[0] or module for module in kinds}
        for name, value in _attributes(each):
            place = f"{where}.{name}"
            if isinstance(value, _MANY):
                if here := _among(value, ids):
                    found[place] = here
                inner = value.values() if isinstance(value, dict) else value
                waiting += [(place, one, depth + 1) for one in list(inner)[:64] if _is_its_own(one, packages)]
            elif _is_its_own(value, packages):
                waiting.append((place, value, depth + 1))
    return found


def _attributes(each: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(each, name)]
    own = {**getattr(each, "__dict__", {}), **{name: getattr(each, name) for name in slots}}
    return [(name, value) for name, value in own.items() if name not in _NOT_ITS_OWN]


def _is_its_own(value: Any, packages: set[str]) -> bool:
    module = type(value).__module__
    if isinstance(value, KVConnectorBase_V1):
        return not isinstance(value, OtherConnector)  # OtherConnector belongs to the lab
    return hasattr(value, "__dict__") and any(module == each or module.startswith(f"{each}.") for each in packages)


def _among(many: Any, ids: set[str]) -> set[str]:
    """Return the ids that are keys, values or elements of this container, or of a container in this container."""
    inner = many.values() if isinstance(many, dict) else many
    parts = [one for one in inner if isinstance(one, (set, frozenset, list, tuple, deque)) and len(one) < 4096]
    return {name for part in (many, inner, *parts) for name in part if isinstance(name, str) and name in ids}
