"""`jaxllm embed` with a fake engine: input, output, resuming and refusals."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxllm.embedded import EMBEDDER_DIR
from jaxllm.errors import EngineError, UserError
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from tests.support.fake_llm import FakeLLM, Run
from tests.support.sizes import FEW_SLOTS, flags

WIDTH = 8


def vector(text: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *text.encode()]).standard_normal(WIDTH).astype(np.float32)


class Pooling:
    """Replaces `LLM.encode`: records calls and interrupts call number `ends_at`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.params: set[PoolingParams] = set()
        self.ends_at: int | None = None
        self.seed = 0

    def __call__(
        self, texts: Sequence[str], params: PoolingParams, *, pooling_task: str, use_tqdm: bool
    ) -> list[PoolingRequestOutput]:
        assert (pooling_task, use_tqdm) == ("embed", False)
        if len(self.calls) == self.ends_at:
            raise KeyboardInterrupt
        if any(len(text) > 200 for text in texts):
            raise UserError("The prompt is too long.", "prompt")
        self.calls.append(list(texts))
        self.params.add(params)
        if params.dimensions == 7:
            raise UserError("dimensions of this model is 8", "dimensions")
        if "NaN" in texts:
            raise EngineError("prompt 7 failed: a number is not finite")
        return [PoolingRequestOutput("0", (), PoolingOutput(vector(text, self.seed))) for text in texts]


@pytest.fixture
def pooling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pooling]:
    stand_in = Pooling()
    monkeypatch.setattr(FakeLLM, "encode", staticmethod(stand_in), raising=False)
    return stand_in


