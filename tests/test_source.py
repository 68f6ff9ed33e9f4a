"""Rules for the source: no code from data, no asserts as checks, no regular expressions of superlinear time.

Reads the syntax trees of all shipped code; each rule is proved on a sample that breaks it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from jaxllm.text import special_token_guard
from tests.support.accounts import ACCOUNTS
from tests.support.paths import ROOT

PACKAGES = ("jaxllm", "server", "pallas_kernels")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
GENERATED = ROOT / "jaxllm" / "v1"
Findings = Iterator[tuple[int, str]]  # line, problem

# Code from data.

UNSAFE_MODULES = frozenset(
    "pickle _pickle cPickle pickletools marshal dill shelve cloudpickle joblib jsonpickle code codeop imp runpy".split()
)
UNSAFE_CALLS = frozenset("eval exec compile __import__ execfile breakpoint".split())
UNSAFE_METHODS = frozenset(
    """
    yaml.load yaml.load_all yaml.full_load yaml.unsafe_load yaml.Loader yaml.UnsafeLoader yaml.FullLoader torch.load
    os.system os.popen os.execv os.execve os.execvp os.spawnl os.spawnv subprocess.getoutput subprocess.getstatusoutput
    np.loads numpy.loads pd.read_pickle pandas.read_pickle builtins.eval builtins.exec types.CodeType
    """.split()
)
# Files that start jaxllm's commands, git or a compiler; with a list of arguments, never through a shell.
STARTS_PROCESSES = (
    *(
        "jaxllm/bench/",
        "jaxllm/fleet/replica.py",
        "jaxllm/hosts/restart.py",
        "jaxllm/compiling/compile_noise.py",
        "pallas_kernels/native/build.py",
    ),
    "jaxllm/limited_process.py",
    "server/jaxllm_server/grpc/filter_process.py",
)
# Unpickles compiled programs from files that no other user could have written.
UNPICKLES = "jaxllm/compiling/kept_programs.py"
# Files that import by a computed name: jaxllm's modules, and modules named by the engine's settings.
IMPORTS_BY_NAME = ("jaxllm/__init__.py", "jaxllm/sampling/logits_processors.py", "pallas_kernels/choice.py")


def unsafe_loads(tree: ast.Module, file: str) -> Findings:
    """Find calls and imports that could run code from a file or a message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if file != UNPICKLES and any(alias.name.endswith("serialize_executable") for alias in node.names):
                yield node.lineno, "imports serialize_executable"
            for name in _imported(node):
                top = name.partition(".")[0]
                if top in UNSAFE_MODULES:
                    yield node.lineno, f"imports {name}"
                if top == "subprocess" and not file.startswith(STARTS_PROCESSES):
                    yield node.lineno, "imports subprocess"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in UNSAFE_CALLS or called in UNSAFE_METHODS:
                yield node.lineno, f"calls {called}"
            if called.endswith("import_module") and file not in IMPORTS_BY_NAME:
                yield node.lineno, f"calls {called}"
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("allow_pickle", "trust_remote_code", "shell", "weights_only") and not is_false:
                    yield node.lineno, f"{keyword.arg} is not False"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_METHODS:
            yield node.lineno, f"names {ast.unparse(node)}"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if node.level == 0 else []


# Assertions.


def checking_asserts(tree: ast.Module, file: str) -> Findings:
    """Find asserts that do more than narrow a type for the type checker.

    `python -O` removes asserts (vLLM CVE-2026-41523 was a check that it removed). An assert that something is not None,
    or an instance of a class, may stay: without it the next line fails by itself. An assert with a message is a check,
    and should raise.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            is_all = not isinstance(node.test, ast.BoolOp) or isinstance(node.test.op, ast.And)
            if node.msg is not None or not is_all or not all(map(_narrows, parts)):
                yield node.lineno, f"asserts {ast.unparse(node.test)}"
        elif isinstance(node, ast.Name) and node.id in ("__debug__", "AssertionError"):
            yield node.lineno, f"names {node.id}"


def _narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare):
        is_none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        return is_none and len(test.ops) == 1 and isinstance(test.ops[0], ast.IsNot) and _is_plain(test.left)
    is_call = isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return is_call and _is_plain(test.args[0])  # type: ignore[union-attr]


def _is_plain(value: ast.expr) -> bool:
    """Return whether evaluating an expression has no effect: a name, or attributes of one."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name)


