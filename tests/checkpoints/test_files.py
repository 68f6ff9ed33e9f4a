"""Untrusted model folders: code in them is refused or ignored, and no file outside is read.

Covers pickles, `.py` files, `auto_map`, links out of the folder and `../` in an index. A canary shows whether any of
them ran.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.checkpoints import weights
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.loader import eos_ids_of
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model.sharding import UNDIVIDED
from jaxllm.sampling_params import default_sampling_params
from jaxllm.text.tokenizer import load_tokenizer
from tests.support.checkpoints import CONFIG, write_checkpoint

INDEX = "model.safetensors.index.json"


class Exploit:
    """Creates a file when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a loadable model: small weights, the embedded model's tokenizer."""
    made = write_checkpoint(tmp_path / "model", CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(MODEL_DIR / name, made / name)
    return made


def start(folder: Path) -> None:
    """Read everything that a start reads, except the weights' data."""
    config = weights.read_config(folder)
    spec, family = read_spec(config)
    tokenizer = load_tokenizer(folder)
    settings = {"eos_token_id": config.get("eos_token_id")} | weights.read_generation_config(folder)
    eos_ids_of(tokenizer, settings, spec.vocab_size)
    default_sampling_params(settings)
    weights.check(folder, spec, family, UNDIVIDED)


def refused(folder: Path) -> str:
    """Return the error, of one line, that refuses a folder quickly."""
    started = time.thread_time()
    with pytest.raises(UserError) as caught:
        start(folder)
    assert time.thread_time() - started < 5.0  # includes the import of transformers for conversions
    assert str(caught.value).isprintable()
    return str(caught.value)


def edit(path: Path, **fields: Any) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(document | fields))


def test_the_folder_starts(folder: Path) -> None:
    start(folder)


def test_what_would_run_code_is_never_looked_at(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in ("pytorch_model.bin", "model.pt", "tokenizer.pkl", "optimizer.pth", "model.ckpt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Exploit(canary)))
    code = f"import os\nos.mkdir({str(canary)!r})\n"
    names = ("modeling_evil", "configuration_evil", "tokenization_evil", "__init__", "setup", "sitecustomize")
    for name in names:
        (folder / f"{name}.py").write_text(code)
    edit(folder / "config.json", auto_map={"AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil"})
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    edit(folder / "generation_config.json", custom_generate="modeling_evil")
    start(folder)
    assert not canary.exists()
    pickle.loads((folder / "model.pt").read_bytes())
    assert canary.exists()  # the canary works


def test_a_model_of_pickles_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(canary)))
    assert "pytorch_model.bin is never read, since to read such a file runs its code" in refused(folder)
    assert not canary.exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("a\nb\n")
    (folder / "tokenization_evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Evil: pass\n")
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
    )
    assert "transformers cannot convert" in refused(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    assert f"{name} is a link to a file outside of the model's folder" in refused(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(os.path.relpath(secret, folder))
    assert "outside" in refused(folder)
    (folder / name).unlink()
    (folder / "own").mkdir()
    secret.rename(folder / "own" / name)
    (folder / name).symlink_to(Path("own") / name)
    start(folder)  # links inside the folder are allowed


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/a.jinja", "special_tokens_map.json"]
)
def test_what_need_not_be_there_may_not_be_elsewhere(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("password")
    edit(folder / "tokenizer_config.json", added_tokens_decoder=None)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    said = refused(folder)
    assert "outside" in said and "password" not in said


def test_a_folder_of_links_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "a.jinja").write_text("password")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "templates")
    assert "outside" in refused(folder)
    (folder / "orbax").symlink_to(tmp_path / "templates")
    (folder / "additional_chat_templates").unlink()
    (folder / "orbax.json").write_text('{"files": {}}')
    refused(folder)


def test_links_of_the_hubs_cache_are_its_own(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--small"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    start(snapshot)
    (tmp_path / "secret").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to(tmp_path / "secret")
    assert "outside" in refused(snapshot)


def test_links_in_a_circle_and_pipes_are_refused(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("generation_config.json")
    refused(folder)
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    assert "is not a file" in refused(folder)


def test_an_index_names_no_link_out_of_its_folder(folder: Path, tmp_path: Path) -> None:
    """Other invalid names are in test_weights.py."""
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "link.safetensors"}}))
    assert "outside" in refused(folder)


