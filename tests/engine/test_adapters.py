"""Batches of requests with adapters, under every setting, return the tokens of the merged model run alone."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

from jaxllm import LLM, LoRARequest, RequestOutputKind, SamplingParams, UserError
from jaxllm.embedded import MODEL_DIR
from jaxllm.outputs import RequestOutput
from tests.support.adapters import STEMS, merge, write_adapter
from tests.support.inspection import num_processes
from tests.support.paths import GOLDEN
from tests.support.sound_models import KINDS, RATE, sound, write_sound_model
from tests.support.tokenizer_kinds import build
from tests.support.vision_models import PLACEHOLDER, around, image, write_model

LONGEST = 60
SHARED = {"skip_tokenizer_init": True, "precompile": "covering", "max_model_len": LONGEST, "block_size": 4}
CHUNKED = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "num_kv_blocks": 18}
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64}
FAMILIES = ("llama", "qwen2", "gemma2", "gpt2", "phi3")
MEDIA = ("qwen2_5_vl", "clip", "gemma3", "qwen3_vl", "siglip", *KINDS)  # read images or sound, in half of their prompts
LONGER = {"max_model_len": 96, "num_kv_blocks": 28}  # for these
RANKS = (1, 8, 64, 3, 8, 16, 1, 8)
# Last parts of modules' names; families differ in them.
TARGETS = (
    None,
    ("q_proj", "v_proj", "c_attn", "qkv_proj"),
    ("o_proj", "c_proj"),
    ("gate_proj", "gate_up_proj", "c_fc"),
    ("k_proj", "down_proj", "c_attn"),
    ("up_proj", "c_fc", "gate_up_proj"),
    ("q_proj", "o_proj", "up_proj", "c_attn"),
    None,
)
IN_CI = (("qwen2", True), ("phi3", False))  # a family, and whether it runs on two devices
ALL_SETTINGS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 2, "max_loras": 8},
    {"async_scheduling": False, "enable_prefix_caching": False, "max_loras": 1, "max_cpu_loras": 4},
    {"deterministic": True, "max_loras": 2},
]
MEDIA_SETTINGS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (MEDIA, {"max_loras": 1}),
    (MEDIA, {"tensor_parallel_size": 2, "max_loras": 2}),
    (("clip", "voxtral"), {"pipeline_parallel_size": 2, "max_loras": 2}),
    (("qwen3_vl", "gemma3"), {"async_scheduling": False, "max_loras": 2}),
    (("clip", "qwen2_5_vl"), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "max_loras": 2}),
]
MEDIA_IN_CI = (("qwen2_5_vl", True), ("gemma3", False))  # as `IN_CI`
Case = tuple[int, dict[str, Any], SamplingParams]  # adapter number (0: no adapter), prompt, parameters


@functools.cache
def base_of(family: str) -> Path:
    if family not in MEDIA:
        return GOLDEN / family
    folder = Path(tempfile.mkdtemp(prefix=f"base-{family}-"))
    return write_sound_model(folder, family) if family in KINDS else write_model(folder, family)


@functools.cache
def adapters(family: str) -> tuple[Path, list[LoRARequest]]:
    """Write a family's adapters and the models merged from them; return the folder and the requests."""
    folder, base = Path(tempfile.mkdtemp(prefix=f"adapters-{family}-")), base_of(family)
    requests = []
    for number, (rank, targets) in enumerate(zip(RANKS, TARGETS, strict=True), 1):
        stem = STEMS[number % len(STEMS)] if family in MEDIA else None
        written = write_adapter(folder / f"a{number}", base, rank, targets=targets, seed=number, stem=stem)
        merge(folder / f"merged{number}", base, written)
        requests.append(LoRARequest(f"a{number}", number, str(written)))
    return folder, requests


