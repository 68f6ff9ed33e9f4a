"""Every function of the modules that work for one request, found in their source, and a way to make any one fail once.

A function that is added to one of them is a site by itself; it must then be reached by the calls of
`test_request_faults`, or be named below with the reason why it is none of a request's.
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

FOLDERS = {"jaxllm": ROOT / "jaxllm", "jaxllm_server": ROOT / "server" / "jaxllm_server"}

MODULES = (
    "jaxllm.engine.async_llm",
    "jaxllm.engine.fair_threads",
    "jaxllm.engine.inbox",
    "jaxllm.engine.input_batch",
    "jaxllm.engine.input_processor",
    "jaxllm.engine.kv_events",
    "jaxllm.engine.llm_engine",
    "jaxllm.engine.output_streams",
    "jaxllm.engine.sequence",
    "jaxllm.sampling.sampler",
    "jaxllm.outputs",
    "jaxllm.sampling_params",
    "jaxllm.text.chat_template",
    "jaxllm.text.detokenizer",
    "jaxllm.text.repetition_detector",
    "jaxllm.text.special_token_guard",
    "jaxllm.text.stop_strings",
    "jaxllm.text.tokenizer",
    "jaxllm_server.grpc.gate",
    "jaxllm_server.grpc.messages",
    "jaxllm_server.grpc.replies",
    "jaxllm_server.grpc.service",
    "jaxllm_server.http.answers",
    "jaxllm_server.http.app",
    "jaxllm_server.http.guard",
    "jaxllm_server.http.sse",
    "jaxllm_server.observability.prometheus",
    "jaxllm_server.observability.tracing",
    "jaxllm_server.openai.chat",
    "jaxllm_server.openai.completions",
    "jaxllm_server.openai.messages",
    "jaxllm_server.parsers.reasoning",
    "jaxllm_server.parsers.tool_call_json",
    "jaxllm_server.parsers.tool_parsers",
    "jaxllm_server.shared.calls",
    "jaxllm_server.shared.chat_checks",
    "jaxllm_server.shared.client_quota",
    "jaxllm_server.shared.serving",
    "jaxllm_server.shared.strict_json",
)
# Why the other modules have no site.
OTHER_MODULES = {
    "pure functions over all requests, proven by simulation": (
        *(
            "jaxllm.runner.batch",
            "jaxllm.scheduler.block_pool",
            "jaxllm.scheduler.recorded",
            "jaxllm.scheduler.scheduler",
            "jaxllm.scheduler.state",
        ),
    ),
    "the device's side of a step; its failures are in test_step_faults": (
        *(
            "jaxllm.runner.device_state",
            "jaxllm.sampling.logits_processors",
            "jaxllm.runner.profiling",
            "jaxllm.runner.compiled_programs",
            "jaxllm.runner.model_runner",
            "jaxllm.runner.step",
        ),
        "jaxllm.sampling.vocab_parallel",
    ),
    "the loop around all requests; its death is in test_process_faults": ("jaxllm.engine.engine_thread",),
    "before the first request": (
        *(
            "jaxllm",
            "jaxllm.__main__",
            "jaxllm.runner.aot_compile",
            "jaxllm.commands.cli",
            "jaxllm.config",
            "jaxllm.commands.conversion",
        ),
        *(
            "jaxllm.commands.doctor_report",
            "jaxllm.file_limit",
            "jaxllm.commands.flags",
            "jaxllm.runner.memory_plan",
            "jaxllm.model.files",
        ),
        *("jaxllm.engine.loader", "jaxllm.runner.startup_timing"),
        *(
            "jaxllm.runner.aot_manifest",
            "jaxllm.runner.model_setup",
            "jaxllm.model.sharding",
            "jaxllm.text.tokenizer_files",
        ),
        *("jaxllm_server", "jaxllm_server.launch", "jaxllm_server.shared.options", "jaxllm_server.shared.sockets"),
        *("jaxllm_server.shared.auth", "jaxllm_server.grpc.server"),
    ),
    "numbers": ("jaxllm.metrics", "jaxllm_server.observability.log_stats"),
    "how a failure is told, which is a failure's own last step": (
        *(
            "jaxllm.errors",
            "jaxllm_server.shared.error_table",
            "jaxllm_server.grpc.error_details",
            "jaxllm_server.http.error_bodies",
        ),
        "jaxllm_server.observability.log_limit",
    ),
    "health": ("jaxllm_server.grpc.health",),
    "the connection, not the request": ("jaxllm_server.http.protocol", "jaxllm_server.http.server"),
    "without a server": ("jaxllm.engine.llm",),
    "beside the engine, which goes on without it": (
        "jaxllm.replay.recording",
        "jaxllm.replay.replay",
    ),
    "inside of a template": ("jaxllm.text.template_environment",),
    "tokenizing alone": ("jaxllm_server.openai.tokens",),
}


class Site(NamedTuple):
    """A function by its module and its name in it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('jaxllm').lstrip('._')}:{self.name}"


