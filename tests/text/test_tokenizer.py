"""The tokenizer against transformers, and streamed text against decoding all tokens.

Decoding all tokens defines the text of an output (see `Detokenizer`); the tests never inspect a state.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers

from jaxllm.engine.input_processor import read_prompt
from jaxllm.errors import UserError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import advance, begin, finish
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.support import paths
from tests.support.paths import STORIES
from tests.support.tokenizer_kinds import KINDS, TEXT, alphabet, build

SAMPLES = [TEXT, "", " ", "  two  spaces ", "the\n", "<|end|> the <tool>x", "a" * 50, "\u2581▁ ▁", "\x00\t\r"]
EXAMPLES = settings(max_examples=80, deadline=None)


def _write(folder: Path, backend: Backend, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        kind: _write(root / kind, build(kind), {"eos_token": "<|end|>", "clean_up_tokenization_spaces": False})
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


def _stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    """Return the text of each step, then that of `finish`. For steps of several tokens see fuzz/test_properties.py."""
    state = begin(tokenizer, prompt, SamplingParams(skip_special_tokens=skip))
    deltas = []
    for token in output:
        state, delta = advance(state, tokenizer, [token])
        deltas.append(delta)
    return [*deltas, finish(state, tokenizer)]


# ---- text to ids and back


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_transformers(kind: str, folders: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    _same_as_transformers(folders[kind], tokenizers[kind])


def test_same_as_transformers_for_a_real_model() -> None:
    _same_as_transformers(STORIES, load_tokenizer(STORIES))


def _same_as_transformers(folder: Path, ours: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert ours.vocab_size == len(theirs)
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    for text in SAMPLES:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    config, names = ours.config(), ("bos_token", "eos_token", "pad_token", "unk_token")
    assert {name: config.get(name) for name in names} == {name: getattr(theirs, name) for name in names}
    added = {
        int(token): (entry["content"], entry["special"]) for token, entry in config["added_tokens_decoder"].items()
    }
    assert added == {token: (str(entry), entry.special) for token, entry in theirs.added_tokens_decoder.items()}
    assert ours.added_ids == theirs.added_tokens_decoder.keys()
    everything = list(range(ours.vocab_size))
    assert ours.decode(everything) == theirs.decode(everything, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", "GemmaTokenizer"])
def test_same_as_the_class_of_a_family(name: str, tmp_path: Path) -> None:
    """transformers 5 builds these classes from code, not from tokenizer.json; their saved files must read the same."""
    import transformers

    if name in ("LlamaTokenizer", "GemmaTokenizer"):
        vocabulary, merges = alphabet(), [("▁", "the")]
    else:
        trained = json.loads(build("byte_level").to_str())["model"]
        vocabulary, merges = trained["vocab"], [tuple(merge) for merge in trained["merges"]]
    getattr(transformers, name)(vocab=vocabulary, merges=merges).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name.removesuffix("Tokenizer").lower()}))
    _same_as_transformers(tmp_path, load_tokenizer(tmp_path))


def _encoder_tokenizer(name: str, folder: Path) -> Path:
    """Save a tokenizer of an encoder's class; "vocab.txt" is BERT's file before tokenizer.json."""
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "na", "##ive", "fox", "##es", ",", ".", "a", "##a"]
    if name == "vocab.txt":
        folder.mkdir(exist_ok=True)
        (folder / "vocab.txt").write_text("\n".join(words))
    elif name == "BertTokenizer":
        transformers.BertTokenizer(vocab={word: at for at, word in enumerate(words)}).save_pretrained(folder)
    elif name == "RobertaTokenizer":
        model = json.loads(build("byte_level").to_str())["model"]
        vocabulary = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *model["vocab"]])
        merges = [tuple(merge) for merge in model["merges"]]
        numbered = {token: at for at, token in enumerate(vocabulary)}
        transformers.RobertaTokenizer(vocab=numbered, merges=merges).save_pretrained(folder)
    else:
        pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("a", -1.5)]
        transformers.XLMRobertaTokenizer(vocab=pieces).save_pretrained(folder)
    kind = {"RobertaTokenizer": "roberta", "XLMRobertaTokenizer": "xlm-roberta"}.get(name, "bert")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


@pytest.mark.parametrize("name", ["BertTokenizer", "vocab.txt", "RobertaTokenizer", "XLMRobertaTokenizer"])
def test_pairs_and_first_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = _encoder_tokenizer(name, tmp_path)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    _same_as_transformers(folder, ours)
    around = theirs.num_special_tokens_to_add()
    for first, second in itertools.pairwise([*SAMPLES, "The foxes, naïve."]):
        pair = theirs([first], [second])
        (ids,) = pair.input_ids
        (types,) = pair.get("token_type_ids", [[0] * len(ids)])
        assert ours.encode_pair(first, second) == (ids, types)
        for most in range(around, 12):
            assert ours.encode_first(first, most) == theirs(first, truncation=True, max_length=most).input_ids
    with pytest.raises(UserError, match=f"no room for the {around} "):
        ours.encode_first("the", around - 1)


def test_a_text_ends_with_what_the_config_asks_for_once_that_is_obeyed(tmp_path: Path) -> None:
    for adds_eos in (True, False):
        folder = _write(tmp_path, build("byte_level"), {"eos_token": "<end>", "add_eos_token": adds_eos})
        ours = load_tokenizer(folder)
        plain, long = ours.encode("the end"), ours.encode("the end " * 999)
        end = [ours.eos_token_id] * adds_eos
        ours.obey_add_eos_token()
        assert (ours.encode("the end"), ours.encode("the end", False)) == ([*plain, *end], plain)
        assert ours.encode_first("the end " * 999, 7) == [*long[: 7 - len(end)], *end]


def test_texts_are_lowered_where_sentence_transformers_says_so(tmp_path: Path) -> None:
    folder = _write(tmp_path, build("wordpiece"), {})
    assert load_tokenizer(folder).encode("THE") != load_tokenizer(folder).encode("the")
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert load_tokenizer(folder).encode("THE") == load_tokenizer(folder).encode("the")


@pytest.mark.parametrize("legacy", [False, True])
def test_special_tokens_named_in_the_config_are_added(legacy: bool, tmp_path: Path) -> None:
    """Tokens that tokenizer.json lacks, from the config's table, from names, from lists and from the older file."""
    config: dict[str, object] = {"additional_special_tokens": ["<extra>", "<|end|>"], "pad_token": "<pad>"}
    if not legacy:
        plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
        config["added_tokens_decoder"] = {
            "9999": {"content": "<late>", "special": False, **plain},
            "300": {"content": "<early>", "special": True, **plain},
        }
    _write(tmp_path, build("byte_level"), config)
    named = {
        "bos_token": {"content": "<bos>", "lstrip": False, "normalized": False, "rstrip": False},
        "eos_token": "<|end|>",
    }
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    ours = load_tokenizer(tmp_path)
    _same_as_transformers(tmp_path, ours)
    text = "the <pad><bos><late><early><extra>"
    from transformers import AutoTokenizer

    assert ours.encode(text) == AutoTokenizer.from_pretrained(str(tmp_path)).encode(text)
    assert (ours.eos_token_id is not None) == legacy  # only legacy folders read special_tokens_map.json