@functools.cache
def cases(family: str, count: int) -> list[Case]:
    """Draw requests with `count` adapters and without; some prompts share a prefix, across adapters too."""
    random = np.random.default_rng(sum(map(ord, family)))
    vocabulary = 90
    shared = [random.integers(3, vocabulary, 40) for _ in range(2)]
    drawn: list[Case] = []
    for number in range(36):
        begin = shared[number % 2][: int(random.choice([0, 8, 17, 32]))]
        end = random.integers(3, vocabulary, int(random.integers(1, 8))).tolist()
        seeds = random.integers(1, 4, 1) if family in MEDIA and random.random() < 0.6 else ()
        prompt = with_media(family, begin.tolist(), seeds, end)
        temperature = float(random.choice([0.0, 0.0, 1.0]))
        params = SamplingParams(
            temperature=temperature,
            seed=number,
            n=2 if temperature and random.random() < 0.5 else 1,
            max_tokens=int(random.integers(1, 24)),
            logprobs=[None, 3][int(random.integers(2))],
            prompt_logprobs=[None, None, 2][int(random.integers(3))],
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        drawn.append((number % (count + 1), prompt, params))
    return drawn


def with_media(family: str, begin: list[int], seeds: Iterable[int], end: list[int]) -> dict[str, Any]:
    """Return a prompt with an image or sound for each seed between two texts."""
    ids, media = begin, [(sound(seed, 0.5), RATE) if family in KINDS else image(seed) for seed in seeds]
    for _ in media:
        ids = [*ids, *around(family)[:1], PLACEHOLDER, *around(family)[1:]]
    given = {"multi_modal_data": {"audio" if family in KINDS else "image": media}} if media else {}
    return {"prompt_token_ids": [*ids, *end], **given}


@functools.cache
def expected(family: str, count: int) -> list[RequestOutput]:
    """Run each request alone, in the merged model of its adapter or in the base model."""
    folder, _ = adapters(family)
    outputs: dict[int, RequestOutput] = {}
    for adapter in range(count + 1):
        model = folder / f"merged{adapter}" if adapter else base_of(family)
        longer = {"max_model_len": LONGER["max_model_len"]} if family in MEDIA else {}
        with LLM(str(model), **SHARED | longer, max_num_seqs=2, max_num_batched_tokens=64) as llm:
            for index, (own, prompt, params) in enumerate(cases(family, count)):
                if own == adapter:
                    llm.reset_prefix_cache()
                    (outputs[index],) = llm.generate([prompt], params, use_tqdm=False)
    return [outputs[index] for index in range(len(outputs))]


def told(output: RequestOutput) -> tuple[Any, np.ndarray]:
    """Return the tokens of a request's outputs, and all log-probabilities in order."""
    tables = [*(output.prompt_logprobs or ()), *(each for own in output.outputs for each in own.logprobs or ())]
    numbers = [table[token].logprob for table in tables if table for token in sorted(table)]
    return [(own.token_ids, own.finish_reason) for own in output.outputs], np.array(numbers)


@pytest.mark.parametrize(
    ("family", "count", "settings"),
    [
        ("llama", 2, {"max_loras": 1}),
        *(
            pytest.param(
                family,
                len(RANKS),
                own,
                # CI runs one family on two devices and one on a single device.
                marks=pytest.mark.ci if (family, "tensor_parallel_size" in own) in IN_CI else pytest.mark.slow,
                id=f"{family} {own}",
            )
            for index, family in enumerate(FAMILIES)
            for own in (ALL_SETTINGS if family == "llama" else [ALL_SETTINGS[index % 2]])
        ),
        *(
            pytest.param(
                family,
                2,
                own,
                marks=pytest.mark.ci
                if own is MEDIA_SETTINGS[(family, True) in MEDIA_IN_CI][1] and family in dict(MEDIA_IN_CI)
                else pytest.mark.slow,
                id=f"{family} {own}",
            )
            for families, own in MEDIA_SETTINGS
            for family in families
        ),
    ],
)
def test_each_request_gets_what_its_merged_model_gives_it_alone(
    family: str, count: int, settings: dict[str, Any]
) -> None:
    _, requests = adapters(family)
    random = np.random.default_rng(7)
    longer = LONGER if family in MEDIA else {}
    with LLM(str(base_of(family)), **SHARED | CHUNKED | LORA | longer | settings) as llm:
        engine = llm.engine
        outputs: dict[str, RequestOutput] = {}
        left = list(enumerate(cases(family, count)))
        while left or engine.has_unfinished_requests():
            for _ in range(int(random.integers(6))):
                if left:
                    number, (adapter, prompt, params) = left.pop(0)
                    own = requests[adapter - 1] if adapter else None
                    engine.add_request(str(number), prompt, params, lora_request=own)
            outputs |= {output.request_id: output for output in engine.step()}
        most = engine.config.max_loras
        assert len(engine.scheduler.state.adapters) <= most and engine.metrics.adapter_loads >= count
        assert engine.metrics.compilations_after_ready == 0
        assert engine.metrics.preemptions > 0 or (settings and not longer)
        if engine.config.tensor_parallel_size > 1:
            programs, layers = engine.runner.programs, engine.runner.setup.spec.num_layers
            for key in programs.covering:
                if key.part == "forward":  # no more than without adapters
                    assert programs[key].as_text().count(" all-reduce(") == 2 * layers + 1
        if family in MEDIA:
            check_equal_media(llm, family, requests)
    for number, due in enumerate(expected(family, count)):
        tokens, logprobs = told(outputs[str(number)])
        due_tokens, due_logprobs = told(due)
        assert tokens == due_tokens, number
        np.testing.assert_allclose(logprobs, due_logprobs, rtol=0, atol=1e-4)


def check_equal_media(llm: LLM, family: str, requests: list[LoRARequest]) -> None:
    """Check that adapters share the embeddings of an image and no blocks, and that one of the tower is refused."""
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
    prompt = with_media(family, [5, 6, 7], [9], [9] * 20)
    found: list[tuple[bool, int]] = []
    texts: list[list[int]] = []
    scores: list[float] = []

    def ask(adapter: LoRARequest | None) -> None:
        before = engine.metrics.images_encoded + engine.metrics.sounds_encoded
        (output,) = llm.generate([prompt], params, lora_request=adapter, use_tqdm=False)
        encoded = engine.metrics.images_encoded + engine.metrics.sounds_encoded - before
        found.append((bool(output.num_cached_tokens), encoded))
        texts.append(output.outputs[0].token_ids)
        scores.append(output.outputs[0].cumulative_logprob or 0.0)

    for adapter in (requests[0], requests[0], requests[1], None, None, requests[1]):
        ask(adapter)
    assert found == [(False, 1), (True, 0), (False, 0), (False, 0), (True, 0), (True, 0)]
    assert texts[0] == texts[1] and texts[2] == texts[5] and texts[3] == texts[4]
    assert min(abs(one - other) for one, other in itertools.combinations((scores[0], *scores[2:4]), 2)) > 1e-3
    module = {"qwen": "model.visual.blocks.0.attn.qkv"}.get(family[:4], "model.vision_tower.encoder.layers.0.mlp.fc1")
    module = "audio_tower.layers.0.fc1" if family in KINDS else module
    folder = write_adapter(Path(tempfile.mkdtemp(prefix="tower-")), {module: (32, 32)})
    with pytest.raises(UserError, match=f"^adapter 'tower': .*{re.escape(module)}, which reads images or sound"):
        ask(LoRARequest("tower", 99, str(folder)))
    ask(requests[0])
    assert texts[-1] == texts[0]


@pytest.mark.ci
def test_over_an_8_bit_model_rows_do_not_disturb_each_other() -> None:
    _, requests = adapters("llama")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts, own = [[5 + row, 6, 7] for row in range(6)], [None, *requests[:5]]
    with LLM(str(GOLDEN / "llama"), **SHARED | LORA | {"quantization": "int8", "max_loras": 6}) as llm:
        together = llm.generate(prompts, params, lora_request=own, use_tqdm=False)
        for prompt, adapter, output in zip(prompts, own, together, strict=True):
            (alone,) = llm.generate([prompt], params, lora_request=adapter, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        plain = llm.generate(prompts[1:], params, use_tqdm=False)
    assert all(
        one.outputs[0].token_ids != other.outputs[0].token_ids for one, other in zip(plain, together[1:], strict=True)
    )


@pytest.mark.ci
def test_adapters_change_what_is_said() -> None:
    drawn = zip(cases("llama", len(RANKS)), expected("llama", len(RANKS)), strict=True)
    by_adapter = {case[0]: told(output)[0] for case, output in drawn}
    assert len({str(tokens) for tokens in by_adapter.values()}) == len(by_adapter)


@pytest.mark.ci
def test_without_the_switch_an_adapter_is_refused(tmp_path: Path) -> None:
    request = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", GOLDEN / "llama")))
    with LLM(str(GOLDEN / "llama"), **SHARED) as llm:
        with pytest.raises(UserError, match="LoRA is not enabled"):
            llm.generate([[5, 6]], lora_request=request, use_tqdm=False)


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LoRARequest, LoRARequest]]:
    """Provide a trained model, an adapter of it, and an adapter with a different tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("speakers")
    for name in ("plain", "own"):
        write_adapter(folder / name, MODEL_DIR, seed=1)
    tokenizer = build("byte_level")
    tokenizer.save(str(folder / "own" / "tokenizer.json"))
    template = "{% for message in messages %}<tool>{{ message.content }}{% endfor %}"
    (folder / "own" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": template})
    )
    settings = {"enable_lora": True, "max_loras": 2, "max_num_seqs": 4, "precompile": "covering"}
    with LLM(str(MODEL_DIR), **settings) as llm:
        yield (
            llm,
            LoRARequest("plain", 1, str(folder / "plain")),
            LoRARequest("own", 2, str(folder / "own")),
        )
        engine = llm.engine
    assert not num_processes(engine.adapters)


def test_an_adapter_brings_its_own_tokenizer(speakers: tuple[LLM, LoRARequest, LoRARequest]) -> None:
    llm, _, own = speakers
    tokenizer = build("byte_level")
    text = "Once upon a time"
    words = {"temperature": 0.0, "max_tokens": 20, "allowed_token_ids": [*range(1, tokenizer.get_vocab_size())]}
    params = SamplingParams(**words, logprobs=1)
    (output,) = llm.generate(text, params, lora_request=own, use_tqdm=False)
    ids = tokenizer.encode(text).ids
    assert list(output.prompt_token_ids) == ids != list(llm.generate(text, params, use_tqdm=False)[0].prompt_token_ids)
    (completion,) = output.outputs
    assert completion.text == tokenizer.decode(ids + list(completion.token_ids)).removeprefix(text)
    tables = completion.logprobs or []
    shown = [table[token].decoded_token for table, token in zip(tables, completion.token_ids, strict=True)]
    assert shown == [llm.get_tokenizer(own).token_text(token) for token in completion.token_ids]
    stop = completion.text[3:6]
    (stopped,) = llm.generate(text, SamplingParams(**words, stop=stop), lora_request=own, use_tqdm=False)
    assert stopped.outputs[0].text == completion.text[: completion.text.index(stop)]
    bad = next(token for token in completion.token_ids if tokenizer.decode([token]).strip().isascii())
    banned = SamplingParams(**words, bad_words=[tokenizer.decode([bad])])
    (other,) = llm.generate(text, banned, lora_request=own, use_tqdm=False)
    assert bad not in other.outputs[0].token_ids
    (chat,) = llm.chat([{"role": "user", "content": "a fox"}], params, lora_request=own, use_tqdm=False)
    assert list(chat.prompt_token_ids) == tokenizer.encode("<tool>a fox").ids


def test_grammars_of_different_tokenizers_in_one_step(speakers: tuple[LLM, LoRARequest, LoRARequest]) -> None:
    llm, plain, own = speakers
    patterns = ["[a-f]{8}", "(the fox ){2,3}x", "[0-9]{3}-[0-9]{2}", "(yes|no), sir"]
    params = [
        SamplingParams(temperature=1.0, seed=number, structured_outputs={"regex": pattern})
        for number, pattern in enumerate(patterns * 3)
    ]
    adapters = [own, None, plain] * 4
    outputs = llm.generate(["a"] * len(params), params, lora_request=adapters, use_tqdm=False)
    for output, pattern, adapter, each in zip(outputs, patterns * 3, adapters, params, strict=True):
        assert re.fullmatch(pattern, output.outputs[0].text)
        (alone,) = llm.generate("a", each, lora_request=adapter, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_larger_vocabulary_is_refused(speakers: tuple[LLM, LoRARequest, LoRARequest], tmp_path: Path) -> None:
    llm, _, _ = speakers
    write_adapter(tmp_path / "large", MODEL_DIR)
    tokenizer = build("byte_level")
    tokenizer.add_tokens([f"<{number}>" for number in range(1300)])
    tokenizer.save(str(tmp_path / "large" / "tokenizer.json"))
    request = LoRARequest("large", 7, str(tmp_path / "large"))
    with pytest.raises(UserError, match=r"^adapter 'large': its tokenizer has 16\d\d tokens, and the model only 1536"):
        llm.generate("a", lora_request=request, use_tqdm=False)
    assert 7 not in llm.engine.list_loras()


def test_other_weights_under_an_old_name_hit_no_old_block(
    speakers: tuple[LLM, LoRARequest, LoRARequest], tmp_path: Path
) -> None:
    llm, _, _ = speakers
    request = LoRARequest("again", 9, str(tmp_path / "again"))
    prompt, params = {"prompt_token_ids": [5, 6, 7, 8] * 12}, SamplingParams(temperature=0.0, max_tokens=8)

    def ask() -> RequestOutput:
        return llm.generate(prompt, params, lora_request=request, use_tqdm=False)[0]

    write_adapter(tmp_path / "again", MODEL_DIR, seed=3)
    first, second = ask(), ask()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert llm.engine.remove_lora(9) and not llm.engine.remove_lora(9)
    write_adapter(tmp_path / "again", MODEL_DIR, seed=4)
    third = ask()
    assert third.num_cached_tokens == 0 and third.outputs[0].token_ids != first.outputs[0].token_ids
    llm.engine.remove_lora(9)
    write_adapter(tmp_path / "again", MODEL_DIR, seed=3)
    fourth = ask()  # same content as the first
    assert fourth.num_cached_tokens == 32 and fourth.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.ci
def test_adapters_beyond_those_in_memory_are_read_again(tmp_path: Path) -> None:
    requests = [
        LoRARequest(f"a{number}", number, str(write_adapter(tmp_path / f"a{number}", GOLDEN / "llama", seed=number)))
        for number in range(1, 13)
    ]
    settings = SHARED | CHUNKED | LORA | {"max_loras": 2, "max_cpu_loras": 3}
    with LLM(str(GOLDEN / "llama"), **settings) as llm:
        store = llm.engine.adapters
        params = SamplingParams(temperature=0.0, max_tokens=4)
        rounds = [
            [llm.generate([[5, 6, 7]], params, lora_request=own, use_tqdm=False)[0] for own in requests]
            for _ in range(2)
        ]
        for first, second in zip(*rounds, strict=True):
            assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert len(llm.engine.scheduler.state.adapters) == 2
        assert llm.engine.list_loras() == set(range(1, 13))
        gc.collect()
        assert sum(store.find(own) is not None for own in requests) == 3, "what no request has is let go"


@pytest.mark.slow
def test_two_hundred_adapters_in_turns_compile_nothing_and_take_no_more_memory(tmp_path: Path) -> None:
    requests = [
        LoRARequest(f"a{number}", number, str(write_adapter(tmp_path / f"a{number}", GOLDEN / "llama", seed=number)))
        for number in range(1, 201)
    ]
    settings = SHARED | {"enable_lora": True, "max_loras": 8, "max_num_seqs": 16}
    with LLM(str(GOLDEN / "llama"), **settings | {"max_num_batched_tokens": 64}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        prompts, first = [[5 + index % 80, 6, 7] for index in range(len(requests))], None
        sizes: list[float] = []
        held: list[tuple[int, int]] = []  # number of Python objects, and bytes of the arrays
        for _ in range(6):
            outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
            said = [output.outputs[0].token_ids for output in outputs]
            first = first or said
            assert said == first
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss / 2**20)
            held.append((len(gc.get_objects()), sum(array.nbytes for array in jax.live_arrays())))
        assert len(set(map(tuple, said))) > 150
        assert llm.engine.metrics.compilations_after_ready == 0 and llm.engine.metrics.adapter_loads >= 6 * 192
        assert held[-1][0] - held[2][0] < 600, "less than an object for each of the last loads"
        assert held[-1][1] == held[2][1]
        # An adapter is 49 KB, 600 of them are 28 MB; the allocator's arenas in a long-lived process jump by 10 MB.
        assert sizes[-1] - sizes[2] < 24, sizes