# Functions of MODULES that none of the calls reaches, or that are not one request's, by the reason.
NOT_OF_A_REQUEST: dict[str, dict[str, str]] = {
    "start and stop": {
        "jaxllm.engine.async_llm": "AsyncLLM.__init__ AsyncLLM.from_engine_args AsyncLLM.start AsyncLLM.__aenter__ "
        "AsyncLLM.__aexit__ AsyncLLM._ready AsyncLLM._died AsyncLLM.announce_drain AsyncLLM.drain AsyncLLM.wait_dead "
        "AsyncLLM.close",
        "jaxllm.text.chat_template": "compile_template _one_line",
        "jaxllm.text.special_token_guard": "SpecialTokens.__init__",
        "jaxllm.engine.llm_engine": "LLMEngine.__init__ LLMEngine.from_engine_args LLMEngine.close",
        "jaxllm.engine.fair_threads": "FairThreads.__init__ FairThreads.shutdown",
        "jaxllm.engine.input_batch": "Seats.__init__",
        "jaxllm.engine.inbox": "Inbox.__init__ Inbox.stop",
        "jaxllm.engine.kv_events": "BlockLog.__init__ BlockLog.end",
        "jaxllm.engine.output_streams": "StreamTable.__init__ StreamTable.fail_all StreamTable.wait_idle",
        "jaxllm.text.tokenizer": "_byte_level_alphabet load_tokenizer Tokenizer.__init__ Tokenizer.vocab_size "
        "Tokenizer.bos_token_id Tokenizer.eos_token_id Tokenizer.has_chat_template Tokenizer._named_id _decoding_of "
        "_flatten Tokenizer._longest_token Tokenizer._most_characters Tokenizer._special_tokens Tokenizer._around "
        "Tokenizer._template NoTokenizer.__init__",
        "jaxllm.sampling_params": "default_sampling_params",
        "jaxllm_server.shared.client_quota": "Shares.__init__ Places.__init__",
        "jaxllm_server.grpc.gate": "Gate.__init__ Gate._guard",
        "jaxllm_server.grpc.service": "InferenceService.__init__ ControlService.__init__",
        "jaxllm_server.http.app": "make_app Endpoints.__init__ Endpoints.routes Endpoints._gated Front.__init__ "
        "_counted _answer_other",
        "jaxllm_server.http.guard": "Guard.__init__ Gate.__init__ Bodies.__init__",
        "jaxllm_server.observability.prometheus": "PrometheusObserver.__init__",
        "jaxllm_server.shared.serving": "Serving.__init__ _model_name",
        "jaxllm_server.observability.tracing": "Tracer.from_endpoint Tracer.close _RecordingTracer.__init__ "
        "_RecordingTracer.close "
        "_exporter _tracer_to",
    },
    "traced into a program": {
        "jaxllm.sampling.sampler": "Extras.fields Extras.unpack unpack_rows sample logprobs_of all_logprobs biased "
        "penalized processed without_bad_words restricted _held_back _chosen _chosen_by_kernel kept_tokens",
    },
    "a whole step, whose failure ends the engine or is recovered from: test_step_faults, test_process_faults": {
        "jaxllm.engine.async_llm": "AsyncLLM._deliver",
        "jaxllm.engine.llm_engine": "LLMEngine.step LLMEngine._step LLMEngine._take_in LLMEngine._outputs "
        "LLMEngine.load "
        "LLMEngine._check_open LLMEngine.has_unfinished_requests LLMEngine.take_block_events _uninterrupted "
        "LLMEngine.abort_requests LLMEngine._recover",
        "jaxllm.engine.inbox": "Inbox.take Inbox.settle",
    },
    "around all that is caught: what it raises itself, the library below answers": {
        "jaxllm_server.grpc.gate": "Gate.intercept_service",
        "jaxllm_server.http.app": "Front.__call__",
    },
    "the last act of cleaning up: nothing stands behind it": {
        "jaxllm.engine.async_llm": "AsyncLLM._close",
        "jaxllm.engine.fair_threads": "FairThreads._ended FairThreads._give_back FairThreads._hand_out",
        "jaxllm.engine.output_streams": "StreamTable.close",
    },
    "how a failure goes on": {
        "jaxllm.engine.async_llm": "AsyncLLM._refused",
        "jaxllm.engine.llm_engine": "LLMEngine._fail LLMEngine._end_group LLMEngine._largest _is_out_of_memory",
        "jaxllm.engine.sequence": "Group.show_failure",
        "jaxllm.engine.input_batch": "RequestFault.__init__",
        "jaxllm.engine.output_streams": "Stream.fail StreamTable.fail",
        "jaxllm.sampling_params": "_shown _pieces",
        "jaxllm_server.grpc.gate": "Gate._refusal _fail _request_id",
        "jaxllm_server.http.answers": "Answer._name_of",
        "jaxllm_server.http.app": "_send_error _refuse_path",
        "jaxllm_server.http.guard": "Guard._is_allowed _authority _answer_preflight",
        "jaxllm_server.openai.messages": "error_body error_body_of",
        "jaxllm_server.http.sse": "event",
        "jaxllm_server.shared.strict_json": "_whole _unique _finite _refuse_constant",
        "jaxllm_server.grpc.messages": "_too_many",
    },
    "control, lists and statistics that somebody asks for": {
        "jaxllm.engine.async_llm": "AsyncLLM.state AsyncLLM.num_live AsyncLLM.vocab_size AsyncLLM.is_paused "
        "AsyncLLM.abort "
        "AsyncLLM.reset_prefix_cache "
        "AsyncLLM.start_profile AsyncLLM.kv_events AsyncLLM.pause AsyncLLM.resume AsyncLLM._call _set_result "
        "_set_exception",
        "jaxllm.engine.llm_engine": "LLMEngine.add_request LLMEngine.abort_request LLMEngine.reset_prefix_cache "
        "LLMEngine.start_profile",
        "jaxllm.engine.inbox": "Inbox.abort Inbox.call Inbox.set_paused",
        "jaxllm.engine.kv_events": "BlockLog.append BlockLog._wake BlockLog.read",
        "jaxllm.engine.output_streams": "StreamTable.__len__ StreamTable.ids StreamTable.of_id StreamTable.wait_quiet",
        "jaxllm.text.tokenizer": "Tokenizer.token Tokenizer.ids Tokenizer.is_text",
        "jaxllm.outputs": "CompletionOutput.finished",
        "jaxllm_server.grpc.gate": "Gate._receive_health _parsed",
        "jaxllm_server.grpc.messages": "tokenize_call_of detokenize_ids_of",
        "jaxllm_server.grpc.replies": "kv_events_of _hash default_sampling_of default_stop_of",
        "jaxllm_server.grpc.service": "InferenceService.Embed InferenceService.Tokenize InferenceService.Detokenize "
        "InferenceService.ListModels ControlService.GetServerInfo ControlService.GetLoad ControlService.Abort "
        "ControlService.ResetPrefixCache ControlService.PauseGeneration ControlService.ResumeGeneration "
        "ControlService.StreamKvEvents ControlService.LoadAdapter ControlService.UnloadAdapter "
        "ControlService.ListAdapters _now",
        "jaxllm_server.http.app": "Endpoints.tokenize Endpoints.detokenize Endpoints.models Endpoints.model "
        "Endpoints.health Endpoints.live Endpoints.ready Endpoints.version Endpoints.load Endpoints.metrics _json",
        "jaxllm_server.openai.messages": "model_card model_list",
        "jaxllm_server.observability.prometheus": "Histogram.buckets PrometheusObserver.render "
        "PrometheusObserver.collect "
        "PrometheusObserver.describe PrometheusObserver._engine_families PrometheusObserver._histogram_families "
        "PrometheusObserver._device_families PrometheusObserver._handled_families PrometheusObserver._counter "
        "PrometheusObserver._gauge PrometheusObserver._family",
        "jaxllm_server.shared.serving": "Serving.tokenize",
    },
    "called by a function that is reached, for what the embedded model or these calls do not have": {
        "jaxllm.text.chat_template": "_mark_end _cut_at_mark",
        "jaxllm.text.special_token_guard": "SpecialTokens.encode_literally SpecialTokens._refusal Disguise.take_off "
        "Disguise._twin "
        "_strings _copy",
        "jaxllm.text.detokenizer": "_extend_run _longer _settle_run _unfinished",
        "jaxllm.engine.input_processor": "_salt",
        "jaxllm.engine.output_streams": "merge",
        "jaxllm.text.tokenizer": "Tokenizer.decode Tokenizer.end_of Tokenizer._make_piece "
        "Tokenizer.apply_chat_template "
        "Tokenizer._template_source Tokenizer._refusal NoTokenizer.piece NoTokenizer._refuse",
        "jaxllm.sampling_params": "_extra_args",
        "jaxllm.engine.fair_threads": "FairThreads._withdraw",
        "jaxllm_server.shared.chat_checks": "_arguments_of _num_brackets _with_parsed _object_of",
        "jaxllm_server.grpc.messages": "_tools_of _from_value _seconds",
        "jaxllm_server.grpc.replies": "whole_calls call_deltas",
        "jaxllm_server.grpc.service": "InferenceService._hinted Writer._look",
        "jaxllm_server.openai.chat": "_tool_call_delta",
        "jaxllm_server.openai.completions": "_first_name _without_output",
        "jaxllm_server.openai.messages": "_is_same prompt_logprobs_of",
        "jaxllm_server.parsers.reasoning": "ReasoningParser._split",
        "jaxllm_server.shared.serving": "Serving.detokenize given_of _make_call_id",
        "jaxllm_server.parsers.tool_call_json": "CallObject.__init__ CallObject.read CallObject.take_arguments "
        "CallObject._begins_value CallObject._begin_value CallObject._read_value CallObject._end_value "
        "CallObject._close CallObject._break _Value.__init__ _Value.read skip_space _string",
        "jaxllm_server.parsers.tool_parsers": "ToolParser._end ToolParser._follow ToolParser._match "
        "ToolParser._begin_object "
        "ToolParser._read_object HermesParser._open HermesParser._read_opening HermesParser._follow "
        "HermesParser._read_between LlamaParser.__init__ LlamaParser._read_between LlamaParser._refuse "
        "LlamaParser._read_content LlamaParser._follow LlamaParser._end",
        "jaxllm_server.observability.tracing": "Span.set _RecordedSpan.__init__ _RecordedSpan.set _RecordedSpan.end "
        "_RecordingTracer.start",
    },
}
LISTED = {
    Site(module, name)
    for modules_of in NOT_OF_A_REQUEST.values()
    for module, names in modules_of.items()
    for name in names.split()
}


