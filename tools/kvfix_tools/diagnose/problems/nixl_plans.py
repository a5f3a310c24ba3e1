"""NixlConnector's plans of a transfer that do not come out: the two sides count regions or groups apart."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_NIXL = ("NixlConnector", "NixlPushConnector", "MultiConnector")
_CHECK = "_validate_remote_agent_handshake"
_SAME = "the same model, --kv-cache-dtype, --block-size, --speculative-config and release of vLLM on both sides"

PROBLEMS = (
    Problem(
        code="KVD1020",
        name="nixl-region-lists-differ",
        severity=Severity.CRASH,
        title="Prefill and decode register different KV regions with NIXL.",
        shows=(
            Failed(
                kind="AssertionError",
                within=_CHECK,
                source="assert len(nixl_agent_meta.kv_caches_base_addr) == len(local_regions)",
            ),
            Failed(kind="AssertionError", within=_CHECK, source="== num_remote_regions"),
            Failed(
                kind="AssertionError", within="add_remote_agent", source="len(nixl_agent_meta.kv_caches_base_addr) >="
            ),
            Failed(kind="AssertionError", within="_build_fa_remote", text="Remote KV cache base addresses must not be"),
        ),
        replaces=("KVD156", "KVD570"),
        connectors=_NIXL,
        sure=False,
        cause="Each side registers one region for each layer (or K and V apart, or one for several layers), and they "
        "are paired in order. The counts differ: a draft model on one side only, another attention backend or layout, "
        "pipeline parallelism, or two releases of vLLM.",
        now=f"{_SAME}; the same --attention-backend; restart both",
        good="one set of options for prefill and decode",
    ),
    Problem(
        code="KVD1021",
        name="nixl-remote-size-changed",
        severity=Severity.CRASH,
        title="A prefill engine came back under its old id with another number of ranks.",
        shows=(
            Failed(kind="AssertionError", within=_CHECK, source="assert remote_info.remote_tp_size == remote_tp_size"),
            Failed(
                kind="AssertionError", within=_CHECK, source="assert remote_info.remote_dcp_size == remote_dcp_size"
            ),
        ),
        replaces=("KVD156", "KVD570"),
        connectors=_NIXL,
        cause="Decode keeps what it knows of an engine under its engine_id. A prefill that was restarted with another "
        "--tensor-parallel-size or --decode-context-parallel-size and the same engine_id, or a router that sends the "
        "tp_size of another one, contradicts it.",
        now="no engine_id in --kv-transfer-config of prefill, so that each start has its own; restart decode",
        good="an engine_id that is new with each start",
        sure=False,
    ),
    Problem(
        code="KVD1022",
        name="nixl-block-lists-differ",
        severity=Severity.CRASH,
        title="Decode and prefill have different numbers of blocks for one request.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Group <group>: |<decode> - <prefill>| > <most>",
                within="_apply_prefix_caching",
            ),
            Failed(
                kind="AssertionError",
                within="_apply_prefix_caching_by_region",
                source="assert len(decode_block_ids) == len(prefill_block_ids)",
            ),
            Failed(
                kind="AssertionError",
                within="pull_worker.py:_read_blocks",
                source="assert len(local_block_descs_ids) == len(remote_block_descs_ids)",
            ),
            Failed(
                kind="AssertionError",
                within="push_worker.py:_xfer_blocks",
                source="assert len(local_block_descs_ids) == len(remote_block_descs_ids)",
            ),
            Failed(
                kind="AssertionError",
                within="_read_blocks",
                source="== len(self.kv_cache_config.transfer_groups)",
            ),
        ),
        releases={"vllm": ">=0.20"},
        connectors=_NIXL,
        sure=False,
        cause="The lists are paired block by block, in each KV group. More than the rounding of the two block sizes "
        "apart means that the two sides do not speak of the same tokens: another chat template or tokenizer, a router "
        "that changes the prompt or hands on block ids of another request, speculative decoding on one side, or a "
        "hybrid model with another set of groups (--disable-hybrid-kv-cache-manager on one side).",
        now=f"{_SAME}; a router that hands decode the very prompt and kv_transfer_params of prefill",
        good="one set of options for prefill and decode",
    ),
    Problem(
        code="KVD1043",
        name="nixl-mamba-with-prefix-cache",
        severity=Severity.CRASH,
        title="Decode has a prefix of the prompt already, and NIXL cannot pair the rest of a Mamba model.",
        shows=(
            Failed(
                kind="AssertionError",
                within="nixl/worker.py:_read_blocks",
                source="assert len(local_block_descs_ids) == len(remote_block_descs_ids)",
                at="vllm/distributed/kv_transfer/kv_connector/v1/nixl/worker.py",
            ),
        ),
        releases={"vllm": ">=0.20,<0.26"},
        cause="These releases cut prefill's list of blocks to what decode lacks in groups of attention, and leave it "
        "as it is in groups of Mamba or GDN (worker.py 0.20.2:2065), where placeholders stand before the state. "
        "With a hit in decode's own prefix cache the two lists are of different length.",
        now="`--no-enable-prefix-caching` on the decode instances, restart them; prefill keeps its own",
        fixed={"vllm": "0.26.0"},
        threads=("https://github.com/vllm-project/vllm/pull/41693",),
    ),
    Problem(
        code="KVD1045",
        name="nixl-blocks-of-two-sizes-and-prefix-cache",
        severity=Severity.CRASH,
        title="Decode has a prefix of the prompt already, and its blocks are of another size than prefill's.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Group <group>: |<decode> - <prefill>| >= <most>",
                within="_apply_prefix_caching",
            ),
        ),
        sentence="KV group {group}: {decode} blocks of decode, {prefill} of prefill",
        releases={"vllm": ">=0.26,<0.32"},
        cause="A model with Mamba or GDN layers has physical blocks of a size that follows the tensor parallel size. "
        "Where the two sides differ, base_worker.py (0.26.0:2300) allows for the rounding of one block only, and a hit "
        "in decode's own prefix cache is more.",
        now="`--no-enable-prefix-caching` on the decode instances, or the same --tensor-parallel-size and --block-size "
        "as prefill; restart",
        good="the same sizes on both sides; vLLM 0.33.0 does not map them either (KVD658)",
    ),
    Problem(
        code="KVD1023",
        name="nixl-mamba-states-unpairable",
        severity=Severity.CRASH,
        title="Decode awaits Mamba states that prefill does not have.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Group <group>: unpairable SSM state slots, decode=<decode> prefill=<prefill>",
            ),
        ),
        sentence="group {group}: {decode} state slots of decode, {prefill} of prefill",
        releases={"vllm": ">=0.32"},
        connectors=_NIXL,
        cause="A Mamba group has one state at each checkpoint. Decode may have one more than prefill (the last token, "
        "which it computes itself), not two: with other settings of prefix caching or block size the sides keep "
        "states at other places.",
        now="the same --mamba-cache-mode, --block-size and --enable-prefix-caching on both sides; or "
        "--no-enable-prefix-caching on both",
        good="one set of options for prefill and decode",
        sure=False,
    ),
    Problem(
        code="KVD1024",
        name="nixl-received-what-it-did-not-ask",
        severity=Severity.CRASH,
        title="NixlConnector reports a load that it holds no entry for.",
        shows=(Failed(kind="AssertionError", text="<request> not found in recving_metadata list"),),
        sentence="request {request}",
        releases={"vllm": ">=0.32"},
        connectors=_NIXL,
        sure=False,
        cause="0.32 ends a failed request once only, so it is not the failure that was counted twice before. Two "
        "loads under one request id are left (a client or router that uses an id again while the first runs), or a "
        "notice of prefill for a request that was aborted. The lines of this request decide.",
        now="request ids that are unique; `kvfix-diagnose LOG --request ID`; restart decode",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`: no release is known to be right",
    ),
    Problem(
        code="KVD1025",
        name="nixl-abort-after-its-lease",
        severity=Severity.CRASH,
        title="A request is reported as not to be sent after the prefill worker has begun to wait for its reader.",
        shows=(
            Failed(
                kind="AssertionError",
                within="start_load_kv",
                source="assert req_id not in self._reqs_to_send",
            ),
        ),
        connectors=_NIXL,
        sure=False,
        cause="A request that ends is either sent (its blocks are held until decode has read them) or not. Both were "
        "said of one id: a request id that was used again while the first one's blocks were still held.",
        now="request ids that are unique (a router that retries makes a new one); restart prefill",
        good="ids that are unique",
    ),
    Problem(
        code="KVD1026",
        name="nixl-push-cannot-do-this",
        severity=Severity.CRASH,
        title="NixlPushConnector is asked for what only the pulling connector can do.",
        shows=(
            Failed(kind="NotImplementedError", text="Attention-HMA push requires identical P/D block sizes."),
            Failed(
                kind="NotImplementedError",
                text="Attention-HMA push does not support decode TP greater than prefill TP yet",
            ),
            Failed(kind="NotImplementedError", text="NixlPushConnector does not support mixed-memory KV caches"),
            Failed(
                kind="NotImplementedError",
                text="Bidirectional KV transfer is not supported for NIXL push connector.",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="Pushing writes from prefill into decode's blocks. For hybrid models that needs equal block sizes and "
        "no more decode ranks than prefill ranks; blocks in host memory and transfers in both directions it does not "
        "have.",
        now='"kv_connector":"NixlConnector" (it pulls) on both sides; or equal --block-size and --tensor-parallel-size',
        good="NixlConnector for this set-up",
        replaces=("KVD967",),
    ),
    Problem(
        code="KVD1027",
        name="nixl-producer-partly-in-host-memory",
        severity=Severity.CRASH,
        title="Prefill keeps a part of its KV in host memory, and decode cannot read such a mixture.",
        shows=(Failed(kind="NotImplementedError", text="NIXL pull does not yet support a mixed-memory producer"),),
        releases={"vllm": ">=0.32"},
        connectors=_NIXL,
        cause="A sparse cache (HiSparse) or kv_buffer_device cpu puts some groups of prefill into host memory. Decode "
        "may have such groups, the side that is read from may not.",
        now="prefill without --hisparse options and with kv_buffer_device cuda; restart prefill",
        good="KV of prefill in GPU memory only",
        sure=False,
    ),
    Problem(
        code="KVD1028",
        name="nixl-remote-engine-forgotten",
        severity=Severity.CRASH,
        title="Decode reads from a prefill engine that it has just dropped.",
        shows=(
            Failed(kind="KeyError", within="pull_worker.py:_read_blocks_for_req", source="[engine_id]"),
            Failed(kind="KeyError", within="pull_worker.py:_read_blocks_for_req", source="[meta.remote.engine_id]"),
            Failed(kind="KeyError", within="pull_worker.py:_read_blocks", source="[dst_engine_id]"),
            Failed(kind="KeyError", within="push_worker.py:_xfer_blocks_for_req", source="[engine_id]"),
        ),
        releases={"vllm": ">=0.32"},
        connectors=_NIXL,
        sure=False,
        cause="An engine whose handshake or transfers failed, or that was idle long enough, is cleaned up with all "
        "that decode knew of it. A request that was planned before still names it.",
        now="restart decode; is the prefill engine that the key names alive, and under this id? A router must not "
        "send to one that was restarted",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`: no release is known to be right",
    ),
)
