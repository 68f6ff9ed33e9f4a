"""Stored programs: read without tracing, with the same results, and never from a file that could do harm."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec

from jaxllm.compiling.kept_programs import KeptPrograms
from jaxllm.compiling.program_digest import NotDigestibleError, digest, digest_compiler, digest_options, digest_source
from jaxllm.config import EngineConfig
from jaxllm.model.sharding import make_layout
from jaxllm.setup.model_setup import describe_weights, prepare
from tests.support.paths import GOLDEN, ROOT
from tests.support.sizes import FEW_SLOTS

MOST = 64 << 20
DEPENDS = "source and model", "compiler and device"


def keeper(folder: Path, most: int = MOST, devices: int = 1, depends: tuple[str, str] = DEPENDS) -> KeptPrograms:
    return KeptPrograms(folder / "whole", most, lambda: depends, jax.devices()[:devices])


# Part of the programs of this process and its children: a program from an earlier run in JAX's cache is not stored.
SALT = 1.0 + int(os.environ.setdefault("JAXLLM_TEST_SALT", str(int.from_bytes(os.urandom(2))))) / 2**20


class Tiny:
    """A program over some devices that changes its first argument in place; counts how often it is traced."""

    def __init__(self, devices: int = 1, factor: float = 2.0) -> None:
        self.traced, self.devices, self.factor = 0, devices, factor
        layout = make_layout(tuple(jax.devices()), devices)
        self.sharding = layout.sharding("heads")
        self.described = (jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=self.sharding),) * 2

        def run(state: jax.Array, given: jax.Array) -> tuple[jax.Array, jax.Array]:
            self.traced += 1
            total = layout.total(jnp.sin(SALT * given) @ given.T, "heads")
            return state + self.factor * given, total

        specs = layout.spec("heads")
        sharded = layout.shard_map(run, (specs, specs), (specs, layout.spec()))
        self.lower = lambda: jax.jit(sharded, donate_argnums=0).lower(*self.described)

    def make(self, kept: KeptPrograms, name: str = "tiny") -> Any:
        return kept.make(name, self.described, self.lower)

    def results(self, program: Any) -> list[bytes]:
        numbers = np.random.default_rng(0).standard_normal((2, 8, 16), np.float32)
        state, given = (jax.device_put(each, self.sharding) for each in numbers)
        found = [np.asarray(each).tobytes() for each in program(state, given)]
        assert state.is_deleted(), "the first argument is donated"
        return found


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_kept_program_is_the_same_and_is_not_traced(devices: int, tmp_path: Path) -> None:
    first, second = Tiny(devices), Tiny(devices)
    fresh = first.make(keeper(tmp_path, devices=devices))
    kept = keeper(tmp_path, devices=devices)
    read = second.make(kept)
    assert (first.traced, second.traced, kept.num_read) == (1, 0, 1)
    assert second.results(read) == first.results(fresh)
    sizes = [
        {name: getattr(program.memory_analysis(), name) for name in ("temp_size_in_bytes", "output_size_in_bytes")}
        | {"alias": program.memory_analysis().alias_size_in_bytes}
        for program in (read, fresh)
    ]
    assert sizes[0] == sizes[1] and sizes[0]["alias"] > 0
    assert read.as_text().count(" = ") == fresh.as_text().count(" = ") > 0


def test_where_the_source_changed_and_the_text_did_not_nothing_is_compiled(tmp_path: Path) -> None:
    fresh = Tiny().make(keeper(tmp_path))
    later, kept = Tiny(), keeper(tmp_path, depends=("another source", DEPENDS[1]))
    program = later.make(kept)
    assert (later.traced, kept.num_read) == (1, 1)
    assert later.results(program) == later.results(fresh)
    last, kept = Tiny(), keeper(tmp_path, depends=("another source", DEPENDS[1]))
    last.make(kept)
    assert (last.traced, kept.num_read) == (0, 1)


@pytest.mark.parametrize(
    "changed",
    [
        lambda folder: keeper(folder, depends=(DEPENDS[0], "another compiler")).read("tiny", Tiny().described),
        lambda folder: keeper(folder).read("other", Tiny().described),
        lambda folder: keeper(folder).read("tiny", Tiny(devices=2).described),
        lambda folder: with_precision(lambda: keeper(folder).read("tiny", Tiny().described)),
        lambda folder: keeper(folder, most=0).read("tiny", Tiny().described),
    ],
    ids=["compiler", "name", "devices", "options", "off"],
)
def test_another_key_is_another_program(changed: Callable[[Path], Any], tmp_path: Path) -> None:
    Tiny().make(keeper(tmp_path))
    assert keeper(tmp_path).read("tiny", Tiny().described) is not None
    assert changed(tmp_path) is None


def with_precision(call: Callable[[], Any]) -> Any:
    with jax.default_matmul_precision("highest"):
        return call()


def files(folder: Path) -> dict[str, Path]:
    return {path.suffix: path for path in (folder / "whole").iterdir()}


def refused(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read a file that must be refused; return the one line in the log."""
    caplog.clear()
    caplog.set_level(logging.WARNING)
    with monkeypatch.context() as patch:
        patch.setattr(
            serialize_executable, "deserialize_and_load", lambda *_: pytest.fail("what cannot be trusted was unpickled")
        )
        assert keeper(folder).read("tiny", Tiny().described) is None
    (line,) = caplog.messages
    assert "\n" not in line
    return line


