"""Fixes for the KV-cache connectors of the installed vLLM and LMCache.

    import kvfix
    kvfix.apply()          # before vLLM is launched

The known bugs of the installed releases are then fixed in this process and in every process that vLLM starts
from it. Nothing of vLLM, LMCache or torch is imported by this; a fix is put in place when its module arrives.
"""

from kvfix.activation import apply, revert, status

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "revert", "status"]
