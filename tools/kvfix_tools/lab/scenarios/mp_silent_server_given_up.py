"""A slow server misses a heartbeat: mp-load-after-given-up in LMCache 0.4, where the worker cannot know better."""

from dataclasses import replace

from kvfix_tools.lab.scenarios.mp_load_after_given_up import SCENARIO as FIXED

SCENARIO = replace(FIXED, wrong={"vllm": ">=0.22.0", "lmcache": ">=0.4.5,<0.5"}, needs={"lmcache": ">=0.4.5,<0.5"})
