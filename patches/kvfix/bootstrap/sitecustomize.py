# This file activates kvfix in programs that load no vLLM plugins, such as `lmcache server`. `kvfix run` puts the folder
# of this file first on PYTHONPATH, so every child Python process imports this file when it starts. A child may run an
# older Python than `kvfix run`, so this file uses only syntax that any Python 3 reads.
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _here]

try:
    from kvfix.activation import load
except ImportError as error:
    if not os.environ.get("KVFIX_MISSING"):
        os.environ["KVFIX_MISSING"] = "1"  # so that the children of this program do not repeat the warning
        sys.stderr.write(
            "kvfix WARNING [pid %d] %s cannot import kvfix (%s): it runs unpatched. Install kvfix there.\n"
            % (os.getpid(), sys.executable, error)
        )
else:
    load()

# sys.modules has this file as "sitecustomize". Remove the entry, and then import the user's own sitecustomize, if any.
_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except ImportError as error:
    if getattr(error, "name", None) != "sitecustomize":
        raise
    if _ours is not None:
        sys.modules["sitecustomize"] = _ours