def test_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    trained = json.loads(build("byte_level").to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(trained["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in trained["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_id == trained["vocab"]["<|end|>"]


def test_training_leftovers_do_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    backend = build("byte_level")
    backend.enable_truncation(4)
    backend.enable_padding(length=500, pad_token="<|end|>")
    tokenizer = load_tokenizer(_write(tmp_path, backend, {}))
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special_tokens=False) == TEXT


def test_split_special_tokens_reads_them_as_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_write(tmp_path, build("byte_level"), {"split_special_tokens": True}))
    assert not tokenizer.special_ids & set(tokenizer.encode("a<|end|>b"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer: expected tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read as a tokenizer"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "["}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "must hold a JSON object, not list"),
        ({"tokenizer.model": "no"}, "Save it once with save_pretrained()"),
    ],
)
def test_broken_folders_are_refused_in_one_line(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["./missing", "/missing/folder", "a/b/c", __file__])
def test_paths_that_are_no_folder_are_refused_without_the_hub(where: str) -> None:
    with pytest.raises(UserError, match="does not exist or is not a folder"):
        load_tokenizer(where)


def test_hub_id_that_cannot_be_had_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, "tokenizer.json" in allow_patterns))
        raise OSError("offline\nand nothing cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=r"^No tokenizer for 'someone/model': .* offline and nothing cached$"):
        load_tokenizer("someone/model", revision="v1")
    assert asked == [("someone/model", "v1", True)]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.WordPiece(), decoders.ByteFallback()]),
    ],
)
def test_decoders_that_cannot_be_streamed_exactly_are_refused(decoder: decoders.Decoder, tmp_path: Path) -> None:
    backend = build("no_decoder")
    backend.decoder = decoder
    with pytest.raises(UserError, match="not supported"):
        load_tokenizer(_write(tmp_path, backend, {}))


