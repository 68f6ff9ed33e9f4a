"""Settings of all tests: CPU, four virtual devices, no network, checked shapes, a program cache in the checkout.

After each test, no live engine may have compiled anything during a request. A program from the cache is still traced,
so its shapes are checked in every run.
"""

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Under `python -O` pytest still runs the asserts of the modules registered here.
pytest.register_assert_rewrite(*(f"tests.{path.parent.name}" for path in Path(__file__).parent.glob("*/__init__.py")))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAXLLM_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "programs"))
os.environ.setdefault("JAXLLM_CACHE_BYTES", "0")  # shapes are checked while programs are traced

OUT_OF_TIME = "the time in $TESTS_END_AT has passed"

# A shell starts a background job with SIGINT ignored, which its processes inherit: tests could not interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

install_import_hook(["jaxllm.model.decoder", "jaxllm.model.eagle", "pallas_kernels.api"], "beartype.beartype")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test with its fixture `run` if it has one, otherwise on a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    import uvloop

    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    pyfuncitem.funcargs.get("run", uvloop.run)(pyfuncitem.function(**given))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the simulation, the longest file; started last, it would keep one worker busy and the others idle."""
    items.sort(key=lambda item: item.path.parent.name != "simulation")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests after the time in $TESTS_END_AT, in seconds since 1970: `.ci/run` has a limit on slow machines."""
    if time.time() > float(os.environ.get("TESTS_END_AT", "inf")):
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    late = [report for report in terminalreporter.stats.get("skipped", ()) if OUT_OF_TIME in str(report.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests were not run: {OUT_OF_TIME}", yellow=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys and certificates of `tests.support.certificates`."""
    from tests.support.certificates import make_certificates

    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_compiled_in_front_of_a_request(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which an engine compiled something while it started a step."""
    runner = sys.modules.get("jaxllm.runner.model_runner")
    if runner is None:
        yield  # a module that makes engines imports it first
        return
    late: list[str] = []
    note = runner.Runner.note_compilation

    def noted(self: Any) -> None:
        before = self.metrics.compilations_after_ready
        note(self)
        late.extend([repr(self.setup.folder)] * (self.metrics.compilations_after_ready - before))

    monkeypatch.setattr(runner.Runner, "note_compilation", noted)
    yield
    assert not late, f"compiled in front of a request: {late}"


@pytest.fixture(autouse=True)
def accounts_are_sums() -> Iterator[None]:
    """Fail a test in which an account differed from the sum of its entries."""
    from tests.support import accounts

    accounts.watch()
    accounts.differences.clear()
    yield
    accounts.watch()
    assert not accounts.differences, accounts.differences


@pytest.fixture
def run_jaxllm(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line; return the exit code, standard output and standard error."""
    from jaxllm.commands import cli

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the command line with `tests.support.fake_llm` in place of the model."""
    from tests.support.fake_llm import caller

    return caller(monkeypatch, capsys)
