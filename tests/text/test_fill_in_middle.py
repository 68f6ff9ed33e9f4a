"""Fill-in-the-middle prompts, as each family's code writes them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend

from jaxllm.errors import UserError
from jaxllm.text import fill_in_middle
from jaxllm.text.tokenizer import Tokenizer
from tests.support.tokenizer_kinds import build

FAMILIES = {
    "Qwen2.5-Coder": (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_pad|>"),
    "StarCoder2": (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<file_sep>"),
    "SantaCoder": (["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], "<|endoftext|>"),
    "DeepSeek-Coder": (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<|EOT|>"),
    "CodeLlama": (["▁<PRE>", "▁<SUF>", "▁<MID>"], "▁<EOT>"),
    "Codestral": (["[PREFIX]", "[SUFFIX]"], "[MIDDLE]"),
}


def tokenizer_with(backend: Backend, *tokens: str) -> Tokenizer:
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return Tokenizer(backend, {"bos_token": "<s>"}, {}, "some model")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hole_is_between_its_familys_tokens(family: str, kind: str) -> None:
    markers, end = FAMILIES[family]
    tokenizer = tokenizer_with(build(kind), *markers, end)
    own = [tokenizer.token_id(marker) for marker in markers]
    before, behind = (tokenizer.encode(text, add_special_tokens=False) for text in ("a b", "the"))
    parts = [[own[0], *before], [own[1], *behind]]
    expected = [*parts[1], *parts[0]] if family == "Codestral" else [*parts[0], *parts[1], own[2]]
    bos = [1] if kind == "byte_fallback" else []
    assert fill_in_middle.encode(tokenizer, "a b", "the") == [*bos, *expected]
    assert fill_in_middle.encode(tokenizer, before, "the", add_special_tokens=False) == expected
    assert fill_in_middle.encode(tokenizer, "", "")[len(bos) :] == [*(own[::-1] if family == "Codestral" else own)]
    ends = {*own, tokenizer.token_id(end)} - ({tokenizer.token_id("[MIDDLE]")} if family == "Codestral" else set())
    assert set(fill_in_middle.stop_ids(tokenizer)) == ends


def test_no_space_is_put_before_the_text_behind_a_hole() -> None:
    """As Meta's `encode_infilling`: the tokenizer adds a space only before the text that precedes the hole."""
    backend = build("byte_fallback")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = tokenizer_with(backend, *FAMILIES["CodeLlama"][0])
    for behind in ("the", " the", "☺", "\n  a", "日本", ""):
        ids = fill_in_middle.encode(tokenizer, "a", behind)
        assert tokenizer.decode(ids[ids.index(tokenizer.token_id("▁<SUF>") or 0) :]) == behind
        assert tokenizer.token(ids[2]) == "▁", "the one before has it"


def test_a_vocabulary_without_such_tokens_is_refused() -> None:
    for tokens in ((), ("<fim_prefix>", "<fim-suffix>", "<fim_middle>"), ("[PREFIX]",)):
        tokenizer = tokenizer_with(build("byte_level"), *tokens)
        with pytest.raises(UserError, match="cannot fill in the middle") as caught:
            fill_in_middle.encode(tokenizer, "a", "b")
        assert caught.value.parameter == "suffix"
