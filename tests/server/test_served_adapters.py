"""The server's registry of adapters: names, folders, and removal by the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import AdapterNotFoundError, FeatureDisabledError, NotFoundError, UserError
from jaxllm.lora_request import LoRARequest
from jaxllm_server.adapters import ServedAdapters, requests_of
from jaxllm_server.serving import Serving
from jaxllm_server.shared.options import ServerOptions
from tests.support.fake_serving import FakeAdapters


class Engine(FakeAdapters):
    """Fake `AsyncLLM` with threads that a test can block."""

    def __init__(self, enable_lora: bool = True) -> None:
        self.config = EngineConfig(model="base", enable_lora=enable_lora)
        super().__init__()
        self.state = "serving"
        self.may_read = threading.Event()
        self.may_read.set()

    async def check_health(self) -> None:
        pass

    async def off_loop(self, function: Any, *arguments: Any, client: str | None = None, language: bytes) -> Any:
        def run() -> Any:
            assert self.may_read.wait(10)
            return function(*arguments)

        return await asyncio.to_thread(run)

    @property
    def known(self) -> set[int]:
        return set(self.known_requests)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters with links in it, next to a folder outside the clients' reach."""
    root = tmp_path / "root"
    for name in ("a", "b", "bad", "leaky", "deep/c"):
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("s3cr3t")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "in").symlink_to("a")
    (root / "circle").symlink_to("circle")
    (root / "leaky" / "tokenizer.json").symlink_to(tmp_path / "secret" / "key")
    (root / "b" / "tokenizer.json").symlink_to("../a/adapter_config.json")
    return root


def adapters(root: Path | None, engine: Engine | None = None, **options: Any) -> ServedAdapters:
    own: Any = engine or Engine()
    return ServedAdapters(own, ServerOptions(lora_root=root and str(root), **options), ("base", "alias"))


@pytest.mark.parametrize(
    ("path", "error"),
    [
        *(
            (path, None)
            for path in ("a", "./a", "a/", "b", "in", "deep/c", "deep/../a", "{root}/a", "{root}/../root/a")
        ),
        *(
            (path, UserError)
            for path in ("..", "../secret", "/", "/etc", "{root}/../secret", "out", "out/", "a/../../secret", "leaky")
        ),
        *((path, AdapterNotFoundError) for path in ("c", "a/adapter_config.json", "a\0", "x" * 5000, "circle", "~")),
        ("bad", UserError),
    ],
)
def test_what_is_loaded_lies_in_the_folder_for_it(root: Path, path: str, error: type[UserError] | None) -> None:
    engine = Engine()
    own = adapters(root, engine)
    load = own.load("x", path.replace("{root}", str(root)))
    if error is None:
        asyncio.run(load)
        (request,) = engine.known_requests.values()
        assert Path(request.lora_path).is_relative_to(root) and Path(request.lora_path).is_dir()
        assert own.find("x").source == path.replace("{root}", str(root))
        return
    with pytest.raises(error) as caught:
        asyncio.run(load)
    assert type(caught.value) is error and caught.value.parameter == "lora_path"
    assert str(root) not in str(caught.value).replace(path, "") and "s3cr3t" not in str(caught.value)
    assert not engine.known and "x" not in own


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "Both 'lora_name' and 'lora_path' must be provided."),
        ("a,b", "a name must be 1 to 128 characters"),
        ("a b", "a name must be 1 to 128 characters"),
        ("é", "a name must be 1 to 128 characters"),
        ("x" * 129, "a name must be 1 to 128 characters"),
        ("alias", "alias is the name of the model."),
        ("taken", "The lora adapter 'taken' has already been loaded. If you want to load the adapter in place, set"),
    ],
)
def test_names_that_cannot_be_had(root: Path, name: str, said: str) -> None:
    own = adapters(root, lora_modules=("taken=a",))
    with pytest.raises(UserError) as caught:
        asyncio.run(own.load(name, "b"))
    assert said in str(caught.value) and caught.value.parameter == "lora_name"
    assert [served.name for served in own] == ["taken"]


