"""Loading: placement and types on one device and several, the costs, and refused files."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import huggingface_hub.constants
import jax
import ml_dtypes
import numpy as np
import pytest

from jaxllm.checkpoints import sources, weights
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, sharding
from tests.support import paths
from tests.support.checkpoints import CONFIG, load, random_tensors, write_checkpoint
from tests.support.layouts import layout_of

LAYER = "model.layers.1."


def _assert_same(left, right) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), left, right)


def test_every_tensor_lands_in_its_weight(tmp_path):
    tensors = random_tensors(CONFIG)
    params = load(write_checkpoint(tmp_path, tensors=tensors))
    attention = [tensors[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_and_up = [tensors[f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    expected = {
        "attn_norm": tensors[f"{LAYER}input_layernorm.weight"],
        "qkv": np.concatenate(attention),
        "out": tensors[f"{LAYER}self_attn.o_proj.weight"],
        "mlp_norm": tensors[f"{LAYER}post_attention_layernorm.weight"],
        "up": np.concatenate(gate_and_up),
        "down": tensors[f"{LAYER}mlp.down_proj.weight"],
    }
    _assert_same(params.layers[1], expected)
    embed, norm, head = (tensors[f"{name}.weight"] for name in ("model.embed_tokens", "model.norm", "lm_head"))
    _assert_same(params.top, {"embed": embed, "head": head, "final_norm": norm})


def test_each_shard_holds_its_own_heads(tmp_path):
    """Four devices share two key-value heads, so two neighbours hold the same one; 97 rows of vocabulary become 100."""
    tensors = random_tensors(CONFIG)
    params = load(write_checkpoint(tmp_path, tensors=tensors), shards=4)
    layer = {name: [piece.data for piece in weight.addressable_shards] for name, weight in params.layers[1].items()}
    q, k, v = (tensors[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkv")
    gate, up = (tensors[f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    for shard in range(4):
        queries, keys, inner = slice(16 * shard, 16 * shard + 16), slice(shard // 2 * 8, shard // 2 * 8 + 8), shard * 16
        np.testing.assert_array_equal(layer["qkv"][shard], np.concatenate([q[queries], k[keys], v[keys]]))
        np.testing.assert_array_equal(layer["out"][shard], tensors[f"{LAYER}self_attn.o_proj.weight"][:, queries])
        np.testing.assert_array_equal(
            layer["up"][shard], np.concatenate([gate[inner : inner + 16], up[inner : inner + 16]])
        )
        np.testing.assert_array_equal(
            layer["down"][shard], tensors[f"{LAYER}mlp.down_proj.weight"][:, inner : inner + 16]
        )
        np.testing.assert_array_equal(layer["attn_norm"][shard], tensors[f"{LAYER}input_layernorm.weight"])
    embed = np.asarray(params.top["embed"])
    assert embed.shape == (100, 32)
    np.testing.assert_array_equal(embed[:97], tensors["model.embed_tokens.weight"])
    assert not embed[97:].any()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_each_shard_reads_its_own_bytes_and_no_others(tmp_path, monkeypatch, quantization):
    """Counts how often each byte of the file is copied, through the very views that the loader copies from."""
    config = CONFIG | {"num_key_value_heads": 4, "vocab_size": 98}  # 98 rows on four shards: 25, 25, 25, 23
    folder = write_checkpoint(tmp_path, config)
    spec, family = read_spec(config)
    file = (folder / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(file[:8], "little")
    times, by_shard, shard = np.zeros(len(file), np.uint8), [0] * 4, 0
    give, fill = sources.give_columns, weights.fill

    def counted_give(source, row, store, tensor):
        offset = source.ctypes.data - np.frombuffer(tensor.mapping, np.uint8).ctypes.data
        shape, strides = (*source.shape, source.itemsize), (*source.strides, 1)
        np.lib.stride_tricks.as_strided(times[offset:], shape, strides)[...] += 1
        by_shard[shard] += source.nbytes
        give(source, row, store, tensor)

    def noted_fill(store, side, parts, own, shape, shards, index):
        nonlocal shard
        shard = max((piece.start or 0) * 4 // length for piece, length in zip(index, shape, strict=True))
        fill(store, side, parts, own, shape, shards, index)

    monkeypatch.setattr(sources, "give_columns", counted_give)
    monkeypatch.setattr(weights, "fill", noted_fill)
    weights.load(folder, spec, family, sharding.make_layout(jax.devices(), 4), "float32", quantization=quantization)
    assert (times[:header_bytes] == 0).all()
    np.testing.assert_array_equal(times[header_bytes:], 1)
    norms = 5 * 32 * 4  # bytes that all shards need, read once for all
    assert sum(by_shard) == len(file) - header_bytes
    assert by_shard[0] - norms == by_shard[1] == by_shard[2] == by_shard[3] + 2 * 2 * 32 * 4


def test_several_files_and_missing_prefix_make_no_difference(tmp_path):
    tensors = random_tensors(CONFIG)
    single = load(write_checkpoint(tmp_path / "single", tensors=tensors))
    _assert_same(load(write_checkpoint(tmp_path / "several", tensors=tensors, files=3)), single)
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    _assert_same(load(write_checkpoint(tmp_path / "bare", tensors=bare)), single)


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_types_are_rounded_once_to_the_target(tmp_path, stored, target):
    tensors = {name: value.astype(stored) for name, value in random_tensors(CONFIG).items()}
    params = load(write_checkpoint(tmp_path, tensors=tensors), dtype=target)
    expected = tensors["lm_head.weight"].astype(np.dtype(target))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(target)}
    np.testing.assert_array_equal(np.asarray(params.top["head"]), expected)


def test_buffers_and_copies_of_a_tied_head_are_left_out(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = random_tensors(CONFIG)  # with a head
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    params = load(write_checkpoint(tmp_path, config, tensors))
    assert sorted(params.top) == ["embed", "final_norm"]


def _edited(tensors: dict[str, np.ndarray], name: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    return {key: old for key, old in (tensors | {name: value}).items() if old is not None}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "no tensor layers.1.mlp.up_proj.weight"),
        ("lm_head.weight", None, "no tensor lm_head.weight"),
        ("model.layers.0.mlp.extra.weight", np.ones(3, np.float32), "model.layers.0.mlp.extra.weight is not part"),
        ("model.layers.2.mlp.up_proj.weight", np.ones(3, np.float32), "model.layers.2.mlp.up_proj.weight is not part"),
        ("model.norm.weight", np.ones(33, np.float32), r"model.norm.weight has shape \[33\], config.json says \[32\]"),
        ("model.norm.weight", np.ones(32, np.int8), "model.norm.weight has type I8"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(tmp_path, name, value, message):
    folder = write_checkpoint(tmp_path, tensors=_edited(random_tensors(CONFIG), name, value))
    with pytest.raises(UserError, match=message) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)


def _header(header: object) -> bytes:
    encoded = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(encoded).to_bytes(8, "little") + encoded


_BYTE = {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x00" * 7, "truncated: 7 bytes"),
        (_header({})[:9], "truncated: its header has 2 bytes"),
        (b"\xff" * 64, "not a safetensors file"),
        (_header(b"{no json}"), "not a safetensors file: its header is not valid JSON"),
        (_header([1]), "must hold a JSON object"),
        (_header(b"[" * 200_000), "nested too deeply"),
        (_header(b'{"a": 1, "a": 1}'), "names 'a' twice"),
        (_header(b'{"\xff": 1}'), "is not UTF-8"),
        (_header({"__metadata__": {"a": 1}}), "__metadata__ must be texts"),
        (_header({"a": 1}), "tensor a makes no sense"),
        (_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "tensor a makes no sense"),
        (_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}), "tensor a makes no sense"),
        (_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "truncated: tensor a ends"),
        (_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + b"abcd", "tensor a of shape"),
        (_header({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}) + b"abcd", "makes no sense"),
        (_header({"a": {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]}}) + b"abcd", "makes no sense"),
        (_header({"__metadata__": {"a": "\ud800"}}), "__metadata__ must be texts"),
        (_header({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}) + b"abcd", "has type F33, which"),
        (_header({"a": {"dtype": "I8", "shape": [5], "data_offsets": [0, 4]}}) + b"abcd", "tensor a of shape"),
        (_header({"a": {"dtype": "I8", "shape": [True] * 4, "data_offsets": [0, 1]}}) + b"a", "makes no sense"),
        (_header({"a": {"dtype": "I8", "shape": [1] * 99, "data_offsets": [0, 1]}}) + b"a", "makes no sense"),
        # Shapes with a small product only by overflow of 64 bits, or because of a zero.
        (_header({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}), "makes no sense"),
        (_header({"a": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}), "makes no sense"),
        (_header({"a": {"dtype": "F32", "shape": [0, 2**63 - 1], "data_offsets": [0, 0]}}), "makes no sense"),
        (_header({"a": {"dtype": "F32", "shape": [2**64 + 1], "data_offsets": [0, 4]}}) + b"abcd", "makes no sense"),
        (_header({"a": _BYTE | {"data_offsets": [1, 2]}}) + b"ab", "tensor a begins behind bytes that belong to none"),
        (_header({"a": _BYTE, "b": _BYTE}) + b"a", "tensor b shares bytes with another"),
        (_header({"a": _BYTE}) + b"ab", "the last 1 bytes belong to no tensor"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, message):
    folder = write_checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message) as refusal:
        load(folder)
    assert "model.safetensors" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_cut_short_is_refused_before_anything_is_copied(tmp_path):
    folder = write_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated: tensor .* ends at byte"):
        load(folder)


def test_an_index_must_agree_with_its_files(tmp_path):
    folder = write_checkpoint(tmp_path, files=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())

    def refuse(places: dict[str, object], message: str) -> None:
        path.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(UserError, match=message):
            load(folder)

    places = index["weight_map"]
    refuse(places | {"model.norm.weight": "model-00003-of-00003.safetensors"}, "model-00003-of-00003.safetensors")
    other = next(file for file in places.values() if file != places["model.norm.weight"])
    refuse(places | {"model.norm.weight": other}, "tensor model.norm.weight is missing")
    refuse({name: file for name, file in places.items() if name != "lm_head.weight"}, "lm_head.weight is not in")
    for elsewhere in (
        *("../model.safetensors", "a/../../model.safetensors", "/etc/passwd", "..", "", ".", "a\0.safetensors"),
        *("config.json", "x" * 999),
    ):
        refuse(places | {"model.norm.weight": elsewhere}, "is not the name of a safetensors file")
    refuse(places | {"model.norm.weight": 3}, "weight_map must name a file")


def test_a_folder_without_weights_or_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        weights.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        weights.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        weights.read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "vocab_size": 2}')
    with pytest.raises(UserError, match="names 'vocab_size' twice"):
        weights.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json\.$"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"neither model\.safetensors .*pytorch_model\.bin is never read"):
        load(tmp_path)
    assert weights.read_generation_config(tmp_path) == {}


@pytest.mark.parametrize(("shards", "what"), [(3, "attention heads"), (16, "8 attention heads")])
def test_a_number_of_devices_that_does_not_divide_the_model_is_refused(shards, what):
    with pytest.raises(UserError, match=what):
        decoder.check_shards(read_spec(CONFIG)[0], layout_of(shards))
    with pytest.raises(UserError, match="JAX sees 4 device"):
        sharding.make_layout(jax.devices()[:4], 5)


def test_random_weights_have_the_declared_shapes_and_a_sane_spread():
    spec, _ = read_spec(CONFIG | {"vocab_size": 128})
    alone = weights.load_random(spec, sharding.make_layout(jax.devices(), 1), "bfloat16", seed=3)
    spread = weights.load_random(spec, sharding.make_layout(jax.devices(), 2), "bfloat16", seed=3)
    _assert_same(alone, spread)  # the values do not depend on the number of devices
    described = weights.abstract(spec, sharding.make_layout(jax.devices(), 2), "bfloat16")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), spread) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), described
    )
    embed = np.asarray(alone.top["embed"], np.float32)
    assert abs(embed.std() - 0.02) < 1e-3
    assert abs(embed.mean()) < 1e-3
    assert abs(np.corrcoef(embed[:-1].ravel(), embed[1:].ravel())[0, 1]) < 0.05
    other = weights.load_random(spec, sharding.make_layout(jax.devices(), 1), "bfloat16", seed=4)
    assert not np.array_equal(embed, np.asarray(other.top["embed"], np.float32))
    np.testing.assert_array_equal(np.asarray(alone.top["final_norm"], np.float32), 1)


def test_a_local_folder_needs_no_hub(tmp_path):
    assert weights.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="local folder"):
        weights.resolve(str(tmp_path), "main")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        weights.resolve(str(tmp_path / "file"))
    for name in (str(tmp_path / "absent"), "./absent", "a/b/c", "two words"):
        with pytest.raises(UserError, match="no folder"):
            weights.resolve(name)


def test_a_hub_id_is_served_from_the_local_cache_and_refused_without_one(tmp_path, monkeypatch):
    """The tests run with HF_HUB_OFFLINE; the cache is laid out as huggingface_hub does it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--small"
    snapshot = repository / "snapshots" / commit
    write_checkpoint(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert weights.resolve("someone/small") == snapshot
    assert weights.resolve("someone/small", commit) == snapshot
    for model, revision in (("someone/small", "other"), ("someone/absent", None)):
        with pytest.raises(UserError, match=model) as refusal:
            weights.resolve(model, revision)
        assert "\n" not in str(refusal.value)
        assert revision is None or revision in str(refusal.value)


def test_of_a_hub_repository_the_model_and_its_modules_are_fetched(monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    names = ["config.json", "modules.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = ["onnx/config.json", "consolidated.safetensors", "2_Dense/pytorch_model.bin", "4bit/model.safetensors"]

    def fetch(name, *, allow_patterns, ignore_patterns, **_):
        return "/".join(
            sorted(
                filter_repo_objects([*names, *others], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
            )
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert str(weights.resolve("someone/small")) == "/".join(sorted(names))


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
def test_loading_peaks_below_1_3_times_the_weights(tmp_path):
    """Resident memory, mapped pages included, while a checkpoint of 160 MB is loaded; half of it is one tensor."""
    config = CONFIG | {"vocab_size": 40000, "hidden_size": 512, "intermediate_size": 4096, "tie_word_embeddings": True}
    names = random_tensors(config | {"vocab_size": 1})
    shapes = {name: value.shape for name, value in names.items()} | {"model.embed_tokens.weight": (40000, 512)}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(_header(header))
        file.truncate(file.tell() + end)  # zeros, without writing them
    script = """
        import sys
        from pathlib import Path
        import jax
        from jaxllm.model import sharding
        from jaxllm.checkpoints import weights
        from jaxllm.families.families import read_spec

        def resident(field):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

        folder = Path(sys.argv[1])
        spec, family = read_spec(weights.read_config(folder))
        layout = sharding.make_layout(jax.devices(), 1)
        jax.numpy.zeros(1).block_until_ready()
        Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
        before = resident("VmRSS")
        params = weights.load(folder, spec, family, layout, "float32")
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        print(held, resident("VmHWM") - before)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    held, peak = map(int, run.stdout.split())
    assert held > 100e6
    assert held <= peak < 1.3 * held
