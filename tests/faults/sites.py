"""Find every function in the source that works for one request, and make any one of its calls fail.

A fault is placed at each function of `ROOMS` that the calls of `test_request_faults` reach. Functions added there are
found without being listed anywhere.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import ROOT

# Folders and files with functions called for one request. The scheduler, the runner and the model work for a whole
# step; test_step_faults and test_process_faults test their failures.
ROOMS = (
    *("jaxllm/engine", "jaxllm/text", "jaxllm/outputs.py", "jaxllm/sampling_params.py", "server/jaxllm_server/grpc"),
    *("server/jaxllm_server/http", "server/jaxllm_server/observability", "server/jaxllm_server/openai"),
    *(f"server/jaxllm_server/{room}" for room in ("access", "generation", "parsers", "pooling", "requests", "shared")),
    *("server/jaxllm_server/adapters.py", "server/jaxllm_server/serving.py"),
)


class Site(NamedTuple):
    """A function, by its module and its qualified name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('jaxllm').lstrip('._')}:{self.name}"


# Functions of ROOMS whose failure affects more than one request, by the reason.
NOT_OF_A_REQUEST = {
    "a step of all requests, whose failure is recovered from or ends the engine": {
        "jaxllm.engine.async_llm": "AsyncLLM._deliver",
        "jaxllm.engine.engine_thread": "EngineThread._take_in EngineThread._step EngineThread._turn "
        "EngineThread.call_back _with_speed",
        "jaxllm.engine.interrupts": "uninterrupted",
        "jaxllm.engine.engine_core": "EngineCore.step EngineCore._step EngineCore._take_in EngineCore.load "
        "EngineCore._check_open EngineCore.has_unfinished_requests EngineCore.abort_requests "
        "EngineCore.take_block_events",
        "jaxllm.engine.output_processor": "OutputProcessor.take_in OutputProcessor.due OutputProcessor.abort "
        "OutputProcessor.add",
        "jaxllm.engine.recovery": "FailedSteps.reset",
        "jaxllm.engine.inbox": "Inbox.take Inbox.settle",
    },
    "around everything that is caught: gRPC and the HTTP server answer": {
        "jaxllm_server.grpc.gate": "Gate.intercept_service",
        "jaxllm_server.http.app": "Front.__call__",
        "jaxllm_server.http.error_bodies": "is_anthropics",
    },
    "a template runs in it, whose own errors are the caller's": {
        "jaxllm.text.chat_template": "generated",
    },
    "the last act of cleaning up": {
        "jaxllm.engine.streaming_engine": "StreamingEngine._close",
        "jaxllm.engine.fair_threads": "FairThreads._ended FairThreads._give_back FairThreads._hand_out "
        "FairThreads._may_run",
        "jaxllm.engine.output_streams": "StreamTable.close",
    },
}
EXCLUDED = {
    Site(module, name)
    for modules in NOT_OF_A_REQUEST.values()
    for module, names in modules.items()
    for name in names.split()
}
MERGE = Site("jaxllm.engine.output_streams", "merge")  # rarely reached by chance, so another test covers it


class InjectedError(RuntimeError):
    """The injected fault."""


def _modules() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        path = ROOT / room
        assert path.exists(), f"{room} was moved"
        root = ROOT / "server" if room.startswith("server/") else ROOT
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if each.name != "__init__.py":
                yield ".".join(each.relative_to(root).with_suffix("").parts), each


def sites() -> Iterator[tuple[Site, Any, str]]:
    """Find every function of ROOMS: the site, its module or class, and its name there."""
    for module_name, path in _modules():
        module = importlib.import_module(module_name)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Site(module_name, node.name), module, node.name
            elif isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases):
                holder = getattr(module, node.name)
                for own in node.body:
                    if isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield Site(module_name, f"{node.name}.{own.name}"), holder, own.name


class Injector:
    """Wrap every site: count its calls, and make one chosen call fail."""

    def __init__(self) -> None:
        self.counts: Counter[Site] = Counter()
        self.found: list[Site] = []
        self._armed: Site | None = None
        self._wait = 0  # calls to let through before the fault
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Put a wrapper around every site, under every name that imports it."""
        for site, holder, name in sites():
            self.found.append(site)
            if site in EXCLUDED:
                continue
            if inspect.ismodule(holder):
                original = getattr(holder, name)
                wrapped = self._wrap(site, original)
                for module in list(sys.modules.values()):
                    if getattr(module, "__name__", "").startswith("jaxllm"):
                        for alias, value in list(vars(module).items()):
                            if value is original:
                                self._set(module, alias, wrapped)
            else:
                self._set(holder, name, self._wrap_attribute(site, vars(holder)[name]))

    def remove(self) -> None:
        """Remove all wrappers."""
        while self._undo:
            holder, name, original = self._undo.pop()
            setattr(holder, name, original)

    @contextmanager
    def armed(self, site: Site, wait: int) -> Iterator[Callable[[], bool]]:
        """Let `wait` calls of a site through and fail the next; yield a function that returns whether it has failed."""
        self._armed, self._wait = site, wait
        try:
            yield lambda: self._armed is None
        finally:
            self._armed = None

    def _fires(self, site: Site) -> bool:
        self.counts[site] += 1
        if site != self._armed:
            return False
        self._wait -= 1
        if self._wait >= 0:
            return False
        self._armed = None
        return True

    def _set(self, holder: Any, name: str, value: Any) -> None:
        self._undo.append((holder, name, vars(holder)[name]))
        setattr(holder, name, value)

    def _wrap_attribute(self, site: Site, value: Any) -> Any:
        if isinstance(value, property):
            return property(self._wrap(site, value.fget), value.fset)
        if isinstance(value, classmethod | staticmethod):
            return type(value)(self._wrap(site, value.__func__))
        if isinstance(value, functools.cached_property):
            wrapped = functools.cached_property(self._wrap(site, value.func))
            wrapped.__set_name__(object, site.name.rpartition(".")[2])
            return wrapped
        return self._wrap(site, value)

    def _wrap(self, site: Site, function: Any) -> Any:
        """Wrap a function in one of the same kind, since callers may inspect it."""
        fires = self._fires

        def fail() -> None:
            raise InjectedError(f"secret of /home at 0xdeadbeef: {site}")

        async def fail_first() -> Any:
            fail()
            yield

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*arguments: Any, **named: Any) -> Any:
                if fires(site):
                    fail()
                return await function(*arguments, **named)

        elif inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            def wrapper(*arguments: Any, **named: Any) -> Any:
                return fail_first() if fires(site) else function(*arguments, **named)

        else:

            @functools.wraps(function)
            def wrapper(*arguments: Any, **named: Any) -> Any:
                if fires(site):
                    fail()
                return function(*arguments, **named)

        return wrapper