def test_nothing_is_loaded_that_the_server_was_not_started_for(root: Path) -> None:
    off: Any = Engine(enable_lora=False)
    for own, said in (
        (ServedAdapters(off, ServerOptions(), ("base",)), "started without --enable-lora"),
        (adapters(None), "started without --lora-root"),
    ):
        with pytest.raises(FeatureDisabledError, match=said):
            asyncio.run(own.load("x", "a"))
    for option in ({"lora_root": str(root)}, {"lora_modules": ("x=a",)}):
        with pytest.raises(UserError, match="needs --enable-lora"):
            ServedAdapters(off, ServerOptions(**option), ("base",))
    with pytest.raises(AdapterNotFoundError, match="The lora adapter 'x' cannot be found"):
        adapters(root).unload("x")


def test_an_error_is_readable_where_the_folder_is_the_whole_file_system(root: Path) -> None:
    with pytest.raises(UserError) as caught:
        asyncio.run(adapters(Path("/")).load("x", str(root / "bad")))
    assert str(caught.value).count(str(root)) == 1, str(caught.value)


async def test_an_unloaded_adapter_stays_with_the_engine_until_its_requests_have_ended(root: Path) -> None:
    engine = Engine()
    own = adapters(root, engine, lora_modules=("first=a",))
    await own.load("x", "a")
    served = own.find("x")
    with own.using(served), own.using(None):
        with own.using(served):
            own.unload("x")
            with pytest.raises(AdapterNotFoundError):
                own.find("x")
        await own.load("x", "b")  # a second load of the same name
        await own.load("x", "a", in_place=True)
        assert engine.known == {2, 4}, "3 was replaced, 2 has a request"
        own.note_finished(served)
    assert engine.known == {4}
    assert own.find("x").num_finished == 1 and own.num_finished_others == 0
    own.unload("x")
    own.note_finished(served)
    assert engine.known == set() and own.num_finished_others == 2
    assert [each.name for each in own] == ["first"]


async def test_a_load_that_was_begun_is_ended_and_two_of_a_name_are_one(root: Path) -> None:
    engine = Engine()
    own = adapters(root, engine)
    engine.may_read.clear()
    first, second = (asyncio.ensure_future(own.load("x", path)) for path in ("a", "b"))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0)
    engine.may_read.set()
    with pytest.raises(UserError, match="has already been loaded"):
        await second
    assert first.cancelled() and own.find("x").source == "a" and len(engine.known) == 1
    with pytest.raises(UserError):
        await own.load("x", "bad", in_place=True)
    assert own.find("x").source == "a" and len(engine.known) == 1, "what could not be read replaces nothing"


def test_modules_are_read_as_vllms_are() -> None:
    own = requests_of(("a=/x=y", json.dumps({"name": "b", "path": "org/b", "base_model_name": "m"}), "c=d"))
    assert own == (LoRARequest("a", 1, "/x=y"), LoRARequest("b", 2, "org/b"), LoRARequest("c", 3, "d"))
    for text in (
        "a",
        "=b",
        "a=",
        "{",
        '{"name": "a"}',
        '{"name": 1, "path": "b"}',
        '{"name": "a", "path": "b", "c": 1}',
    ):
        with pytest.raises(UserError, match="lora_modules"):
            requests_of((text,))
    with pytest.raises(UserError, match="names 'a' twice"):
        requests_of(("a=b", "a=c"))


def test_a_request_names_its_adapter_as_its_model_or_beside_it(root: Path) -> None:
    engine: Any = Engine()
    own = Serving(engine, ServerOptions(lora_modules=("a=x", "b=y"), served_model_name=("base", "alias")))
    answers = {("", ""): "base", ("alias", ""): "base", ("a", ""): "a", ("", "b"): "b", ("base", "b"): "b"}
    assert {asked: own.check_model(*asked) for asked in [*answers, ("a", "a")]} == {**answers, ("a", "a"): "a"}
    for asked, error in (
        (("c", ""), NotFoundError),
        (("c", "a"), NotFoundError),
        (("", "c"), AdapterNotFoundError),
        (("a", "b"), UserError),
    ):
        with pytest.raises(UserError) as caught:
            own.check_model(*asked)
        assert type(caught.value) is error, asked
