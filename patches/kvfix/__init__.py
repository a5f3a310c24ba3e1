"""Fixes for the KV-cache connectors of the installed vLLM and LMCache.

    import kvfix
    kvfix.apply()          # before vLLM is launched

`apply` fixes the known bugs of the installed releases. The fixes run in this process and in vLLM's child processes.
`apply` does not import vLLM, LMCache or torch. kvfix applies each fix later, after the import of the fixed module.
"""

from kvfix.activation import apply, revert, status
from kvfix.version import VERSION as __version__

__all__ = ["__version__", "apply", "revert", "status"]
