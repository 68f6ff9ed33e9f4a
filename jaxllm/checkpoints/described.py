"""Read a model's description: decoder, family and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.checkpoints.checkpoint import INDEX, SINGLE, open_tensors
from jaxllm.checkpoints.files import read_object
from jaxllm.checkpoints.pooler_files import most_tokens, read_pooler
from jaxllm.checkpoints.stored_head import with_stored_head
from jaxllm.checkpoints.weights import read_config
from jaxllm.errors import UserError
from jaxllm.families.families import read_encoder, read_images, read_spec
from jaxllm.families.family import Encoder, Family, Images
from jaxllm.families.seq2seq_families import LOGIT_BIAS
from jaxllm.media.patches import PatchProcessor, video_processor
from jaxllm.media.processor import Processor
from jaxllm.media.videos import OWN
from jaxllm.model.head import Head
from jaxllm.model.patch_vision import PatchVisionSpec
from jaxllm.model.spec import Spec


@dataclass(frozen=True)
class Described:
    """A model's description."""

    folder: Path
    config: Mapping[str, Any]  # config.json
    spec: Spec
    family: Family
    head: Head | None  # None: it generates
    images: Images | None = None
    processor: Processor | None = None
    encoder: Encoder | None = None

    @property
    def most_tokens(self) -> int:
        longest = self.spec.max_position
        return longest if self.head is None else min(longest, most_tokens(self.folder) or longest)


def describe(
    folder: Path,
    max_model_len: int | None = None,
    runner: str = "auto",
    pooler_config: Mapping[str, Any] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    most_videos: int = 0,
) -> Described:
    """Read a model's config and pooler; the arguments after the folder are fields of `EngineConfig`."""
    config = read_config(folder)
    spec, family = read_spec(config, max_model_len)
    spec = with_stored_head(folder, spec, family)
    head = read_pooler(folder, config, spec, family, runner, pooler_config)
    images = read_images(config, spec, family)
    if images is None and mm_processor_kwargs:
        raise UserError(
            "mm_processor_kwargs is for models that read images or sound; leave it out.", "mm_processor_kwargs"
        )
    processor = None if images is None else _processor(folder, images, mm_processor_kwargs or {}, most_videos)
    if images is not None and video_processor(processor) is not None:
        assert isinstance(images.spec, PatchVisionSpec)
        images = images._replace(spec=replace(images.spec, reads_videos=True))
    encoder = read_encoder(config, family)
    if encoder is not None:
        _check_logit_bias(folder, family)
    return Described(folder, config, spec, family, head, images, processor, encoder)


def _check_logit_bias(folder: Path, family: Family) -> None:
    """Raise UserError for a nonzero bias of logits, which no published model has."""
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        return
    for name, tensor in open_tensors(folder).items():
        if family.usual(name) == LOGIT_BIAS and tensor.values().any():
            raise UserError(f"{tensor.file.name}: {name} is not zero, which is not supported.", "model")


def _processor(folder: Path, images: Images, replaced: Mapping[str, Any], most_videos: int) -> Processor:
    settings = read_object(folder, "preprocessor_config.json")
    if settings is None:  # of transformers 5
        settings = (read_object(folder, "processor_config.json") or {}).get(images.section)
    if not isinstance(settings, Mapping):
        raise UserError(f"{folder} has no preprocessor_config.json, which describes the preprocessing.", "model")
    if images.videos is None or not most_videos:
        return images.processor({**settings, **replaced})
    processor = images.processor({**settings, **{key: replaced[key] for key in replaced.keys() - OWN}})
    of_videos = (read_object(folder, "processor_config.json") or {}).get("video_processor")
    of_videos = of_videos or read_object(folder, "video_preprocessor_config.json") or settings  # transformers' order
    if not isinstance(of_videos, Mapping):
        raise UserError(f"{folder}: video_processor of processor_config.json must be an object.", "model")
    assert isinstance(processor, PatchProcessor)
    return replace(processor, videos=images.videos({**of_videos, **replaced}))