def test_what_only_claims_to_be_large_costs_nothing(folder: Path) -> None:
    """Sparse files of 10 GB, a million layers, a header of 2^63 bytes."""
    cases: list[tuple[str, Callable[[Path], object]]] = [
        ("config.json", lambda path: os.truncate(path, 10**10)),
        ("tokenizer_config.json", lambda path: os.truncate(path, 10**10)),
        ("config.json", lambda path: path.write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**6}))),
        ("config.json", lambda path: path.write_text(json.dumps(CONFIG | {"vocab_size": 2**62}))),
        ("model.safetensors", lambda path: path.write_bytes((2**63).to_bytes(8, "little") + b"{}")),
        ("model.safetensors", lambda path: os.truncate(path, 10**10)),
        (INDEX, lambda path: path.write_bytes(b"[" * (65 * 2**20))),
    ]
    for name, damage in cases:
        path = folder / name
        kept = path.read_bytes() if path.exists() else None
        damage(path)
        tracemalloc.start()
        refused(folder)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 192 * 2**20, name
        path.unlink() if kept is None else path.write_bytes(kept)
    start(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eos_token_id": -1}, "eos_token_id of the model is -1"),
        ({"eos_token_id": [1, True]}, "eos_token_id"),
        ({"eos_token_id": 1.0}, "eos_token_id"),
        ({"max_new_tokens": "9"}, "generation_config.json: max_tokens must be an integer"),
        ({"temperature": -1}, "generation_config.json: temperature"),
    ],
)
def test_settings_that_no_request_could_live_with_are_refused_at_once(
    folder: Path, fields: dict[str, Any], said: str
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    assert said in refused(folder)


# Known escapes from jinja2's sandbox, from other engines and jinja2's history.
ESCAPES = [
    "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
    "{{ joiner.__init__.__globals__['__builtins__']['__import__']('os').mkdir('CANARY') }}",
    "{{ namespace.__init__.__globals__.os.mkdir('CANARY') }}",
    "{{ lipsum.__globals__.os.mkdir('CANARY') }}",
    "{{ self._TemplateReference__context.environment.__init__.__globals__.os.mkdir('CANARY') }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('CANARY') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['functools'] }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{% if c.__name__ == 'catch_warnings' %}"
    "{{ c()._module.__builtins__['__import__']('os').mkdir('CANARY') }}{% endif %}{% endfor %}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('for' ~ 'mat') }}{{ (''|attr('format'))('{0.__class__.__mro__}') }}",
    "{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(cycler) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ ['{0.__class__.__mro__}'] | map('format', cycler) | list }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}",
    "{% extends '/etc/passwd' %}",
    "{{ config.__class__ }}{{ request.application.__globals__ }}{{ get_flashed_messages.__globals__ }}x"
    "{{ messages.pop() }}",
    "{{ dict.mro() }}",
    "{{ range.__self__ }}",
    "{% for i in range(10**9) %}{% endfor %}",
]


@pytest.mark.ci
@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_of_the_folder_stays_in_its_box(folder: Path, tmp_path: Path, escape: str) -> None:
    canary = tmp_path / "canary"
    (folder / "chat_template.jinja").write_text(escape.replace("CANARY", str(canary)))
    tokenizer = load_tokenizer(folder)
    try:
        said, _ = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    except UserError as error:
        said = str(error)
    assert not canary.exists() and len(said) <= 1000
    for secret in ("<class", "<module", "root:", "Traceback", "builtins", str(folder)):
        assert secret not in said


def test_serve_refuses_a_hostile_folder_in_one_line(
    folder: Path, tmp_path: Path, run_jaxllm: Callable[..., tuple[int, str, str]]
) -> None:
    secret = tmp_path / "secret.json"
    (folder / "config.json").rename(secret)
    (folder / "config.json").symlink_to(secret)
    code, _, said = run_jaxllm("serve", str(folder), "--port", "0", "--grpc-port", "0")
    assert code == 2 and said.count("\n") == 1 and "outside" in said
