"""The adapter store under threads: adapters removed while they are read, and references to removed adapters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.features.adapters import store as adapter_store
from jaxllm.engine.features.adapters.store import Adapters
from jaxllm.engine.language import Language
from jaxllm.errors import UserError
from jaxllm.lora_request import LoRARequest
from tests.support.inspection import readers_of


def store(read: Callable[[Path], Any]) -> Adapters:
    tokenizer = SimpleNamespace(has_chat_template=True)
    language: Any = SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer, eos_ids=frozenset({2})))
    own: Language = language
    return Adapters(EngineConfig(model="m", enable_lora=True), own, read)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_removed_while_it_is_read_is_not_kept(tmp_path: Path, fails: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def read(folder: Path) -> Any:
        begun.set()
        assert may_end.wait(10)
        if fails:
            raise UserError("broken")
        return SimpleNamespace(rank=4, digest=b"d", weights=())

    own = store(read)
    requests = [LoRARequest("a", 1, str(tmp_path)), LoRARequest("b", 2, str(tmp_path))]
    got: list[Any] = []

    def get(request: LoRARequest) -> None:
        try:
            got.append(own.get(request))
        except UserError as error:
            got.append(error)

    threads = [threading.Thread(target=get, args=(request,)) for request in (*requests, *requests)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    while sum(readers_of(own).values()) < 4:
        pass
    assert own.remove(1) is False, "it was not known yet"
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert len(got) == 4 and all(isinstance(each, UserError) is fails for each in got)
    assert own.ids() == (set() if fails else {2}) and own.find(requests[0]) is None and not readers_of(own)
    if not fails:
        assert own.get(requests[0]).request == requests[0] and own.ids() == {1, 2}, "to ask again is to read again"


def test_names_of_few_that_are_gone_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "NAMES_KEPT", 8)
    own = store(lambda folder: SimpleNamespace(rank=4, digest=b"d", weights=()))
    first = own.get(LoRARequest("first", 1, str(tmp_path)))
    numbers = []
    for turn in range(2, 60):
        numbers.append(own.get(LoRARequest(f"a{turn}", turn, str(tmp_path))).number)
        own.remove(turn)
        assert own.name_of(numbers[-1]) == f"a{turn}" and own.name_of(first.number) == "first"
    known = [number for number in numbers if own.name_of(number) != f"adapter {number}"]
    assert 4 <= len(known) <= 9
    assert numbers == sorted(set(numbers)) and own.name_of(numbers[0]) == f"adapter {numbers[0]}"
    assert own.known(first.request) == (b"d", first.number, 4, frozenset({2}), True)
