"""Tokenizers and templates of adapters give the same results in another process, and are ended at their limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import EngineError, UnsupportedError, UserError
from jaxllm.media.image_part import ImagePart, VideoPart
from jaxllm.text import confinement
from jaxllm.text.confined_tokenizer import ConfinedTemplates, ConfinedTokenizer
from jaxllm.text.confinement import ConfinedError, Confinement, Source
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.text.tokenizer_files import digest_of
from tests.support.tokenizer_kinds import KINDS, TEXT, build

WIDTH = 400
TEMPLATE = (
    "{% for message in messages %}<tool>{{ message.content }}{% if tools %}{{ tools|tojson }}{% endif %}{% endfor %}"
)
REFUSES = "{{ raise_exception('not so') }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]
TEXTS = st.text(st.sampled_from(TEXT + "<tool><|end|>\ud800"), max_size=40)


@pytest.fixture(scope="module")
def confined() -> Confinement:
    return Confinement()


def write(folder: Path, backend: object) -> Source:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return Source(str(folder), digest_of(folder))


def tokenizer_of(source: Source, own: Confinement, template: str) -> ConfinedTokenizer:
    told = own.call(source, "vocabulary", WIDTH)
    return ConfinedTokenizer({"default": template}, own, source, own.call(source, "identity")["vocab_size"], told)


def outcome(tokenizer: Tokenizer, method: str, *arguments: object, **named: object) -> object:
    try:
        return getattr(tokenizer, method)(*arguments, **named)
    except UserError as error:
        return type(error), str(error), error.parameter, error.value


@pytest.mark.parametrize("kind", [*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.ci) for kind in KINDS[2:])])
def test_a_tokenizer_in_another_process_is_the_same(kind: str, tmp_path: Path, confined: Confinement) -> None:
    source = write(tmp_path, build(kind))
    plain = load_tokenizer(tmp_path)
    other = tokenizer_of(source, confined, TEMPLATE)
    assert confined.call(source, "identity")["fingerprint"] == plain.fingerprint()
    for token in range(-1, WIDTH + 1):
        if 0 <= token:
            assert other.piece(token) == plain.piece(token) and other.token(token) == plain.token(token)
        assert other.token_id(other.token(max(token, 0))) == plain.token_id(plain.token(max(token, 0)))
    for name in ("vocab_size", "eos_token_id", "bos_token_id", "special_ids", "added_ids", "decoding", "named_tokens"):
        assert getattr(other, name) == getattr(plain, name), name
    assert other.lengths() == plain.lengths() and other.token_id("nowhere") is None

    @settings(max_examples=8, deadline=None)
    @given(TEXTS, TEXTS, st.sampled_from([TEMPLATE, REFUSES, "{% if"]), st.booleans(), st.lists(st.integers(0, 330)))
    def same(text: str, second: str, template: str, has_tools: bool, ids: list[int]) -> None:
        other.chat_templates = plain.chat_templates = {"default": template}
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": second}]
        tools = [{"type": "function", "function": {"name": text or "f", "parameters": {"n": 2**70}}}]
        named = {"tools": tools if has_tools else None}
        for method, arguments in (
            ("encode", (text,)),
            ("encode_first", (text, 5)),
            ("encode_last", (text, 5)),
            ("encode_pair", (text, second)),
            ("beginning_of", (text, 2)),
            ("end_of", (text, 2)),
            ("decode", (ids,)),
            ("config", ()),
            ("template_shape", (None, None)),
        ):
            assert outcome(other, method, *arguments) == outcome(plain, method, *arguments), method
        for method in ("encode_chat", "apply_chat_template"):
            assert outcome(other, method, chat, **named) == outcome(plain, method, chat, **named), method

    same()


def test_images_of_a_chat_reach_the_other_process(tmp_path: Path, confined: Confinement) -> None:
    """Test parts that were taken for images, marks around them, and a part that is only spelled like one."""
    template = "{% for message in messages %}{% for part in message.content %}{{ part.text or '<tool>' }}{% endfor %}\n"
    template += "{% endfor %}"
    source = write(tmp_path, build("byte_level"))
    plain, other = load_tokenizer(tmp_path), tokenizer_of(source, confined, template)
    plain.chat_templates = {"default": template}
    words = {"type": "text", "text": "a |"}
    chat = [
        {"role": "user", "content": [words, ImagePart(), words]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": (VideoPart(), words)},
    ]
    marks = {"image_marks": ("<tool>", "|", "<|end|>")}
    found = outcome(plain, "encode_chat", chat, **marks)
    assert isinstance(found, tuple) and str(found[0]).count("<tool>|<|end|>") == 2
    assert outcome(other, "encode_chat", chat, **marks) == found
    spelled = [{"role": "user", "content": [{"type": "image"}]}]
    refused = outcome(plain, "encode_chat", spelled)
    assert isinstance(refused, tuple) and refused[0] is UnsupportedError
    assert outcome(other, "encode_chat", spelled) == refused


@pytest.mark.parametrize("attack", ["loop", "multiplied", "grown", "normalizer", "decoder", "vanished"])
def test_what_exceeds_a_limit_ends_alone(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "SECONDS", 0.2)
    own = Confinement(most_bytes=256 << 20)
    assert not own.num_processes, "one starts at the first use"
    plain = write(tmp_path / "plain", build("byte_fallback"))
    good = tokenizer_of(plain, own, TEMPLATE)
    expected = good.encode_chat(HI)
    source, template = write(tmp_path / "bad", build("byte_fallback")), TEMPLATE
    if attack in ("normalizer", "decoder"):
        # Written by hand, because the library applies a normalizer to added tokens at once.
        file = tmp_path / "bad" / "tokenizer.json"
        stages = [{"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 1000}] * 4
        file.write_text(
            json.dumps({**json.loads(file.read_text()), attack: {"type": "Sequence", f"{attack}s": stages}})
        )
        source = Source(source.folder, digest_of(tmp_path / "bad"))
    else:
        grown = "{% set ns = namespace(a='aa') %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}"
        template = {"loop": LOOP, "multiplied": "{{ 'a' * 9999999999 }}", "grown": grown}.get(attack, LOOP)
    with pytest.raises((ConfinedError, UserError), match=r"takes too much|have changed") as caught:
        bad = tokenizer_of(source, own, template)
        if attack == "vanished":  # its process is ended, and the next one finds other files
            (tmp_path / "bad" / "tokenizer_config.json").write_text("{}")
            with pytest.raises(ConfinedError):
                bad.encode_chat(HI)
        bad.encode_chat(HI)
    assert "\n" not in str(caught.value) and good.encode_chat(HI) == expected
    assert own.num_processes == 1


def test_templates_alone_leave_the_text_to_the_models_own_tokenizer(tmp_path: Path, confined: Confinement) -> None:
    source = write(tmp_path, build("byte_level"))
    own = load_tokenizer(tmp_path)
    other = ConfinedTemplates(own, {"default": TEMPLATE}, confined, b"key", Source(source.folder))
    plain = own.with_chat_templates({"default": TEMPLATE})
    assert other.encode_chat(HI) == plain.encode_chat(HI) and other.encode("a fox") == own.encode("a fox")
    assert other.template_shape(None, None) == plain.template_shape(None, None)
    own.backend = None  # the operator's template stays in this process
    with pytest.raises(AttributeError):
        ConfinedTemplates(own, {}, confined, b"key", Source(source.folder)).encode_chat(HI, chat_template=TEMPLATE)


def sources_in(folder: Path, number: int) -> list[Source]:
    return [write(folder / str(index), build("byte_fallback")) for index in range(number)]


def test_a_vocabulary_may_take_longer_than_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, build("byte_fallback"))
    monkeypatch.setattr(confinement, "SECONDS", 0.001)
    own = Confinement()
    assert len(own.call(source, "vocabulary", 200_000)["tokens"]) == 200_000
    own.close()


def test_more_tokenizers_than_processes_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "MOST_PROCESSES", 2)
    own = Confinement()
    sources = sources_in(tmp_path, 5)
    for number, source in enumerate([*sources, *sources], start=1):
        assert own.call(source, "encode", "the")
        assert own.num_processes == (1 if number <= confinement.MOST_KEPT else 2)
        assert all(len(process.sources) <= confinement.MOST_KEPT for process in own.idle)
    own.close()


def test_memory_that_others_hold_fails_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = confinement.Process.ask, []

    def full(process: Any, frame: bytes, seconds: float) -> dict[str, Any]:
        asked.append(list(process.sources))
        shared = len(process.sources) > 1
        return {"failed": f"{confinement.TOO_MUCH_MEMORY}, or crashes"} if shared else ask(process, frame, seconds)

    monkeypatch.setattr(confinement.Process, "ask", full)
    own = Confinement()
    first, second = sources_in(tmp_path, 2)
    assert own.call(first, "identity") == own.call(second, "identity")
    assert asked == [[first], [first, second], [second]] and own.num_processes == 1
    own.close()


def test_a_closed_one_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "MOST_KEPT", 1)
    own, ask = Confinement(), confinement.Process.ask
    first, second = sources_in(tmp_path, 2)
    told = own.call(first, "identity")
    (idle,) = own.idle

    def closing(process: Any, frame: bytes, seconds: float) -> dict[str, Any]:
        own.close()
        assert not idle.is_alive and process.is_alive
        return ask(process, frame, seconds)

    monkeypatch.setattr(confinement.Process, "ask", closing)
    assert own.call(second, "identity") == told and own.num_processes == 0, "a task that runs is finished"
    with pytest.raises(EngineError, match="closed"):
        own.call(first, "identity")
