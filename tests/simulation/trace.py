"""A trace: the settings of an engine and a list of events, made from a seed; plain data for JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.focus import Focus, windowed_blocks, with_stages
from tests.simulation.media import draw_media, fit_whole_images, place_images
from tests.simulation.oracle import BROKEN, PIECES, VOCABULARY
from tests.simulation.sources import draw_sources, place_source

# Kinds of faults, each of which a seed switches on or off; edges of lengths and forks, no faults, are always on.
FAULTS = (
    *("disconnect", "abort", "duplicate_id", "slow_reader", "stopped_reader", "deadline", "time_limit"),
    *("clock_forward", "clock_back", "clock_freeze", "allocation_refused", "raise_before", "raise_after"),
    *("result_lost", "result_late", "result_duplicated", "result_of_gone", "not_finite", "out_of_memory"),
    *("compile_stall", "tokenizer_error", "detokenizer_error", "same_prefix", "prefix_thrash", "priority_inversion"),
    *("burst", "drain", "restart", "reset_cache", "pause", "dies", "request_fault", "leave_early"),
    *("sample_raises_before", "sample_raises_after", "fill_raises", "grammar_raises", "sample_out_of_memory"),
    *("reload_adapter", "put_raises", "masks_late"),
)
# Ends of prompts: incomplete characters of two, three and four bytes.
HALVES = tuple(tuple(PIECES.index(bytes([byte])) for byte in end) for end in (b"ab\xc3", b"a\xe2\x82", b"\xf0\x9f\x98"))
BLOCK_SIZES = (1, 2, 2, 16, 16, 64, 128)


@dataclass
class Trace:
    """Settings and `events`, each (turn, kind, *arguments), in order of their turns."""

    seed: int
    setting: dict[str, Any]
    events: list[list[Any]] = field(default_factory=list)
    num_turns: int = 0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=None, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> Trace:
        return cls(**json.loads(path.read_text()))


def make_trace(seed: int, num_turns: int = 600, focus: Focus | None = None) -> Trace:
    """Return a trace, equal for equal seeds in any process. With a focus, its events often reach a rare state."""
    chance = random.Random(seed)
    faults = [name for name in FAULTS if chance.random() < 0.4] if focus is None else [*focus.rates]
    setting = _setting(chance, faults)
    if focus is not None:
        setting |= {"max_source": 0} | focus.setting(chance)
    elif (stages := random.Random(f"stages {seed}").choice((1, 1, 1, 1, 1, 2, 2, 4))) > 1:
        setting |= with_stages(stages)
    fit_whole_images(setting)
    events = _Maker(chance, setting, faults, focus).events(num_turns)
    setting["axes"] = random.Random(f"axes {seed}").random() < 0.5  # with images, three of rotary positions
    return Trace(seed, setting, events, num_turns)


def _setting(chance: random.Random, faults: Sequence[str]) -> dict[str, Any]:
    block_size = chance.choice(BLOCK_SIZES)
    is_wide = chance.random() < 0.02  # more streams than get an output for every token
    num_slots = 40 if is_wide else chance.choice((1, 2, 3, 4, 4, 5, 6, 8))
    longest = max(12, block_size * chance.choice((2, 3)) if block_size > 16 else chance.choice((12, 24, 48, 64, 64)))
    longest += chance.choice((-1, 0, 0, 1))
    whole = -(-(longest - 1) // block_size)  # blocks of the longest request
    size = chance.choice(("need", "need", "less", "more", "small", "small", "tight", "roomy", "roomy"))
    num_blocks = {
        "need": whole,
        "less": whole - 1,
        "more": whole + 1,
        "small": whole + chance.randint(1, max(1, whole)),
        "tight": whole + 1 + whole * num_slots // 4,
        "roomy": whole * max(2, num_slots // 2 + chance.randint(0, 3)),
    }[size]
    max_adapters = chance.choice((0, 0, 1, 1, 2, 3))
    window = chance.choice((0, 0, 1, 2, block_size, block_size + 1, 2 * block_size, longest // 2))
    window = window if window < longest else 0
    setting = {
        "max_adapters": max_adapters,
        "num_adapters": chance.choice((1, 2, 4, 6)) if max_adapters else 0,
        "max_kept": max_adapters + chance.choice((0, 0, 1, 3)),  # adapters in the host's memory
        "block_size": block_size,
        "num_slots": num_slots,
        "num_blocks": max(1, num_blocks),
        "max_model_len": longest,
        "max_step_tokens": max(num_slots, chance.choice((num_slots, num_slots, 8, 8, 16, 31, 33, 64, 96))),
        "prefix_caching": chance.random() < 0.75,
        "async_scheduling": chance.random() < 0.6,
        "policy": "priority" if "priority_inversion" in faults or chance.random() < 0.3 else "fcfs",
        "block_events": chance.random() < 0.2,
        "compiled": chance.choice((0.0, 0.5, 1.0)),  # share of the smaller programs that are compiled at the start
        # Lower than the default of the engine, which no trace would reach.
        "most_queued": chance.choice((4 * num_slots, 4 * num_slots, 3, 50)),
        "most_queued_tokens": chance.choice((None, None, None, 2 * longest)),
        "broken_text": "detokenizer_error" in faults,
        "beams": chance.choice((0.05, 0.2, 0.5)),  # share of the drawn parameters with beam search
        "seed": chance.randrange(1000),
        "window": window,  # tokens, of layers in a second group of blocks; 0: one group
        "num_window_blocks": windowed_blocks(chance, window, block_size, max(1, num_blocks)),
        "max_drafts": (max_drafts := chance.choice((0, 0, 0, 0, 1, 2, 3, 4))),
        "most_verified": chance.choice((256, num_slots + 1)),
        # `token_cost` and `draft_cost` of `Limits`: where they are small, drafts pay even if few are accepted.
        "costs": [chance.choice((0, 20, 90, 400)), chance.choice((0, 0, 10, 60))],
        "grammars": chance.choice((0.0, 0.25))
        if max_drafts
        else 0.25,  # share of requests; steps with such a row verify no drafts
    }
    # Drawn from another generator, so that the events are the same as without the tier.
    others = random.Random(repr(setting))
    setting |= _tier(others, setting["num_blocks"], setting["prefix_caching"]) | draw_media(others, longest)
    return setting | draw_sources(others, setting)


def _tier(chance: random.Random, num_blocks: int, is_cached: bool) -> dict[str, Any]:
    """Draw the host's and disk's tiers: blocks of full layers and of windowed layers, and the behavior of copies."""
    host = chance.choice((0, 0, 1, 1, 4)) * num_blocks
    return {
        "host_blocks": [host, host and 1 + host // 2],
        "max_stores": chance.choice((1, 4, 64, 64)),
        "swaps": host > 0 and chance.random() < 0.5,
        # Share of the copies that end in a turn, in any order (0.0: all are lost), and share of these that fail.
        "transfers": [chance.choice((0.0, 0.1, 0.5, 0.9, 1.0)), chance.choice((0.0, 0.0, 0.2))],
        "has_disk": host > 0 and is_cached and chance.random() < 0.5,
        "reads": [chance.choice((0.0, 0.2, 0.5, 1.0)), chance.choice((0.0, 0.0, 0.1, 0.3))],  # as `transfers`
    }


class _Maker:
    """Draws the events of one trace."""

    def __init__(
        self, chance: random.Random, setting: dict[str, Any], faults: Sequence[str], focus: Focus | None = None
    ) -> None:
        self.chance = chance
        self.focus = focus
        self.setting = setting
        self.faults = set(faults)
        self.num_names = 0
        self.other_chance = random.Random(repr(setting))
        self.names: list[str] = []
        same = "same_prefix" in self.faults
        self.bases = [
            self._ids(setting["max_model_len"] + 1)
            for _ in range(1 if same else 12 if "prefix_thrash" in self.faults else 3)
        ]
        self.params = [self._params() for _ in range(14)]

    def events(self, num_turns: int) -> list[list[Any]]:
        chance, faults = self.chance, self.faults
        setting = self.setting
        load = chance.choice((0.7, 1.2, 2.0)) * min(setting["num_slots"] + 2, 12) / 24
        # Probabilities in each turn, of the kinds that are on for the seed.
        rates = {
            "disconnect": 0.07, "abort": 0.07, "duplicate_id": 0.02, "clock_forward": 0.006, "clock_back": 0.006,
            "clock_freeze": 0.006, "allocation_refused": 0.012, "raise_before": 0.008, "raise_after": 0.008,
            "result_lost": 0.008, "result_late": 0.008, "result_duplicated": 0.02, "result_of_gone": 0.02,
            "not_finite": 0.012, "out_of_memory": 0.008, "compile_stall": 0.008, "tokenizer_error": 0.01,
            "burst": 0.005, "drain": 0.006, "restart": 0.006, "reset_cache": 0.01, "pause": 0.02, "dies": 0.005,
            "request_fault": 0.01, "leave_early": 0.01,
            "sample_raises_before": 0.008, "sample_raises_after": 0.008, "sample_out_of_memory": 0.008,
            "fill_raises": 0.008, "grammar_raises": 0.015, "reload_adapter": 0.04, "receive": 0.1, "put_raises": 0.01,
            "masks_late": 0.1, "load_raises": 0.02,
            "resume_reading": 0.2,
        }  # fmt: skip
        rates |= {} if self.focus is None else self.focus.rates
        is_on = [(kind, rate) for kind, rate in rates.items() if kind in faults or kind == "resume_reading"]
        events: list[list[Any]] = []
        for turn in range(num_turns):
            while chance.random() < load / (1 + load):
                events.append([turn, "request", self._request()])
            for kind, rate in is_on:
                if chance.random() < rate:
                    events.append([turn, kind, *self._arguments(kind)])
        return events

    def _arguments(self, kind: str) -> list[Any]:
        chance = self.chance
        match kind:
            case "receive":
                return [chance.randrange(1000), chance.randrange(1 << 30)]
            case "disconnect" | "abort":
                # The client's number, whether a step is in flight, whether twice, and the phase of the request.
                phases = (None, "prefill", "prefill", "preempted", "ended", "unseen")
                phase = chance.choice(phases if self.focus is None else self.focus.phases)
                return [chance.randrange(1000), chance.random() < 0.5, chance.random() < 0.2, phase]
            case "duplicate_id":
                return [chance.randrange(1000), self._request()]
            case "clock_forward" | "clock_back":
                return [3600.0]
            case "clock_freeze":
                return [chance.randint(2, 20)]
            case "allocation_refused":
                return [chance.randint(1, 3)]
            case "not_finite":
                return [chance.randrange(8)]
            case "out_of_memory" | "sample_out_of_memory":
                return [chance.choice((1, 4, 16))]
            case "masks_late":
                return [chance.randint(1, 255)]
            case "reload_adapter":
                return [chance.randrange(1000), chance.random() < 0.8, chance.random() < 0.3]
            case "leave_early":
                return [self._request()]
            case "tokenizer_error":
                return [self._request() | {"text": "ab\0"}]
            case "burst":
                size = 10_000 if chance.random() < 0.01 else int(64 * 4 ** chance.random())
                params = {"max_tokens": chance.choice((1, 2, 3)), "output_kind": 2}
                return [size, self._request() | {"ids": self._ids(1), "params": params}]
            case "drain":
                return [chance.choice((0.005, 0.2, 30.0))]
            case "pause":
                return [chance.choice(("abort", "wait", "keep")), chance.randint(1, 6)]
            case _:
                return []

    def _ids(self, count: int) -> list[int]:
        chance = self.chance
        return [2 + int(chance.random() * 50) for _ in range(count)]

    def _length(self) -> int:
        """Draw a prompt's length: an edge of blocks, of the budget or of the context, or any length."""
        chance, setting = self.chance, self.setting
        size, most, budget = setting["block_size"], setting["max_model_len"], setting["max_step_tokens"]
        if chance.random() < 0.4:
            edges = (
                0,
                1,
                2,
                size - 1,
                size,
                size + 1,
                2 * size,
                budget,
                budget + 1,
                most - 2,
                most - 1,
                most,
                most + 1,
            )
            return min(max(0, chance.choice(edges)), most + 1)
        return chance.randint(1, max(1, min(most - 1, 24) if chance.random() < 0.8 else most - 1))

    def _request(self) -> dict[str, Any]:
        chance, setting, faults = self.chance, self.setting, self.faults
        draw = chance.random
        length = self._length()
        base = self.bases[int(draw() * len(self.bases))]
        shared = length if draw() < 0.5 else int(draw() * length)
        ids = base[:shared] + self._ids(length - shared)
        self.num_names += 1
        request: dict[str, Any] = {"name": f"r{self.num_names}", "ids": ids, "params": chance.choice(self.params)}
        if draw() < 0.15:
            request["salt"] = chance.choice(("one", "two"))
        if setting["num_adapters"] and draw() < 0.7:
            request["adapter"] = 0 if draw() < 0.01 else 1 + int(draw() * setting["num_adapters"])
        if setting["policy"] == "priority":
            request["priority"] = chance.choice((-1, 0, 0, 5))
            if "priority_inversion" in faults:  # long requests have low priority, short ones high
                request["priority"] = 9 if length > 8 else -draw() // 0.25
                request["priority"] = int(request["priority"])
        if "deadline" in faults and draw() < 0.15:
            request["timeout"] = chance.choice((0.015, 0.1, 0.3))
        if "time_limit" in faults and draw() < 0.15:
            request["time_limit"] = chance.choice((0.015, 0.1, 0.3))
        if "slow_reader" in faults and draw() < 0.3:
            request["reads"] = chance.randint(1, 3)  # outputs, then it waits for "resume_reading"
        elif "stopped_reader" in faults and draw() < 0.3:
            request["reads"] = -chance.randint(1, 3)  # outputs, then it stops reading
        if "detokenizer_error" in faults and draw() < 0.15 and ids:
            request["ids"] = [*ids[:-1], BROKEN]
        if draw() < 0.05 and length > 3:
            request["ids"] = [*ids[:-3], *chance.choice(HALVES)]
        if draw() < 0.1 and length and length < 12:
            request["text"] = "".join(chance.choice("ab c") for _ in range(length))
        place_images(self.other_chance, request, setting)
        place_source(self.other_chance, request, setting)
        return request

    def _params(self) -> dict[str, Any]:
        """Draw sampling parameters; most are at their defaults."""
        chance, setting = self.chance, self.setting
        size = setting["block_size"]
        if chance.random() < setting["beams"] and not setting["max_drafts"]:
            return {
                "max_tokens": (most := chance.choice((1, 3, 8, 16, size, size + 1, 30, 40))),
                "beams": {
                    "beam_width": chance.choice((1, 2, 2, 3, 3, 4, 4, 5)),
                    "max_tokens": most,
                    "ignore_eos": chance.random() < 0.3,
                    "length_penalty": chance.choice((0.0, 1.0, 1.0, 2.0, -1.0)),
                    "early_stopping": chance.choice((True, False, "never")),
                    "include_stop_str_in_output": chance.random() < 0.3,
                },
            }
        params: dict[str, Any] = {
            "temperature": chance.choice((0.0, 1.0, 0.5)),
            "max_tokens": chance.choice((1, 3, 8, 16, min(40, size), min(40, size + 1), 30, 40, None)),
            "output_kind": chance.choice((0, 1, 1, 2, 2)),
        }
        if params["temperature"] and chance.random() < 0.35:
            params["n"] = chance.choice((2, 3))
        if chance.random() < 0.3:
            params["seeded"] = True  # the world sets a distinct seed for each request
        if chance.random() < 0.35:
            words = ["ab", "aba", "bbb", "é", "aab", "abab", "baab", "aaaa", "éa", "b a"]
            nested = ["ab", "aab"] if chance.random() < 0.3 else []  # both end at the same character
            params["stop"] = nested or chance.sample(words, chance.randint(1, 3))
            params["include_stop_str_in_output"] = chance.random() < 0.3
        if chance.random() < 0.3:
            params["stop_token_ids"] = sorted(chance.sample(range(2, 40), chance.randint(1, 4)))
        if chance.random() < 0.5:
            params["ignore_eos"] = True
        if chance.random() < (0.5 if "stop" in params else 0.2) and (params["max_tokens"] or 20) > 3:
            params["min_tokens"] = chance.choice((1, 2, 3, 8, 16, 24))  # the large ones outlast a preemption
            params["min_tokens"] = min(params["min_tokens"], params["max_tokens"] or 24)
        if chance.random() < 0.1:
            params["detokenize"] = False
            params.pop("stop", None)
        if chance.random() < 0.2:
            params["skip_special_tokens"] = False
        if chance.random() < 0.4:
            params["stream_interval"] = chance.choice((1, 2, 5, 9))
        if chance.random() < 0.08:
            params["logprobs"] = chance.randint(0, 3)
        if chance.random() < 0.1:
            params["prompt_logprobs"] = chance.randint(0, 2)
        if chance.random() < 0.08:
            params["repetition_penalty"] = 1.5
        for name, value in (("presence_penalty", 0.5), ("frequency_penalty", 0.25), ("top_k", 7)):
            if chance.random() < 0.04:
                params[name] = value
        for name, value in (("top_p", 0.75), ("min_p", 0.125)):
            if chance.random() < 0.04:
                params[name] = value
        if chance.random() < 0.06:
            params["logit_bias"] = {str(chance.randrange(VOCABULARY)): 1.5}
        if chance.random() < 0.06:
            params["allowed_token_ids"] = sorted(chance.sample(range(2, 40), 5))
        if chance.random() < 0.1:
            params["repetition_detection"] = {
                "max_pattern_size": chance.randint(2, 3),
                "min_pattern_size": chance.choice((0, 0, 2)),
                "min_count": chance.randint(2, 4),
            }
        if chance.random() < 0.1:
            params["skip_reading_prefix_cache"] = True
        if chance.random() < setting["grammars"]:
            params["structured_outputs"] = {"regex": f"toy{chance.randrange(10**6)}"}
            if chance.random() < 0.25:
                params["structured_outputs"]["begin_after"] = chance.choice("aab")
        return params
