"""Words of the symptoms that prose.py knows: a complaint, in English or Chinese, and settings as they are typed."""

from __future__ import annotations

import re

#: Characters at the beginning of a text in which it says what is wrong.
HEAD = 500
#: What a text about a KV connector speaks of.
OF_KV = re.compile(
    r"(?i)lmcache|kv[-_ ]?(?:transfer|connector|(?:cache )?offload)|offload(?:ing)?connector|cacheblend|fs_native"
    r"|nixl|mooncake|p/d disagg|\bpd[- ]disagg|prefill[-/ ](?:and )?decode|disaggregated prefill|PD\s?\u5206\u79bb"
)
#: That it runs without one.
WITHOUT = re.compile(
    r"(?i)\b(?:without|(?:use|have|with) no)(?: a| any| the)? kv[-_ ]?(?:cache )?[-_ ]?(?:offloading )?connector"
)
#: `LMCACHE_NAME=value`, `name: value`, `os.environ["LMCACHE_NAME"] = "value"`, and a variable of a pod.
TYPED = re.compile(
    r"(?im)(?:\bLMCACHE_|^[\s>`'\"]*|[\s,.{'\"])(chunk_size|max_local_cpu_size|local_cpu|remote_url|remote_serde|"
    r"cpuoffloadingbuffersize|"
    r"enable_p2p|enable_blending)\b[\"'\]]*\s*(?:[:=]|\n\s*value:)\s*[\"'\u201c]?([^\s\"'\u201d`,#}]+)"
)
RANKS = re.compile(
    r"(?:--?tensor[-_]parallel[-_]size|(?<!\S)-tp|tensor_parallel_size|tensorParallelSize)[\s=:\"']+(\d+)"
)
#: GB in one process from which on a start that fails is a matter of memory.
LARGE = 16
#: That a start fails from some size of the CPU buffer on.
TOO_LARGE = re.compile(
    r"(?i)(?:cpu|offload\w*|buffer|max_local_cpu_size)[^\n.]{0,40}(?:larger|bigger|greater|more|above|over|>)[^\n.\d]{0,12}"
    r"(\d{2,4}) ?gi?b\b"
)
STARTS = re.compile(r"EngineCore failed to start|(?i:fail\w* to (?:start|launch)|launch\w* (?:server )?(?:error|fail))")
DIES = re.compile(
    r"(?i)leaked shared_memory|\bkilled\b|oom[- _]?kill|out of memory|code:? 137|bus error|fails? to (?:start|launch)"
    r"|(?:can ?not|doesn't|won't|does not|unable to) start|start(?:s|ed)? (?:successfully|normally) when|crash-?loop"
    r"|\u5185\u5b58\u4e0d\u8db3|\u88ab ?(?:kill|\u6740)|\u65e0\u6cd5\u542f\u52a8|\u542f\u52a8\u5931\u8d25"
)
WRONG = re.compile(
    r"(?i)gibberish|garbled|garbage|nonsens|corrupt\w* (?:text|output|kv)|(?:wrong|incorrect|different|inconsistent) "
    r"(?:answer|output|result|response|generation)|accuracy (?:drop|loss|degrad|is lower|issue|problem)|\u4e71\u7801"
    r"|(?:answer|output|response|generation)s? (?:\w+ ){0,2}(?:degrad|differ)|malformed (?:answer|output)"
    r"|degraded (?:answer|output|response)|(?:quality|output) degrad"
    r"|abnormal (?:\w+ )?(?:result|output|answer)|degenerat\w+ (?:into|output|text)|token salad"
    r"|(?:generation|output|answer|decoding|completion)s? (?:\w+ ){0,2}diverge"
)
#: LMCache as a process of its own, whose connector takes the layout of newer releases of vLLM.
APART = re.compile(r"LMCacheMPConnector|lmcache[ _-]server|\bMP\b|multi-?process")
CRASHES = re.compile(
    r"(?i)segfault|segmentation fault|sigsegv|core dumped|native crash|memory corruption|crash(?:es|ed)?\b"
)
HANGS = re.compile(
    r"(?i)(?<!'m )(?<!am )\b(?:stuck(?:ed|s)?|hangs?|hung|hanging|dead-?lock(?:s|ed)?|freezes|frozen)\b"
    r"|\bfreeze\b(?![- ]mode)|\bwaits? for ?ever\b|\bnever (?:finish(?:es|ed)?|returns?|completes?)\b"
    r"|\u5361\u4f4f|\u5361\u6b7b"
)
MISSES = re.compile(
    r"(?i)\b(?:0|zero|no)(?:\.0)?%? (?:cache |prefix |kv |lmcache )*hits?\b|cache miss|re(?:calculat|comput)ed every"
    r"|\bhits?(?: tokens| rate)?\b[^\n.]{0,40}\b0(?:\.0+)?%?(?![\w%]|\.\d)"
    r"|(?:never|not|doesn't|didn't|can't|fail(?:s|ed|ures?)? (?:in|to))(?: \w+){0,2} "
    r"(?:hit|reus|retriev(?!\w* (?:fail|error))|get any hit)"
    r"|\bhits? (?:does not|doesn't|never|do not|don't) (?:happen|occur|come)|can ?not load (?:the )?(?:kv|cache)"
    r"|(?:n't|not|never) finds? (?:anything|any|it|them|the (?:cache|chunk|kv|prefix|prompt))\b"
    r"|\bcache (?:is |does )?not (?:work|effective|used)|\b(?:repeat\w*|same|second) (?:\w+ )?(?:requests? )?loads? 0\b"
    r"|\u547d\u4e2d\u7387?[^\n]{0,8}0|(?:\u6ca1\u6709?|\u672a|\u65e0\u6cd5)\u547d\u4e2d"
)
#: A hit that brings nothing, which is no miss.
UNLOADED = re.compile(
    r"(?i)\bhits? (?:that |which )?(?:\w+ )?(?:can ?not|can't|could not|never) (?:be )?(?:retriev|load|read)"
)
#: Connectors and a server that make the keys for all, or have none.
SERVED = re.compile(r"LMCacheMPConnector|lmcache[ .]server|v1\.multiprocess|\bMP\b|NixlConnector|MooncakeConnector")
DISK = re.compile(
    r"(?i)(?:disk|ssd|gds|fs_native|max_capacity_gb)(?![a-z])(?:(?!\bmemory\b|\bpool\b|support evict)[^\n]){0,120}"
    r"(?:exceed|grow|fill|full\b|accumulat|pressure"
    r"|limit the size|size cap|unbounded|watermark|eviction|not deleted|clean-?up)"
    r"|(?:unbounded|clean-?up|exceed\w*)[^\n]{0,60}(?:disk|ssd)"
)
GROWS = re.compile(
    r"(?i)memory (?:leak|usage|consumption)?[^\n.]{0,40}(?:leak|grow|increas|climb)|leak(?:s|ing|ed)? (?:\w+ )?memory"
    r"|\b(?:ram|memory)\b[^\n.]{0,24}(?:grow|increas|climb|\bris(?:es|ing)\b)"
    r"|\b(?:uses?|takes?|consumes?) (?:\w+ )?\d{3,} ?gi?b\b"
    r"|\bRSS\b|\u5185\u5b58\u6cc4"
)
#: Anywhere in the text, of a connector that keeps KV for later.
SLOW = re.compile(
    r"(?i)(?<![a-z])TTFT(?![a-z])|time to first token|slower|worse than"
    r"|throughput[^\n]{0,60}(?:not|lower|drop|less|worse)"
    r"|no (?:performance )?(?:improvement|speed-?up|benefit)|performance (?:worse|regress|degrad|drop)|\u53d8\u6162"
)
KEEPS = re.compile(r"(?i)lmcache|offload|cacheblend")
