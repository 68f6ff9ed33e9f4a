"""Orbax checkpoints: equal weights on any number of devices, equal text, atomic writing, refusals by name."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest
import tensorstore

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints import orbax_checkpoint, weights
from jaxllm.commands import cli
from jaxllm.commands.conversion import convert
from jaxllm.embedded import MODEL_DIR
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model.sharding import UNDIVIDED
from tests.model.test_parity import CASES, QUICK
from tests.support.checkpoints import CONFIG, load, random_tensors, write_checkpoint
from tests.support.paths import GOLDEN
from tests.support.peak_memory import peak, start_peak
from tests.support.sizes import FEW_SLOTS


def _check(folder: Path) -> None:
    spec, family = read_spec(weights.read_config(folder))
    weights.check(folder, spec, family, UNDIVIDED)


def _assert_same(left, right) -> None:
    """Compare bits, types and devices."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)
        for piece, same in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert np.asarray(piece.data).tobytes() == np.asarray(same.data).tobytes()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a source with two key-value heads and 97 words, and its converted folder. Read-only."""
    folder = tmp_path_factory.mktemp("converted")
    source = write_checkpoint(folder / "source", files=2)
    return source, convert(str(source), folder / "target")


@pytest.mark.parametrize(
    "name",
    [pytest.param(case, marks=[pytest.mark.slow] * (case not in {*QUICK, "deepseek-v3"})) for case in sorted(CASES)],
)
def test_every_family_loads_as_from_its_source(tmp_path, name):
    _assert_same(load(convert(str(GOLDEN / name), tmp_path / "target")), load(GOLDEN / name))


@pytest.mark.parametrize("shards", [2, 4])
def test_any_number_of_devices_restores_it(converted, shards):
    """Four devices share two key-value heads; the vocabulary of 97 rows is padded to 100."""
    source, target = converted
    _assert_same(load(target, shards=shards), load(source, shards=shards))


@pytest.mark.ci
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_types_are_kept_and_rounded_once_to_the_target(tmp_path, stored):
    tensors = {name: value.astype(stored) for name, value in random_tensors(CONFIG).items()}
    tensors["model.norm.weight"][:3] = [60000.0, 1e-8, 2.0**-25]  # the limits of float16
    source = write_checkpoint(tmp_path / "source", tensors=tensors)
    target = convert(str(source), tmp_path / "target")
    for dtype in ("float32", "float16", "bfloat16"):
        _assert_same(load(target, dtype=dtype), load(source, dtype=dtype))
    by_orbax = orbax.checkpoint.PyTreeCheckpointer().restore(target / "orbax")  # readable by other programs
    for name, value in (("q", "self_attn.q_proj"), ("gate", "mlp.gate_proj"), ("out", "self_attn.o_proj")):
        array = np.asarray(by_orbax["layers"]["1"][name])
        np.testing.assert_array_equal(array, tensors[f"model.layers.1.{value}.weight"], strict=True)
    np.testing.assert_array_equal(by_orbax["top"]["embed"], tensors["model.embed_tokens.weight"], strict=True)


def _bytes_read() -> int:
    metric = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric[0]["values"][0]["value"]


@pytest.mark.ci
def test_a_device_reads_its_own_part_only(tmp_path):
    """Four devices together read about as many bytes as the file has, although half of the matrices are split by
    columns.
    """
    config = CONFIG | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4096, "num_hidden_layers": 1}
    source = write_checkpoint(tmp_path / "source", config, random_tensors(config))
    target = convert(str(source), tmp_path / "target")
    before = _bytes_read()
    held = jax.tree.leaves(load(target, shards=4))
    assert 0.95 < (_bytes_read() - before) / sum(leaf.nbytes for leaf in held) < 1.05


@pytest.mark.slow
def test_the_embedded_model_tells_the_same_stories(tmp_path, capfd):
    """Converted from the command line; greedy tokens are compared."""
    target = tmp_path / "new" / "target"
    assert cli.main(["convert", "jaxllm-embedded", str(target)]) == 0
    assert capfd.readouterr().out == f"{target} is ready: --model {target}\n"
    for path in MODEL_DIR.glob("*.json"):
        assert (target / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in target.parent.iterdir()) == ["target"]
    prompts, params = ["Once upon a time", "There was once"], SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for model in (None, str(target)):
        with LLM(model, **FEW_SLOTS) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert all(len(ids) == 24 for ids in texts[0])
    assert texts[0] == texts[1]
    assert "WARNING" not in capfd.readouterr().err


def test_all_that_belongs_to_the_model_is_copied_and_nothing_else(tmp_path):
    source = write_checkpoint(tmp_path / "source", files=3)
    kept = [
        *("tokenizer.json", "vocab.txt", "tokenizer.model", "chat_template.jinja", "LICENSE", "generation_config.json"),
    ]
    left = ["pytorch_model.bin", "training.log", ".gitattributes"]
    for name in (*kept, *left, "additional_chat_templates/tool_use.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    target = convert(str(source), tmp_path / "target")
    names = {path.name for path in target.iterdir()}
    assert names == {*kept, "additional_chat_templates", "config.json", "orbax", "orbax.json"}
    assert (
        target / "additional_chat_templates" / "tool_use.jinja"
    ).read_text() == "additional_chat_templates/tool_use.jinja"
    assert all((target / name).read_text() == name for name in kept)


def test_it_loads_within_an_event_loop(converted):
    """As in a notebook, where an event loop is always running."""
    source, target = converted

    async def load_there():
        return load(target)

    _assert_same(asyncio.run(load_there()), load(source))


def test_progress_is_told_in_bytes(converted, capfd):
    _, target = converted
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(load(target, progress=True)))
    shown = capfd.readouterr().err
    assert "reading weights:" in shown and f"/{held / 1024:.0f}k" in shown


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
def test_converting_takes_the_memory_of_a_few_arrays(tmp_path):
    config = CONFIG | {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}  # 25 MB per layer
    source = write_checkpoint(tmp_path / "source", config)
    size = (source / "model.safetensors").stat().st_size
    before = start_peak()
    convert(str(source), tmp_path / "target")
    assert peak() - before < 0.5 * size


@pytest.mark.parametrize("state", ["a file", "full", "itself"])
def test_a_target_that_is_taken_stays_as_it_is(tmp_path, state, capsys):
    source = write_checkpoint(tmp_path / "source")
    target = source if state == "itself" else tmp_path / "target"
    if state == "a file":
        target.write_text("mine")
    elif state == "full":
        target.mkdir()
        (target / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["convert", str(source), str(target)]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and ("is a file" if state == "a file" else "is not empty") in message
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_filled(converted, tmp_path):
    assert (convert(str(converted[0]), tmp_path) / "orbax.json").is_file()


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_is_not_finished_is_not_there(converted, tmp_path, monkeypatch, fault):
    def write(folder, parts, written):
        (folder / "orbax").mkdir()
        raise fault

    monkeypatch.setattr(orbax_checkpoint, "write", write)
    with pytest.raises(fault if isinstance(fault, type) else type(fault)):
        convert(str(converted[0]), tmp_path / "target")
    assert not list(tmp_path.iterdir())


def test_a_source_that_cannot_be_converted_is_refused_by_name(converted, tmp_path):
    source, target = converted
    broken = shutil.copytree(source, tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 40}))
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    for name, message in ((str(tmp_path / "absent"), "no folder"), (str(target), "already"), (str(broken), "shape")):
        with pytest.raises(UserError, match=message) as refusal:
            convert(name, tmp_path / "new")
        assert "\n" not in str(refusal.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(UserError, match="GiB free"):
            convert(str(source), tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


@pytest.mark.ci
def test_damage_to_any_file_is_found_before_weights_are_read(converted, tmp_path):
    """Each file is removed, truncated, or gets one flipped bit; weights are only removed or truncated."""
    target = shutil.copytree(converted[1], tmp_path / "target")
    files = [path for path in (target / "orbax").rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        content = path.read_bytes()
        turned = bytes([content[0] ^ 1]) + content[1:]
        for damage in (None, content[:-1], turned):
            path.unlink() if damage is None else path.write_bytes(damage)
            with pytest.raises(UserError, match=path.name) as refusal:
                _check(target)
            assert "\n" not in str(refusal.value)
            path.write_bytes(content)
    _check(target)
    (target / "orbax.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(UserError, match="not complete"):
            _check(target)
        (target / "orbax.json").unlink(missing_ok=True)


def test_damage_that_the_list_does_not_show_is_still_one_line(converted, tmp_path, monkeypatch):
    target = shutil.copytree(converted[1], tmp_path / "target")
    (target / "orbax" / "_METADATA").write_text('{"tree_metadata": ')
    monkeypatch.setattr(
        orbax_checkpoint, "list_files", lambda _: json.loads((target / "orbax.json").read_text())["files"]
    )
    with pytest.raises(UserError, match="cannot be read") as refusal:
        _check(target)
    assert "\n" not in str(refusal.value)
    shutil.copy(converted[1] / "orbax" / "_METADATA", target / "orbax" / "_METADATA")
    for path in (target / "orbax" / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read") as refusal:
        load(target)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 98}, r"top.embed .* shape \[97, 32\], config.json says \[98, 32\]"),
        ({"num_hidden_layers": 3}, "no array layers.2.attn_norm"),
        ({"num_hidden_layers": 1}, "layers.1.attn_norm of the Orbax checkpoint is not part"),
        ({"tie_word_embeddings": True}, "top.head of the Orbax checkpoint is not part"),
        ({"num_key_value_heads": 4}, r"layers.0.k .* shape \[16, 32\], config.json says \[32, 32\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_config_is_refused(converted, tmp_path, change, message):
    target = shutil.copytree(converted[1], tmp_path / "target")
    (target / "config.json").write_text(json.dumps(CONFIG | change))
    for refused in (_check, load):
        with pytest.raises(UserError, match=message) as refusal:
            refused(target)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("tokenizer", [None, "tokenizer.json", "tokenizer.model"])
def test_a_folder_without_a_tokenizer_is_warned_of(tmp_path, tokenizer, capsys):
    source = write_checkpoint(tmp_path / "source")
    if tokenizer is not None:
        (source / tokenizer).write_bytes(b"{}")
    assert cli.main(["convert", str(source), str(tmp_path / "target")]) == 0
    out, err = capsys.readouterr()
    assert "is ready: --model" in out
    warning = f"jaxllm: warning: {source} has no tokenizer; give one with --tokenizer\n"
    assert err == ("" if tokenizer else warning)