def test_text_and_ids_out_of_range(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    with pytest.raises(UserError, match=r"lone surrogate \(U\+D83C\) at character 3"):
        tokenizer.encode("abc\ud83c")
    with pytest.raises(UserError, match="must be a string, got bytes"):
        tokenizer.encode(b"abc")  # type: ignore[arg-type]
    for bad in (-1, 2**32, "1", 1.5):
        with pytest.raises(UserError, match="Token ids must be integers from 0 to 4294967295"):
            tokenizer.decode([bad])  # type: ignore[list-item]
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_read_and_written_as_short_ones_are(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    text = (TEXT + " <|end|> the ") * 400
    for special in (True, False):
        ids = tokenizer.encode(text, special)
        assert ids == tokenizer.backend.encode(text, add_special_tokens=special).ids
        assert len(ids) > 4096 and tokenizer.decode(ids, special) == tokenizer.backend.decode(ids, special)
    for bad in (-1, 2**32, "1", 1.5):
        with pytest.raises(UserError, match="Token ids must be integers from 0 to 4294967295"):
            tokenizer.decode([*ids, bad])


WORDS = ["the", "a", "b", "go", "don't", "日本", "é", "going", "🎉", "time", ".", ",\n", " ", "   ", "\n\n"]
WORDS += ["<|end|>", "<tool>"]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(WORDS), st.integers(1, 40)), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(0, 40),
)
@pytest.mark.parametrize("kind", ["stories", *KINDS])
def test_a_prompt_that_is_cut_first_keeps_the_same_tokens(
    kind: str, tokenizers: dict[str, Tokenizer], pieces: list[tuple[str, int]], kept: int, shift: int
) -> None:
    tokenizer = load_tokenizer(STORIES) if kind == "stories" else tokenizers[kind]
    text = "".join(f"{word * (1 + times % 3)} the " * times for word, times in pieces)
    text = text * (1 + 3 * len(tokenizer.end_of("a" * 100_000, kept)) // len(text)) + "a " * shift
    assert len(tokenizer.end_of(text, kept)) < len(text)
    _, ids, _ = read_prompt(text, SamplingParams(truncate_prompt_tokens=kept), tokenizer, 2**20, 512)
    assert ids == tokenizer.encode(text)[-kept:]


@pytest.mark.ci
def test_others_run_while_a_long_text_is_read_or_written() -> None:
    """With the GIL held, other threads would wait for the whole call, or half of it for two passes."""
    tokenizer = load_tokenizer(STORIES)
    content = "Once <s>upon a time" + " there was a dog." * 12000
    ids = tokenizer.encode(content)
    messages = [{"role": "user", "content": content}]
    template = "<s>{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.encode_chat([{"role": "user", "content": "a"}], chat_template=template)
    for work in (
        lambda: tokenizer.encode(content),
        lambda: tokenizer.encode_chat(messages, chat_template=template),
        lambda: tokenizer.decode(ids * 10),
    ):
        assert min(_longest_wait(work) for _ in range(4)) < 0.3


def _longest_wait(work: Callable[[], object]) -> float:
    """Return the longest wait of another thread while `work` runs, as a part of the time that it took."""
    ticks = [time.monotonic()]
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    work()
    ended = time.monotonic()
    is_over.set()
    thread.join()
    turns = [began, *(at for at in ticks if began < at < ended), ended]
    return max(later - earlier for earlier, later in itertools.pairwise(turns)) / (ended - began)


def test_token_text_reads_as_after_other_text(tokenizers: dict[str, Tokenizer]) -> None:
    stripping, wordpiece, byte_level = (tokenizers[kind] for kind in ("stripping", "wordpiece", "byte_level"))
    vocabulary = alphabet()
    assert [stripping.token_text(vocabulary[token]) for token in ("▁the", "the", "<s>", "<0x41>", "<0xE2>")] == [
        " the", "the", "<s>", "A", "\ufffd",
    ]  # fmt: skip
    assert [wordpiece.token_text(index) for index in (1, 2)] == [" the", "ing"]
    assert [byte_level.token_text(index) for index in (0, 10**6)] == ["<|end|>", ""]
    assert "".join(map(byte_level.token_text, byte_level.encode("the time"))) == "the time"


def test_a_token_is_spelled_as_the_vocabulary_has_it(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, spelled in (
        ("stripping", ["▁the", "<s>", "<0x41>"]),
        ("byte_level", ["<|end|>"]),
        ("wordpiece", ["##ing"]),
    ):
        tokenizer = tokenizers[kind]
        assert [tokenizer.token(tokenizer.token_id(token) or 0) for token in spelled] == spelled
        assert tokenizer.token(10**6) == ""
    byte_level = tokenizers["byte_level"]
    assert "".join(map(byte_level.token, byte_level.encode("the time"))) == "theĠtime"


# ---- incremental detokenization


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_streamed_behind_a_prompt_is_the_full_decode(
    kind: str, skip: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24)
    word = tokenizer.backend.token_to_id("the" if kind == "wordpiece" else "a")

    @EXAMPLES
    @given(prompt=ids, output=ids)
    def behind_a_prompt(prompt: list[int], output: list[int]) -> None:
        prompt = [*prompt, word]  # ends in a whole character
        whole, before = tokenizer.decode(prompt + output, skip), tokenizer.decode(prompt, skip)
        assert before + "".join(_stream(tokenizer, prompt, output, skip)) == whole

    behind_a_prompt()


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_as_early_as_it_is_certain(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    """The text returned after each token is the common prefix of all continuations.

    Continuations: nothing, any one token, and any that could complete a character of up to four bytes.
    """
    tokenizer = tokenizers[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=6)
    endings = [[], *([token] for token in range(tokenizer.vocab_size))]
    if kind in ("byte_level", "byte_fallback", "stripping", "unfused"):
        of_byte = _byte_ids(tokenizer, kind)
        inner = [of_byte[byte] for byte in (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF)]
        endings += [list(tokens) for length in (2, 3) for tokens in itertools.product(inner, repeat=length)]

    @settings(max_examples=12, deadline=None)
    @given(output=ids)
    def certain(output: list[int]) -> None:
        deltas = _stream(tokenizer, [], output)
        texts = [tokenizer.decode([*output, *ending]) for ending in endings]
        first, last = min(texts), max(texts)  # all texts in between share their common prefix
        shared = next((index for index, pair in enumerate(zip(first, last)) if pair[0] != pair[1]), len(first))  # noqa: B905
        assert "".join(deltas[:-1]) == first[:shared]

    certain()


def _byte_ids(tokenizer: Tokenizer, kind: str) -> dict[int, int]:
    """Return the token id of each byte."""
    if kind != "byte_level":
        return {byte: 3 + byte for byte in range(256)}
    vocabulary = json.loads(tokenizer.backend.to_str())["model"]["vocab"]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for code in [*range(0x250), *range(0x300, 0xD800, 64), 0xE000, 0xFFFD, *range(0x10000, 0x110000, 4096)]:
        for byte, character in zip(chr(code).encode(), split.pre_tokenize_str(chr(code))[0][0], strict=True):
            found[byte] = vocabulary[character]
    return found


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_every_string_of_three_critical_bytes(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    """The first and last bytes of every range in Unicode's table of well-formed UTF-8 (Unicode 16, table 3-7)."""
    tokenizer = tokenizers[kind]
    of_byte = _byte_ids(tokenizer, kind) if kind != "byte_level" else _ids_of_all_bytes(tokenizer)
    critical = bytes.fromhex("417f808f909fa0bfc1c2dfe0e1ecedeeeff0f1f3f4f5ff")
    for triple in itertools.product(critical, repeat=3):
        ids = [of_byte[byte] for byte in triple]
        assert "".join(_stream(tokenizer, [], ids)) == tokenizer.decode(ids), bytes(triple)


def _ids_of_all_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """Like `_byte_ids`, with the bytes that no valid text has."""
    found = _byte_ids(tokenizer, "byte_level")
    vocabulary = json.loads(tokenizer.backend.to_str())["model"]["vocab"]
    for byte in {0xC0, 0xC1, *range(0xF5, 0x100)}:
        found[byte] = vocabulary[chr(byte)]  # printable Latin-1 letters stand for themselves
    return found


@pytest.mark.parametrize("kind", ["byte_level", "stripping"])
def test_prompt_cut_at_every_byte(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    """A character begun by the prompt is returned with the output that completes it, and no other text of the prompt
    is.
    """
    tokenizer = tokenizers[kind]
    of_byte = _byte_ids(tokenizer, kind)
    text = "né日本🎉x"
    raw = text.encode()
    for cut in range(len(raw) + 1):
        prompt, output = ([of_byte[byte] for byte in part] for part in (raw[:cut], raw[cut:]))
        expected = text[len(raw[:cut].decode(errors="ignore")) :]
        assert "".join(_stream(tokenizer, prompt, output)) == expected


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "expected"),
    [
        ("byte_level", b"a\xe2", b"b", "b"),  # the broken character was the prompt's
        ("byte_level", b"a\xe2", b"\x82b", "\ufffdb"),  # broken by the output: one U+FFFD for both bytes
        ("byte_level", b"a\xe2", b"", ""),
        ("byte_level", b"a\xe2", b"\x82", "\ufffd"),
        ("byte_level", b"\xef\xbf", b"\xbd", "\ufffd"),  # U+FFFD itself, whole
        ("byte_level", b"\xed", b"\xa0b", "\ufffdb"),  # a surrogate is invalid from its second byte on
        ("byte_level", b"\xed\xa0", b"b", "b"),
        ("byte_level", b"\xf0\x9f", b"\xf0\x9f\x8e\x89", "🎉"),
        ("stripping", b"a\xe2", b"b", "\ufffd"),  # the whole run a, E2, b is invalid, byte by byte
        ("stripping", b"\xe2\x82\xac\xc3", b"\xa9", "é"),
        ("stripping", b"", b" x", "x"),  # the first space of all is stripped
        ("stripping", b" ", b"x", "x"),
        ("stripping", b"  ", b" x", " x"),
    ],
)
def test_prompt_that_ends_within_a_character(
    kind: str, prompt: bytes, output: bytes, expected: str, tokenizers: dict[str, Tokenizer]
) -> None:
    of_byte = _byte_ids(tokenizers[kind], kind)
    ids = [of_byte[byte] for byte in prompt], [of_byte[byte] for byte in output]
    assert "".join(_stream(tokenizers[kind], *ids)) == expected


# ---- cost of the import


def test_loading_a_tokenizer_imports_no_model_library(folders: dict[str, Path]) -> None:
    program = (
        "import sys, jaxllm.text.tokenizer as t; early = set(sys.modules)\n"
        f"t.load_tokenizer({str(folders['byte_level'])!r}).encode('a')\n"
        "print(sorted({'tokenizers', 'jinja2', 'huggingface_hub'} & early))\n"
        "print(sorted({'transformers', 'jax', 'torch', 'jinja2', 'numpy'} & set(sys.modules)))"
    )
    root = paths.ROOT
    shown = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.split("\n")[:2] == ["[]", "[]"]