def read(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r")
    return np.array([json.loads(line)["embedding"] for line in path.read_text().splitlines()], np.float32)


def lines_of(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abc é", k=rng.randint(1, 30))) + "." for _ in range(count)]


@pytest.mark.parametrize("ending", [".npy", ".jsonl"])
def test_vectors_stand_in_the_order_of_the_texts(ending: str, pooling: Pooling, run: Run, tmp_path: Path) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        texts, size = lines_of(seed, rng.randint(1, 45)), rng.randint(1, 12)
        source, output = tmp_path / f"texts{seed}.{rng.choice(['txt', 'jsonl'])}", tmp_path / f"{seed}{ending}"
        is_json = source.suffix == ".jsonl"
        rows = [json.dumps({"text": text}) if is_json else text for text in texts]
        body = rng.choice(["\n", "\r\n"]).join(rows) + rng.choice(["", "\n"])
        source.write_text(body, encoding="utf-8", newline="")
        pooling.calls.clear()
        from_pipe = rng.random() < 0.3
        code, out, err = run(
            *("embed", "-" if from_pipe else str(source), "-o", str(output), "--batch-size", str(size)),
            stdin=body if from_pipe else "",
        )
        assert (code, out, err) == (0, f"{output} holds {len(texts)} vectors of {WIDTH} numbers\n", "")
        assert FakeLLM.made.model == str(EMBEDDER_DIR) and FakeLLM.made.is_closed
        found = read(output)
        assert found.dtype == np.float32 and np.array_equal(found, [vector(text) for text in texts])
        if ending == ".jsonl":
            records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
            assert [(record["index"], record["text"]) for record in records] == list(enumerate(texts))
        assert pooling.calls == [texts[:1], *(texts[at : at + size] for at in range(0, len(texts), size))]
        assert not output.with_name(f"{output.name}.progress.json").exists()


@pytest.mark.parametrize("ending", [".npy", ".jsonl"])
def test_what_was_broken_off_goes_on(ending: str, pooling: Pooling, run: Run, tmp_path: Path) -> None:
    texts = lines_of(1, 47)
    source, whole, output = tmp_path / "texts", tmp_path / f"whole{ending}", tmp_path / f"part{ending}"
    source.write_text("\n".join(texts))
    arguments = ("embed", str(source), "--batch-size", "4", "-o")
    assert run(*arguments, str(whole))[0] == 0
    num_calls = len(pooling.calls)
    for ends_at in range(1, num_calls):
        pooling.calls.clear()
        pooling.ends_at = ends_at
        code, _, err = run(*arguments, str(output))
        done = (ends_at - 1) * 4  # the first call is for the first text only
        assert (code, err) == (130, f"{output} holds {done} vectors; repeat the command to continue\n")
        assert np.array_equal(read(output).reshape(-1, WIDTH), read(whole)[:done])
        with output.open("ab") as file:
            file.write(b"half of a row")  # as if the process was killed while writing
        pooling.calls.clear()
        pooling.ends_at = None
        assert run(*arguments, str(output))[0] == 0
        assert sum(map(len, pooling.calls)) == 1 + 47 - done
        assert output.read_bytes() == whole.read_bytes()


def test_what_was_begun_otherwise_is_not_gone_on_with(pooling: Pooling, run: Run, tmp_path: Path) -> None:
    source, output = tmp_path / "texts", tmp_path / "vectors.npy"
    texts = "\n".join(lines_of(2, 25))
    source.write_text(texts)
    arguments = ("embed", str(source), "--batch-size", "4", "-o", str(output))
    pooling.ends_at = 2
    assert run(*arguments)[0] == 130
    begun, pooling.ends_at = output.read_bytes(), None
    for changed, more in (("input", ()), ("truncate", ("--truncate",)), ("model", ())):
        source.write_text(texts + "\nmore" * (changed == "input"))
        pooling.seed = int(changed == "model")
        code, _, err = run(*arguments, *more)
        assert code == 1 and f"was started with another {changed}; remove {output}.progress.json" in err
        assert output.read_bytes() == begun
    pooling.seed = 0
    note = tmp_path / "vectors.npy.progress.json"
    written = note.read_text()
    for data, kept, said in ((begun[:-1], written, "is shorter than it was"), (begun, "{}", "is damaged; remove it")):
        output.write_bytes(data)
        note.write_text(kept)
        code, _, err = run(*arguments)
        assert code == 1 and said in err and str(note) in err
    note.write_text(written)
    assert run(*arguments)[0] == 0 and len(read(output)) == 25
    source.write_text("another")
    assert run(*arguments)[0] == 0 and len(read(output)) == 1


@pytest.mark.parametrize(
    ("body", "flags", "message"),
    [
        (b"", (), "holds no text"),
        (b"a\n \nb", (), "line 2 is empty; --skip-empty skips such lines"),
        (b"a\n\xff", (), "line 2: 'utf-8' codec can't decode"),
        (b'{"text": "a"}\n{"text": 1}', (), 'line 2: expected an object with a text in "text"; --field names another'),
        (b'{"text": "a"}\nb', (), "line 2: Expecting value"),
        (b'{"text": "a"}\n' + b"[" * 100_000, (), "line 2: its lists and objects are nested too deeply"),
        (b"a", ("--field", "body"), "line 1: Expecting value"),
        (b"a\nb\n" + b"c" * 201, (), "line 3: The prompt is too long."),
        (b"a\nNaN", (), "line 2: prompt 7 failed: a number is not finite"),
        (b"a", ("--dimensions", "0"), "error: dimensions must be"),
        (b"a", ("--dimensions", "7"), "error: dimensions of this model is 8"),
    ],
)
def test_a_mistake_is_one_line(
    body: bytes, flags: tuple[str, ...], message: str, pooling: Pooling, run: Run, tmp_path: Path
) -> None:
    source = tmp_path / "texts"
    source.write_bytes(body)
    code, out, err = run("embed", str(source), "-o", str(tmp_path / "vectors.npy"), *flags)
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1


def test_wrong_usage_is_said_before_the_model_loads(pooling: Pooling, run: Run, tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.write_text("a")
    del pooling
    for arguments, message in (
        ((str(source),), "one of the arguments -o/--output --query is required"),
        ((str(source), "-o", "a.txt"), "a.txt must end with .npy or .jsonl"),
        ((str(source), "-o", "a.npy", "--batch-size", "0"), "--batch-size must be at least 1"),
        (("-o", "a.npy"), "no texts: give a file"),
    ):
        code, out, err = run("embed", *arguments, at_terminal=True)
        assert (code, out) == (2, "") and message in err
    assert run("embed", str(tmp_path / "none"), "-o", "a.npy")[2].endswith("none: No such file or directory\n")


def test_options_reach_the_engine(pooling: Pooling, run: Run, tmp_path: Path) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    source.write_text('{"body": "a"}\n\n{"body": " "}\n{"body": "b"}\n')
    flags = ("--field", "body", "--skip-empty", "--no-normalize", "--dimensions", "4", "--truncate", "-m", "other")
    assert run("embed", str(source), "-o", str(output), *flags, "--max-num-seqs", "3")[0] == 0
    assert pooling.params == {PoolingParams(dimensions=4, normalize=False, truncate_prompt_tokens=-1)}
    assert (FakeLLM.made.model, FakeLLM.made.settings) == ("other", {"max_num_seqs": 3})
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 3]


def test_the_nearest_lines_are_shown(pooling: Pooling, run: Run) -> None:
    texts = lines_of(3, 33)
    code, out, _ = run("embed", "--query", texts[7], stdin="\n".join(texts))
    unit = {text: vector(text) / np.linalg.norm(vector(text)) for text in texts}
    nearest = sorted(texts, key=lambda text: -unit[text] @ unit[texts[7]])[:5]
    assert run("embed", "--query", "a" * 201, stdin="a")[2] == "jaxllm: error: --query: The prompt is too long.\n"
    assert code == 0 and out == "".join(f"{unit[text] @ unit[texts[7]]:6.3f}  {text}\n" for text in nearest)


class Forgetful(list[list[str]]):
    def append(self, _: list[str]) -> None:
        pass


def test_memory_does_not_grow_with_the_input(pooling: Pooling, run: Run, tmp_path: Path) -> None:
    peaks = []
    for count in (300, 3000):
        source = tmp_path / f"{count}.txt"
        source.write_text("\n".join(lines_of(4, count)))
        pooling.calls = Forgetful()
        tracemalloc.start()
        try:
            assert run("embed", str(source), "-o", str(tmp_path / "vectors.npy"), "--batch-size", "50")[0] == 0
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.ci
def test_the_shipped_embedder_finds_what_is_asked_for(
    run_jaxllm: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    source, output, sizes = tmp_path / "texts", tmp_path / "vectors.npy", flags(FEW_SLOTS | {"max_model_len": 128})
    source.write_text("A dog barks.\nAnna looks after beehives.\nBen bakes bread.\n")
    code, out, _ = run_jaxllm("embed", str(source), "--query", "Who keeps bees?", *sizes)
    assert code == 0 and "Anna" in out.splitlines()[0]
    assert run_jaxllm("embed", str(source), "-o", str(output), "--dimensions", "32", *sizes)[0] == 0
    assert np.load(output).shape == (3, 32) and np.allclose(np.linalg.norm(np.load(output), axis=1), 1)
