import os
import sys
from pathlib import Path

import pytest

import kvfix
from tests.conftest import Fresh

ACTIVE = "from kvfix.session import session; result = str(session.config) if session.config else None"
RAY = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
LOAD, APPLY = "from kvfix.activation import load; load()", "import kvfix; kvfix.apply()"


@pytest.mark.parametrize(
    ("call", "text", "active"),
    [(LOAD, "", None), (LOAD, "off", None), (LOAD, "fix skip=KVF001", "fix skip=KVF001"), (APPLY, "off", None)],
)
def test_plugin_and_apply_read_the_environment(call: str, text: str, active: str | None, fresh: Fresh) -> None:
    assert fresh(f"{call}; {ACTIVE}", KVFIX=text) == active


def test_without_a_configuration_nothing_changes(fresh: Fresh) -> None:
    code = """
import os, sys
before = dict(os.environ), list(sys.meta_path)
from kvfix.activation import load
load()
result = (dict(os.environ), list(sys.meta_path)) == before and "kvfix.applying" not in sys.modules
"""
    assert fresh(code) is True


@pytest.mark.parametrize("invalid", ["yes please", "fix only=KVF999", "{'mode': 'fix'}", "fix only", "\u00fc\udcff"])
def test_an_invalid_configuration_is_one_clear_line_and_applies_nothing(invalid: str, fresh: Fresh) -> None:
    code = "from kvfix.activation import load; load(); load(); from kvfix.session import session; print(session.config)"
    done = fresh.run([sys.executable, "-c", code], KVFIX=invalid)
    assert (done.returncode, done.stdout) == (0, "None\n")
    (line,) = done.stderr.strip().splitlines()
    assert all(part in line for part in ("KVFIX=", "Nothing is patched", "Write KVFIX=fix"))


@pytest.mark.parametrize(
    ("before", "after"), [(None, None), ("", "kvfix"), ("mine", "mine,kvfix"), ("kvfix, mine", "kvfix,mine")]
)
def test_hand_over(before: str | None, after: str | None, fresh: Fresh) -> None:
    code = f"""
import os, kvfix
names = ("KVFIX", "VLLM_PLUGINS", {RAY!r})
before = [os.environ.get(name) for name in names]
kvfix.apply(skip=["KVF001"]); kvfix.apply()
result = [os.environ.get(name) for name in names]
kvfix.revert(); kvfix.revert()
result.append([os.environ.get(name) for name in names] == before)
"""
    environment = {} if before is None else {"VLLM_PLUGINS": before}
    assert fresh(code, **environment) == ["fix", after, "KVFIX", True]
    assert fresh(code, **environment, **{RAY: "NCCL_, MY_"})[2] == "NCCL_,MY_,KVFIX"


def test_apply_warns_of_a_wrong_configuration_in_the_environment(fresh: Fresh) -> None:
    code = f"{APPLY}; {ACTIVE}; result = result, *session.reported"
    assert fresh(code, KVFIX="check skip=KVF001") == ["fix"]
    active, warning = fresh(code, KVFIX="bogus")
    assert active == "fix"
    assert warning.startswith("the environment has KVFIX='bogus': unknown mode 'bogus'")


def test_an_unknown_name_changes_nothing() -> None:
    before = dict(os.environ)
    with pytest.raises(ValueError, match="unknown fix 'nope'"):
        kvfix.apply(skip=["nope"])
    assert dict(os.environ) == before


class TestRun:  # `kvfix run` also reaches programs that load no vLLM plugins
    KVFIX = (sys.executable, "-m", "kvfix_tools.cli", "run")
    SHOW = "import os, sys, kvfix.session as s; print(s.session.config, sys.modules['sitecustomize'].__file__)"

    def test_reaches_children_of_children(self, fresh: Fresh) -> None:
        inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {self.SHOW!r}])"
        done = fresh.run([*self.KVFIX, "--skip", "KVF001", "--plus", "KVF017", "--", sys.executable, "-c", inner])
        assert done.stdout.startswith("fix skip=KVF001 plus=KVF017 "), done.stderr

    def test_imports_the_users_sitecustomize(self, tmp_path: Path, fresh: Fresh) -> None:
        (tmp_path / "sitecustomize.py").write_text("print('mine')")
        code = f"""
import os, sys
os.environ['PYTHONPATH'] += ':{tmp_path}'
sys.argv[1:] = ['run', '--', sys.executable, '-c', {self.SHOW!r}]
from kvfix_tools.cli import main; main()"""
        done = fresh.run([sys.executable, "-c", code])
        assert done.stdout.splitlines() == ["mine", f"fix {tmp_path / 'sitecustomize.py'}"], done.stderr

    def test_reaches_the_lmcache_server(self, fresh: Fresh) -> None:
        """The server's console script loads no vLLM plugin. With `--help` the script imports LMCache and exits."""
        server = Path(sys.executable).with_name("lmcache")
        done = fresh.run([*self.KVFIX, "--", sys.executable, "-v", str(server), "server", "--help"])
        assert done.returncode == 0, done.stderr[-2000:]
        assert "import 'kvfix.activation'" in done.stderr
        assert "import 'kvfix.fixes.api'" in done.stderr, "the first module of LMCache must have loaded the catalogue"

    def test_a_python_without_kvfix_is_reported_once(self, fresh: Fresh) -> None:
        """With -S a process has no site-packages, and so no kvfix. Only the parent reports the missing kvfix."""
        child = [sys.executable, "-S", "-c", "import sitecustomize; print('ran')"]
        code = f"import sitecustomize, subprocess; subprocess.run({child!r})"
        bootstrap = str(Path(__file__).parents[2] / "patches/kvfix/bootstrap")
        done = fresh.run([sys.executable, "-S", "-c", code], PYTHONPATH=bootstrap, KVFIX="fix")
        (line,) = done.stderr.splitlines()
        assert (done.stdout, "cannot import kvfix" in line, "Install kvfix there" in line) == ("ran\n", True, True)

    def test_errors_are_clear(self, fresh: Fresh) -> None:
        for arguments, code, text in (
            (["--", "no-such-program"], 127, "no-such-program: no such program"),
            (["--only", "KVF999", "--", "true"], 2, "unknown fix 'KVF999'"),
            (["--mode", "heal", "--", "true"], 2, "known: fix"),
        ):
            done = fresh.run([*self.KVFIX, *arguments])
            assert (done.returncode, "Traceback" in done.stderr) == (code, False)
            assert text in done.stderr