# Imports.

# The import names of each declared dependency. Those in brackets are dependencies of another one.
IMPORTED_AS = {
    **{name: (name,) for name in "flax jinja2 jaxtyping llguidance matplotlib msgpack numpy psutil".split()},
    **{name: (name,) for name in "starlette tokenizers torch tqdm transformers triton uvicorn uvloop".split()},
    **{name: (name,) for name in "aiohttp huggingface_hub httptools ml_dtypes sentencepiece websockets".split()},
    "jax": ("jax", "jaxlib", "scipy"),
    "orbax-checkpoint": ("orbax",),
    "jax-triton": ("jax_triton",),
    "grpcio": ("grpc",),
    "grpcio-status": ("grpc_status", "google"),
    "grpcio-health-checking": ("grpc_health",),
    "grpcio-reflection": ("grpc_reflection",),
    "protobuf": ("google",),
    "prometheus-client": ("prometheus_client",),
    "pyyaml": ("yaml",),
    "opentelemetry-sdk": ("opentelemetry",),
    "optax": ("optax",),
    "safetensors": ("safetensors",),
}
# Imported if installed, and never required: a server's --grpc-channelz.
OPTIONAL = {"grpc_channelz", "PIL", "av", "soundfile"}


def undeclared_imports(tree: ast.Module, file: str) -> Findings:
    """Find imports of packages that pyproject.toml does not declare."""
    known = {"jaxllm", "jaxllm_server", "pallas_kernels", *sys.stdlib_module_names, *OPTIONAL}
    known |= {name for names in IMPORTED_AS.values() for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported(node):
                if name and name.partition(".")[0] not in known:
                    yield node.lineno, f"imports {name}"


# Regular expressions.

RE_FUNCTIONS = ("compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT)
MANY = 64  # repetitions that count as unbounded
MADE_AT_RUN_TIME = {
    "jaxllm/text/special_token_guard.py": 2,  # characters between two others; an alternation of escaped texts
    "jaxllm/linear_expression.py": 1,  # without repetitions and alternations
}
# Their input is the operator's: flags, reports, programs that XLA wrote.
NOT_ON_INPUT = ("jaxllm/bench/", "jaxllm/commands/")


def backtracking_regexes(tree: ast.Module, file: str) -> Findings:
    """Find patterns with nested unbounded repetitions, and count the patterns that are built at run time."""
    num_made = 0
    for line, pattern in patterns(tree):
        if pattern is None:
            num_made += 1
            if num_made > MADE_AT_RUN_TIME.get(file, 0) and not file.startswith(NOT_ON_INPUT):
                yield line, "makes a pattern at run time"
        elif _nests(parser.parse(pattern), False):
            yield line, f"nests repetitions in {pattern!r}"


def patterns(tree: ast.Module) -> Iterator[tuple[int, str | bytes | None]]:
    """List the patterns of a module; None for one that is not a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and node.func.attr in RE_FUNCTIONS:
                first = node.args[0]
                yield node.lineno, first.value if isinstance(first, ast.Constant) else None  # type: ignore[misc]


def _nests(tree: Any, is_inside: bool) -> bool:
    """Return whether an unbounded repetition that can backtrack contains another one or an alternation."""
    for operation, argument in tree:
        if operation in REPEATS:
            _, most, body = argument
            is_many = most > MANY
            if (is_many and is_inside) or _nests(body, is_inside or is_many):
                return True
        elif operation is constants.BRANCH:
            if any(_nests(branch, is_inside) for branch in argument[1]):
                return True
        elif operation is constants.SUBPATTERN:
            if _nests(argument[-1], is_inside):
                return True
    return False


def attacks(tree: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield, for each unbounded repetition, a prefix that leads to it and a text that it repeats."""
    for operation, argument in tree:
        if operation in (*REPEATS, constants.POSSESSIVE_REPEAT):
            least, most, body = argument
            once = example(body)
            yield from attacks(body, before)
            if most > MANY and once:
                yield before, once
            before += once * max(least, 0)
        elif operation is constants.BRANCH:
            for branch in argument[1]:
                yield from attacks(branch, before)
            before += example(argument[1][0])
        elif operation is constants.SUBPATTERN:
            yield from attacks(argument[-1], before)
            before += example(argument[-1])
        else:
            before += example([(operation, argument)])


def example(tree: Any) -> str:
    """Return a short text that a pattern matches."""
    text = ""
    for operation, argument in tree:
        match operation:
            case constants.LITERAL:
                text += chr(argument)
            case constants.NOT_LITERAL:
                text += "a" if argument != ord("a") else "b"
            case constants.ANY:
                text += "a"
            case constants.IN:
                text += _member(argument)
            case constants.MAX_REPEAT | constants.MIN_REPEAT | constants.POSSESSIVE_REPEAT:
                text += example(argument[2]) * argument[0]
            case constants.SUBPATTERN:
                text += example(argument[-1])
            case constants.BRANCH:
                text += example(argument[1][0])
            case _:
                pass  # positions and lookarounds
    return text


def _member(items: Any) -> str:
    classes = {constants.CATEGORY_DIGIT: "0", constants.CATEGORY_WORD: "a", constants.CATEGORY_SPACE: " "}
    listed: list[str] = []
    for operation, argument in items:
        if operation is constants.LITERAL:
            listed.append(chr(argument))
        elif operation is constants.RANGE:
            listed += map(chr, argument)
        elif operation is constants.CATEGORY:
            listed.append(classes.get(argument, "-"))
    if items[0][0] is constants.NEGATE:
        return next(each for each in "a0 -!~" if each not in listed)
    return listed[0]


# Private names in tests.

# Modules that read private names for all other tests.
INSPECTING = ("tests/support/inspection.py", "tests/support/accounts.py")
ROOMS_THAT_INSPECT = ("simulation",)
# The only private names in other tests: a class for Triton, the list of programs in a dry run, a step for a GPU, and an
# attribute of OpenAI's client.
PRIVATE = {
    "tests/gpu/traces.py": {"_Tensor"},
    "tests/gpu_check/as_gpu.py": {"_list_programs"},
    "tests/runner/test_kept_batch.py": {"_keeps_batch"},
    "tests/server/http/test_app.py": {"_request_id"},
}
PATCHES = ("setattr", "getattr", "hasattr", "delattr", "object", "patch")


@functools.cache
def private_names() -> frozenset[str]:
    """List the private names that the product defines, without the methods of named tuples."""
    found = {name for tree in TREES.values() for node in ast.walk(tree) for name in _defined(node)}
    return frozenset(name for name in found if re.fullmatch(r"_[A-Za-z]\w*", name)) - {"_fields", "_replace", "_asdict"}


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.attr if isinstance(node, ast.Attribute) else node.id


def private_uses(tree: ast.Module, private: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Find private names of the product that a test reads, imports or patches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            if ast.unparse(node.value) not in ("self", "cls", "super()", "os"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("jaxllm", "pallas_kernels")):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in private)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in PATCHES:
            texts = [own.value for own in node.args if isinstance(own, ast.Constant) and isinstance(own.value, str)]
            yield from ((node.lineno, name) for text in texts if (name := text.rpartition(".")[2]) in private)


def test_tests_use_public_names() -> None:
    found, private, used = [], private_names(), {file: set[str]() for file in PRIVATE}
    for path in (ROOT / "tests").rglob("*.py"):
        file = str(path.relative_to(ROOT))
        if file in INSPECTING or path.relative_to(ROOT).parts[1] in ROOMS_THAT_INSPECT:
            continue
        for line, name in private_uses(ast.parse(path.read_text()), private):
            if name in PRIVATE.get(file, ()):
                used[file].add(name)
            else:
                found.append(f"{file}:{line} {name}")
    assert not found, "\n".join(found)
    assert used == PRIVATE and sum(map(len, PRIVATE.values())) <= 10


@pytest.mark.parametrize(
    "use",
    [
        *("runner._params", "from jaxllm.engine.llm_engine import _log", "patch.setattr(build, '_log', 1)"),
        "monkeypatch.setattr('jaxllm.engine.llm_engine._log', None)",
    ],
)
def test_a_private_name_is_found(use: str) -> None:
    assert len(list(private_uses(ast.parse(use), private_names()))) == 1


# The rules.

RULES: dict[Callable[[ast.Module, str], Findings], list[str]] = {
    unsafe_loads: [
        "import pickle",
        "from jax.experimental import serialize_executable",
        "from marshal import loads",
        "import dill as d",
        "def f(x): return eval(x)",
        "exec(open('a').read())",
        "import yaml\nyaml.load(stream)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "model = auto.from_pretrained(path, trust_remote_code=flag)",
        "import torch\nload = torch.load",
        "import subprocess",
        "os.system('ls')",
        "importlib.import_module(name)",
    ],
    checking_asserts: [
        "assert size <= 5",
        "assert name is not None, 'there is a name'",
        "assert x is not None or y",
        "assert pop() is not None",
        "assert rows[take()] is not None",
        "if __debug__: check()",
    ],
    undeclared_imports: ["import requests", "from pandas import DataFrame"],
    backtracking_regexes: [
        "import re\nre.compile('(a+)+b')",
        "import re\nre.search(r'(?:\\w*,)*x', text)",
        "import re\nre.match(pattern, text)",
        "import re\nre.sub(r'((a|b)*c)*', '', text)",
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Callable[[ast.Module, str], Findings]) -> None:
    found = []
    for path in SOURCES:
        file = str(path.relative_to(ROOT))
        if path.is_relative_to(GENERATED) and rule is not unsafe_loads:
            continue
        found += [f"{file}:{line} {what}" for line, what in rule(TREES[path], file)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("rule", "broken"), [(rule, broken) for rule, all_ in RULES.items() for broken in all_])
def test_the_rule_finds_what_breaks_it(rule: Callable[[ast.Module, str], Findings], broken: str) -> None:
    assert list(rule(ast.parse(broken), "jaxllm/new.py"))


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    declared = {re.split(r"[\[<>=!;~ ]", line)[0].lower() for line in lines}
    assert IMPORTED_AS.keys() <= declared


@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_class_with_accounts_exists(name: str) -> None:
    """`accounts.watch` skips a class that it does not find."""
    module, _, kind = name.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), kind), type)