def test_a_damaged_file_is_ignored_with_one_line_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny()
    expected = tiny.results(tiny.make(keeper(tmp_path)))
    rng = random.Random(0)
    for file in files(tmp_path).values():
        whole = file.read_bytes()
        places = [*range(0, 96, 4), *(rng.randrange(len(whole)) for _ in range(30))]
        damaged = [bytes([*whole[:at], whole[at] ^ 1 << rng.randrange(8), *whole[at + 1 :]]) for at in places]
        damaged += [whole[: rng.randrange(len(whole))] for _ in range(8)] + [b"", whole + b"\0"]
        for content in damaged:
            file.write_bytes(content)
            assert file.name in refused(tmp_path, caplog, monkeypatch)
        assert tiny.results(tiny.make(keeper(tmp_path))) == expected
        caplog.clear()
        assert keeper(tmp_path).read("tiny", tiny.described) is not None and not caplog.messages


def test_a_file_of_another_program_or_version_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tiny(factor=3.0).make(keeper(tmp_path / "other"), "other")
    Tiny().make(keeper(tmp_path))
    for kind, file in files(tmp_path).items():
        own = file.read_bytes()
        file.write_bytes(files(tmp_path / "other")[kind].read_bytes())
        assert "another program's" in refused(tmp_path, caplog, monkeypatch)
        file.write_bytes(own.replace(b"jaxllm program 1", b"jaxllm program 0"))
        assert "another format" in refused(tmp_path, caplog, monkeypatch)
        file.write_bytes(own)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.chmod(0o664), "other users may write"),
        (lambda file: file.chmod(0o646), "other users may write"),
        (lambda file: os.chown(file, 12345, -1), "another user"),
        (lambda file: file.parent.chmod(0o777), "other users may write"),
        (lambda file: os.chown(file.parent, 12345, -1), "another user"),
        (lambda file: file.rename(file.with_suffix(".x")).with_suffix(file.suffix).symlink_to(f"{file.stem}.x"), ""),
        (lambda file: (file.unlink(), os.mkfifo(file)), "not a file"),
        (lambda file: (file.unlink(), file.mkdir()), ""),
    ],
    ids=["group", "all", "owner", "folder", "folder's owner", "link", "pipe", "folder in its place"],
)
def test_what_another_user_could_have_written_is_not_unpickled(
    spoil: Callable[[Path], Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Tiny().make(keeper(tmp_path))
    try:
        spoil(files(tmp_path)[".program"])
    except PermissionError:
        pytest.skip("only root gives files to others")
    assert reason in refused(tmp_path, caplog, monkeypatch)


def test_the_bound_holds_and_what_was_used_last_stays(tmp_path: Path) -> None:
    Tiny().make(keeper(tmp_path))
    size = sum(file.stat().st_size for file in files(tmp_path).values())
    most = size * 7 // 2
    tinies = {name: Tiny(factor=number) for number, name in enumerate(("tiny", "b", "c", "d", "e"))}

    def age() -> None:
        for file in (tmp_path / "whole").iterdir():
            os.utime(file, (file.stat().st_atime - 60, file.stat().st_mtime - 60))

    for name in ("b", "c"):
        age()
        tinies[name].make(keeper(tmp_path, most), name)
    age()
    assert keeper(tmp_path, most).read("tiny", tinies["tiny"].described) is not None
    for name in ("d", "e"):
        age()
        tinies[name].make(keeper(tmp_path, most), name)
    stale = tmp_path / "whole" / "x.part"
    stale.write_bytes(b"")
    os.utime(stale, (0, 0))
    tinies["e"].make(keeper(tmp_path, most, depends=("y", "y")), "e")
    assert not stale.exists()
    assert sum(file.stat().st_size for file in (tmp_path / "whole").iterdir()) <= most
    assert keeper(tmp_path, most).read("e", tinies["e"].described) is not None
    assert keeper(tmp_path, most).read("b", tinies["b"].described) is None
    tinies["c"].make(keeper(tmp_path / "small", most=100), "c")
    assert not list((tmp_path / "small" / "whole").iterdir())


def test_a_text_without_the_unused_arguments_is_not_enough(tmp_path: Path) -> None:
    """The program that scores tokens reads one of the weights: with another number of layers it has the same text."""
    for count in (2, 5):
        given = (jnp.ones(3),) * count
        lower = functools.partial(jax.jit(lambda weights: SALT * weights[0]).lower, given)
        assert keeper(tmp_path).make("score", count, lower)(given)[0] == SALT


def test_a_program_that_calls_back_is_compiled_and_not_kept(tmp_path: Path) -> None:
    described = jax.ShapeDtypeStruct((4,), jnp.float32)

    def run(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, described, x) + 1

    kept = keeper(tmp_path)
    program = kept.make("back", described, lambda: jax.jit(run).lower(described))
    np.testing.assert_allclose(program(jnp.zeros(4)), 1.0)
    assert not list((tmp_path / "whole").iterdir())


def test_threads_that_write_and_read_at_once_disturb_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = Tiny()
    lowered, expected = tiny.lower(), tiny.results(tiny.make(keeper(tmp_path / "other")))
    found: list[list[bytes]] = []

    def work() -> None:
        for _ in range(5):
            kept = keeper(tmp_path)
            kept.compile("tiny", tiny.described, lowered)
            program = kept.read("tiny", tiny.described)
            assert program is not None
            found.append(tiny.results(program))
            files(tmp_path)[".program"].unlink(missing_ok=True)

    def guarded() -> None:
        try:
            work()
        except (AssertionError, KeyError):  # another thread has deleted it: None is right
            found.append(expected)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found and all(each == expected for each in found) and not caplog.messages


WRITER = """
import sys
from pathlib import Path
import jax
from tests.compiling.test_kept_programs import Tiny, keeper
folder, results = Path(sys.argv[1]), []
for turn in range(4):
    for factor in range(5):
        tiny, kept = Tiny(factor=factor), keeper(folder, depends=(str(turn), str(turn)))
        results.append(tiny.results(tiny.make(kept, f"tiny{factor}"))[0].hex()[:32])
print("|".join(results))
"""


@pytest.mark.ci
def test_two_processes_that_write_at_once_disturb_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    (first, errors), (second, others) = (process.communicate(timeout=300) for process in both)
    assert first == second and len(set(first.strip().split("|"))) == 5
    assert "is ignored" not in errors + others
    assert len(list((tmp_path / "whole").glob("*.program"))) == 20 and not list((tmp_path / "whole").glob("*.part"))


def test_digests_name_all_that_differs() -> None:
    @dataclass(frozen=True)
    class Pair:
        left: Any
        right: Any

    values = [
        *(None, True, 1, 1.0, "1", b"1", (1,), [1], ((1,),), (1, 1), {"1": 1}, {1: "1"}, {"a": 1, "b": 2}),
        *(np.ones(1), np.ones(1, np.float32), np.ones((1, 1)), np.dtype("int8"), jnp.float32, float("nan"), -0.0, 0.0),
        *(
            Pair(1, 2),
            Pair(2, 1),
            Pair((1,), 2),
            ("a", "b"),
            ("ab", ""),
            ("", "ab"),
            PartitionSpec("a"),
            PartitionSpec(),
        ),
        *(jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32), Tiny(1).described),
        *(Tiny(2).described, Tiny(4).described),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert [digest(value) for value in values] == [digest(value) for value in values]
    assert digest({3, 1, 2}) == digest({2, 3, 1}) != digest({1, 2})
    for unknown in (lambda: None, object(), threading.Lock(), functools.partial(print), np.array([None])):
        with pytest.raises(NotDigestibleError):
            digest([unknown])
    before = digest_options()
    assert with_precision(digest_options) != before == digest_options()
    assert len({digest_compiler(tuple(jax.devices()[:count])) for count in (1, 2)}) == 2
    assert digest_source() == digest_source()


def test_flags_and_versions_are_part_of_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    device = jax.devices()[:1]
    before = digest_compiler(tuple(device))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false")
    assert digest_compiler(tuple(device)) != before


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/config.json")))
def test_all_models_can_be_digested(name: str) -> None:
    config = EngineConfig(model=str(GOLDEN / name), device="cpu")
    setup = prepare(config, needs_weights=False)
    weights = describe_weights(config, setup)
    own = digest(setup.spec, setup.kernels, weights)
    assert own == digest(setup.spec, setup.kernels, weights)
    assert own != digest(replace(setup.spec, attention_scale=setup.spec.attention_scale * 2), setup.kernels, weights)


START = """
import json, sys
import jax
seen = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **rest: seen.append(str(rest.get("fun_name", ""))) if "jaxpr_trace" in event else None
)
PROGRAMS = "decode", "ragged", "sample_", "patch", "score", "copy_blocks", "allocate", "on_shard"
from jaxllm import LLM, SamplingParams
llm = LLM(sys.argv[1], compilation_cache_dir=sys.argv[2], compilation_cache_bytes=1 << 30, **json.loads(sys.argv[3]))
params = [SamplingParams(temperature=0, max_tokens=9, logprobs=2), SamplingParams(seed=1, top_p=0.9, max_tokens=9)]
outputs = llm.generate(["Once upon", "A dog"], params, use_tqdm=False)
first = [[each.logprob.hex() for each in place.values()] for place in outputs[0].outputs[0].logprobs]
print(json.dumps({
    "texts": [output.outputs[0].text for output in outputs],
    "logprobs": first,
    "traced": [name for name in seen if name.startswith(PROGRAMS)],
    "read": llm.engine.runner.programs.kept.num_read,
    "seconds": llm.engine.metrics.trace_seconds,
}))
llm.close()
"""


@pytest.mark.ci
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_that_reads_its_programs_traces_none_and_gives_the_same(devices: int, tmp_path: Path) -> None:
    sizes = json.dumps(FEW_SLOTS | {"tensor_parallel_size": devices})
    command = [sys.executable, "-c", START, str(GOLDEN / "stories260K"), str(tmp_path), sizes]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    cold, warm = (
        json.loads(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert cold["read"] == 0 and cold["seconds"] > 0 and cold["traced"]
    assert warm["read"] == 9 and warm["seconds"] == 0 and not warm["traced"]
    assert (warm["texts"], warm["logprobs"]) == (cold["texts"], cold["logprobs"])


def test_an_engine_with_a_users_function_keeps_no_programs(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)

    def depends() -> tuple[str, str]:
        return digest((lambda logits: logits,)), ""

    kept = KeptPrograms(tmp_path / "whole", MOST, depends, jax.devices()[:1])
    tinies = [Tiny(), Tiny()]
    for tiny in tinies:
        tiny.make(kept)
    assert [tiny.traced for tiny in tinies] == [1, 1] and not (tmp_path / "whole").exists()
    assert "function" in caplog.text
