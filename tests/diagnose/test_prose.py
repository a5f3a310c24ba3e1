"""What a text without a line of a log is known by; and tracebacks that were cut where something else tells."""

from __future__ import annotations

import pytest

from kvfix_tools.diagnose.findings import prose
from tests.diagnose.lines import NEWEST, codes, diagnose, logged
from tests.diagnose.prose_texts import POD, SERVER, YAML
from tests.diagnose.releases import CORE


def cut(*frames: tuple[str, str, str]) -> str:
    """A traceback whose paste ends before its exception."""
    lines = ["Traceback (most recent call last):"]
    for file, function, source in frames:
        lines += [f'  File "/opt/app/{file}", line 7, in {function}', f"    {source}"]
    return "".join(f"{CORE}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (YAML.format(200), "200"),
        (POD.format("64.0"), "64.0"),
        ('os.environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "5"', "5"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE=20 vllm serve m", "20"),
        ("'max_local_cpu_size': 100, 'local_disk': None", "100"),
    ],
)
def test_settings_as_they_are_typed(text: str, value: str) -> None:
    assert prose.typed(text)["max_local_cpu_size"] == value


def test_the_numbers_are_in_the_sentence() -> None:
    log = diagnose("LMCache does not start\n" + YAML.format(200) + "vllm serve m --tensor-parallel-size 4\n")
    assert log.findings[0].sentence.endswith("4 ranks times 200 GB are 800 GB")
    assert log.findings[0].verdict == "unknown"


def test_a_capacity_without_an_eviction_is_its_own_record() -> None:
    fills = "The disk grows beyond its limit: exceeded.\n"
    assert codes(diagnose(fills + SERVER.format(', "max_capacity_gb": 500'))) == ["KVD190"]
    both = ', "max_capacity_gb": 500, "eviction": {"eviction_policy": "LRU"}'
    assert codes(diagnose(fills + SERVER.format(both))) == ["KVD1212"]


def test_crashes_with_valkey_are_its_clients_in_the_releases_that_hand_it_a_chunk() -> None:
    text = "LMCache {}: EngineCore has native crashes with the Valkey backend\n"
    assert codes(diagnose(text.format("0.4.3"))) == ["KVD1214"]
    assert codes(diagnose(text.format("0.4.3").replace("Valkey", "S3"))) == []


def test_a_start_that_ends_at_its_blender() -> None:
    """No more of its exception is there than that the start failed: the step before it tells."""
    begun = logged(NEWEST, "blender", "vllm-instance")
    died = f"{CORE}EngineCore failed to start.\n"
    outer = cut(("vllm/v1/engine/core.py", "__init__", "super().__init__(vllm_config, executor_class, log_stats,"))
    assert codes(diagnose(begun, died)) == ["KVD746"]
    assert codes(diagnose(begun, died, outer)) == ["KVD746"]
    assert codes(diagnose(died, outer)) == ["KVD1148"]


@pytest.mark.parametrize(
    ("file", "function", "source", "code"),
    [
        ("lmcache/v1/gpu_connector.py", "get_kv", "raise", "KVD408"),
        ("vllm/distributed/shm_broadcast.py", "dequeue", "with self.acquire_read(timeout) as buf:", "KVD945"),
        ("redis/connection.py", "<lambda>", "lambda: self._connect(), lambda error: self.disconnect(error)", "KVD1218"),
        ("redis/connection.py", "<lambda>", "lambda: self.other()", "KVD1148"),
        ("redis/connection.py", "connect_check_health", "sock = self.retry.call_with_retry(", "KVD1218"),
    ],
)
def test_a_traceback_that_ends_in_a_function_that_fails_in_one_way(
    file: str, function: str, source: str, code: str
) -> None:
    assert codes(diagnose(cut(("vllm/v1/engine/core.py", "step", "step()"), (file, function, source)))) == [code]


def test_an_exception_that_the_text_names_is_the_one_that_was_cut() -> None:
    frames = cut(("vllm/v1/engine/core.py", "step", "step()"), ("lmcache/v1/gpu_connector.py", "get_kv", "raise"))
    assert codes(diagnose("ValueError with blending\n" + frames)) == ["KVD408"]
    assert codes(diagnose("EngineDeadError with blending\n" + frames)) == ["KVD408"]
    assert codes(diagnose("KeyError with blending\n" + frames)) == ["KVD1148"]


def test_a_handler_that_failed_is_known_by_its_words() -> None:
    assert codes(diagnose("LMCache: Error handling request RequestType.LOOKUP for each prompt\n")) == ["KVD212"]


def test_a_hit_that_brings_nothing_is_no_miss() -> None:
    assert codes(diagnose("LMCache with S3: the scheduler sees a hit it cannot retrieve\n")) == ["KVD1090"]
    assert codes(diagnose("LMCache with S3: the scheduler gets no hit, it cannot load the cache\n")) == ["KVD1206"]


def test_a_traceback_that_ends_within_its_assertion() -> None:
    whole = "assert num_external_computed_tokens == 0"
    frame = ("vllm/v1/core/sched/scheduler.py", "_mamba_block_aligned_split", "{}")
    text = "vLLM 0.22.1\n" + cut(("vllm/v1/engine/core.py", "step", "step()"), frame)
    assert codes(diagnose(text.format(whole))) == ["KVD653"]
    assert codes(diagnose(text.format(whole[:32]))) == ["KVD653"]
    assert codes(diagnose(text.format(whole[:10]))) == ["KVD199"]
    assert codes(diagnose(text.format(whole[:32]).replace("_mamba_block", "_other_block"))) == ["KVD199"]