WRAPPED = {Site("jaxllm.engine.output_streams", "merge")}  # reached by a call of its own


class InjectedError(RuntimeError):
    """The fault."""


def modules() -> set[str]:
    """Name the modules of the engine and the server, packages below them left out."""
    return {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
        if not {"bench", "client", "commands", "model", "v1"} & set(path.parts)
    }


def sites() -> Iterator[tuple[Site, Any, str]]:
    """Find every function of MODULES: the site, what holds it (a module or a class) and its name there."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        source = module.__file__
        assert source is not None
        for node in ast.parse(Path(source).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Site(module_name, node.name), module, node.name
            elif isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases):
                holder = getattr(module, node.name)
                for own in node.body:
                    if isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield Site(module_name, f"{node.name}.{own.name}"), holder, own.name


class Injector:
    """Stands before every site: counts its calls, and makes the call fail that it is told to."""

    def __init__(self) -> None:
        self.counts: Counter[Site] = Counter()
        self.found: list[Site] = []
        self._armed: Site | None = None
        self._wait = 0  # calls that are let through
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Put a wrapper around every site, under every name that it was imported by."""
        for site, holder, name in sites():
            self.found.append(site)
            if site in LISTED - WRAPPED:
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
        """Take all wrappers away."""
        while self._undo:
            holder, name, original = self._undo.pop()
            setattr(holder, name, original)

    @contextmanager
    def armed(self, site: Site, wait: int) -> Iterator[Callable[[], bool]]:
        """Let `wait` calls of a site through and fail the next; give what says whether that has happened."""
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
        """Wrap a function in one of its own kind, which its callers may look at."""
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
