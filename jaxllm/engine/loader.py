"""Loads the parts of an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.compiling.startup_timing import Phase, Phases, describe
from jaxllm.config import EngineConfig
from jaxllm.engine.features.table import FEATURES, Factory
from jaxllm.engine.language import Language
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.source_prompts import SourcePrompts
from jaxllm.errors import UserError
from jaxllm.media.sound import LogMel
from jaxllm.metrics import Metrics
from jaxllm.runner.model_runner import Runner
from jaxllm.runner.ranks import RankedRunner
from jaxllm.runner.runners import RUNNERS
from jaxllm.sampling_params import default_sampling_params
from jaxllm.setup.model_setup import prepare
from jaxllm.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of an engine."""

    model: ModelInfo
    runner: Runner
    language: Language  # of requests without an adapter
    features: Mapping[str, Factory] = field(default_factory=lambda: FEATURES)
    clock: Callable[[], float] = time.monotonic  # seconds
    start_phases: tuple[Phase, ...] = ()


def load_parts(
    config: EngineConfig, progress: bool, metrics: Metrics, runners: Mapping[type, Callable[..., Runner]] = RUNNERS
) -> Parts:
    """Load a model onto its devices; raise UserError for an invalid model before slow phases.

    `runners` by the type of head.
    """
    phases = Phases()
    with phases.phase("setup") as causes:
        setup = prepare(config)
        causes.append(f"config.json, {len(setup.devices)} × {setup.devices[0].device_kind}")
    with phases.phase("tokenizer"):
        source = config.tokenizer or setup.folder
        tokenizer = NoTokenizer(str(source)) if config.skip_tokenizer_init else load_tokenizer(source)
    if setup.head is not None and setup.head.reads_last:
        tokenizer.obey_add_eos_token()
    eos_ids = eos_ids_of(tokenizer, setup.generation_config, setup.spec.vocab_size)
    default_params = default_sampling_params(setup.generation_config)
    runner_type = RankedRunner if config.shares_experts else runners[type(setup.head)]
    runner = runner_type(config, setup, metrics, progress, phases=phases)
    start_phases = phases.finished()
    logging.getLogger(__name__).info("%s", describe(start_phases))
    geometry = runner.geometry
    model = ModelInfo(
        tokenizer=tokenizer,
        generation_config=setup.generation_config,
        default_params=default_params,
        eos_ids=eos_ids,
        vocab_size=setup.spec.vocab_size,
        max_model_len=geometry.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        block_size=geometry.block_size,
        num_kv_blocks=geometry.num_blocks,
        dtype=setup.dtype.name,
        device_kind=setup.devices[0].device_kind,
        pooler=setup.head,
        pooled_size=0 if setup.head is None else setup.head.size(setup.spec.width),
        num_token_types=setup.spec.token_types,
        processor=setup.processor,
        sources=None
        if setup.encoder is None
        else SourcePrompts(
            tokenizer=tokenizer,
            vocab_size=setup.spec.vocab_size,
            longest=setup.max_source,
            start=setup.decoder_start,
            sound=None
            if not setup.encoder.num_mels
            else LogMel(num_mels=setup.encoder.num_mels, num_frames=2 * setup.max_source),
        ),
    )
    return Parts(model=model, runner=runner, language=Language.of(model), start_phases=start_phases)


def eos_ids_of(model_tokenizer: Tokenizer, generation_config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the end tokens of the tokenizer and of generation_config.json; raise UserError for others than ids.

    Omits ids beyond the vocabulary, which derived models often keep.
    """
    named = generation_config.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise UserError(
            f"eos_token_id of the model is {named!r:.80}; it must be a token id, or a list of them.", "model"
        )
    own = model_tokenizer.eos_token_id
    return frozenset(token for token in (own, *ids) if token is not None and token < vocab_size)