ON_INPUT = [
    (str(path.relative_to(ROOT)), pattern)
    for path in SOURCES
    if not str(path.relative_to(ROOT)).startswith(NOT_ON_INPUT)
    for _, pattern in patterns(TREES[path])
    if pattern is not None
] + [
    ("jaxllm/text/special_token_guard.py", special_token_guard.TWINS.pattern),
]


@pytest.mark.parametrize(("file", "pattern"), ON_INPUT)
def test_a_regex_takes_linear_time(file: str, pattern: str | bytes) -> None:
    """Match adversarial texts: a prefix that leads to a repetition, many repetitions, and an end that fails."""
    compiled: Any = re.compile(pattern, re.DOTALL)
    pumped = {*attacks(parser.parse(pattern)), ("", "a"), ("", "0"), ("", "{"), ("", '"'), ("", "\\"), ("", " ")}

    def seconds(before: str, pump: str, size: int) -> float:
        text: Any = before + pump * (size // len(pump)) + "\x00"
        text = text if isinstance(pattern, str) else text.encode()
        started = time.process_time()
        compiled.search(text)
        compiled.sub(text[:0], text)
        return time.process_time() - started

    size = 2**14
    for before, pump in sorted(pumped):
        # A superlinear pattern fails every time; other processes on the machine do not disturb every time.
        is_linear = any(
            seconds(before, pump, 2 * size) < 2.5 * max(seconds(before, pump, size), 0.01) for _ in range(4)
        )
        assert is_linear, (before, pump)


def test_a_slow_regex_would_be_found() -> None:
    pumped = set(attacks(parser.parse(r"x(a+)+b")))
    assert ("x", "a") in pumped
    started = time.process_time()
    re.search(r"x(a+)+b", "x" + "a" * 22 + "\x00")
    slow = time.process_time() - started
    started = time.process_time()
    re.search(r"x(a+)+b", "x" + "a" * 18 + "\x00")
    assert slow > 4 * (time.process_time() - started)


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split()
    assert sorted(re.findall(r"^([a-z][a-z-]*):.*  ## .+$", text, re.MULTILINE)) == sorted(phony)
