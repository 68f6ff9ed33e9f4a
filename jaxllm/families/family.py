"""A row of the families table: a config.json reader and tensor names, by default Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxllm.families.config_fields import Fields
from jaxllm.families.stored_formats import StoredFormat
from jaxllm.media.processor import Processor
from jaxllm.media.videos import VideoProcessor
from jaxllm.model.head import Head
from jaxllm.model.spec import Spec
from jaxllm.model.tower import Tower

HeadReader = Callable[[Fields, int, int], Head]  # (config.json, the model's width, number of labels)


def named(stems: Mapping[str, str]) -> dict[str, str]:
    weights = {part: f"{stem}.weight" for part, stem in stems.items()}
    return weights | {f"{part}_bias": f"{stem}.bias" for part, stem in stems.items()}


# Names of a weight's parts (see decoder.declare), after the prefix. {} is the layer, a second {} the expert or head.
LLAMA_TENSORS = named(
    {
        "embed": "embed_tokens",
        "final_norm": "norm",
        "head": "lm_head",
        "attn_norm": "layers.{}.input_layernorm",
        "q": "layers.{}.self_attn.q_proj",
        "k": "layers.{}.self_attn.k_proj",
        "v": "layers.{}.self_attn.v_proj",
        "out": "layers.{}.self_attn.o_proj",
        "q_norm": "layers.{}.self_attn.q_norm",
        "k_norm": "layers.{}.self_attn.k_norm",
        "mlp_norm": "layers.{}.post_attention_layernorm",
        "gate": "layers.{}.mlp.gate_proj",
        "up": "layers.{}.mlp.up_proj",
        "down": "layers.{}.mlp.down_proj",
        "router": "layers.{}.mlp.gate",
        "expert_gate": "layers.{}.mlp.experts.{}.gate_proj",
        "expert_up": "layers.{}.mlp.experts.{}.up_proj",
        "expert_down": "layers.{}.mlp.experts.{}.down_proj",
        "shared_gate": "layers.{}.mlp.shared_expert.gate_proj",
        "shared_up": "layers.{}.mlp.shared_expert.up_proj",
        "shared_down": "layers.{}.mlp.shared_expert.down_proj",
        "shared_weight": "layers.{}.mlp.shared_expert_gate",
    }
)


class Images(NamedTuple):
    """How a model reads images or sounds."""

    spec: Tower
    placeholder: int  # token id
    tensors: Family  # names of the tower's tensors
    processor: Callable[[Mapping[str, Any]], Processor]
    is_bidirectional: bool = False  # the tokens of an image attend to each other
    section: str = "image_processor"  # of processor_config.json
    videos: Callable[[Mapping[str, Any]], VideoProcessor] | None = None


class Encoder(NamedTuple):
    """The encoder of an encoder-decoder model; the embedding is the decoder's."""

    spec: Spec
    tensors: Family
    num_mels: int = 0  # of a spectrogram; 0: it reads tokens


@dataclass(frozen=True)
class Family:
    """A row of the table.

    `prefix` is optional in tensor names. Parts with the same tensor are stored in it consecutively, `alternating` ones
    by row or by head, `transposed` ones as [in, out]. A part of an expert or head without a second {} is in a tensor of
    all of them. Unread tensors end with `ignored`, begin with `heads` or, with `has_layers_behind`, are in layers after
    the last. `head` is that of classifiers, None for those of decoders; `stored` is config.json's quantization.

    With images or sound `text_of` returns the fields of the decoder and their reader, and `images` reads the tower for
    the decoder's width and vocabulary. `renamed` are prefixes of tensor names, and their replacements.
    """

    architectures: tuple[str, ...]
    read: Callable[[Fields], Spec] | None  # None: `text_of` chooses it
    tensors: Mapping[str, str] = field(default_factory=lambda: LLAMA_TENSORS)
    prefix: str = "model."
    transposed: frozenset[str] = frozenset()
    alternating: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    has_layers_behind: bool = False
    heads: tuple[str, ...] = ()
    head: HeadReader | None = None
    stored: StoredFormat | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    text_of: Callable[[Fields], tuple[Fields, Callable[[Fields], Spec]]] | None = None
    images: Callable[[Fields, int, int], Images] | None = None
    encoder: Callable[[Fields], Encoder] | None = None
    of_spec: Callable[[Spec], Family] | None = None  # if names of tensors depend on the Spec

    def usual(self, name: str) -> str:
        """Return a tensor's name as in `tensors`, without the optional prefix."""
        for before, after in self.renamed:
            if name.startswith(before):
                return after + name[len(before) :]
        return name.removeprefix(self.prefix)
