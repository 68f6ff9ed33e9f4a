"""Unsupported combinations, for checks, error messages and docs/limits.md."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jaxllm.errors import UserError

# Properties that are not single settings.
POOLS = "a model that pools"
WHOLE_PROMPTS = "a model that reads whole prompts"
LATENT = "latent attention"
EXPERTS = "experts"
NO_EXPERTS = "a model without experts"
NO_END = "a model without an end-of-sequence token"
FLEET = "data_parallel_size above 1"
RANKS = "enable_expert_parallel over data_parallel_size"
REMOTE = "replicas on other machines"
HOSTS = "num_hosts above 1"
IMAGES = "a model with images or sound"
ANY_SIZE = "a model with images of any size"
WHOLE_IMAGES = "a model with attention in both directions within images"
SEQ2SEQ = "an encoder-decoder model"
MANY_GPUS = "tensor_parallel_size above 2 on GPUs"


class Refused(NamedTuple):
    """An unsupported combination."""

    asked: str  # a setting or request parameter, which errors name
    other: str  # a setting or property
    why: str


REFUSED = (
    Refused("speculative_config", POOLS, "drafts are for models that generate"),
    Refused("enable_lora", POOLS, "adapters are for models that generate"),
    Refused("enable_lora", LATENT, "adapters are for attention with separate heads"),
    Refused("kv_offloading_size", POOLS, "prompts are read once"),
    Refused("kv_transfer_config", POOLS, "no token follows a prompt"),
    Refused("deterministic", POOLS, "the mode is for models that generate"),
    Refused("deterministic", MANY_GPUS, "the order of a sum then depends on where in the batch a token is"),
    Refused("enable_expert_parallel", NO_EXPERTS, "it divides experts"),
    Refused("pipeline_parallel_size", POOLS, "only steps that generate are divided into stages"),
    Refused("pipeline_parallel_size", "kv_transfer_config", "a stage has the KV blocks of its layers only"),
    Refused("pipeline_parallel_size", ANY_SIZE, "its layers read more than the token's position"),
    Refused("pipeline_parallel_size", WHOLE_IMAGES, "a stage computes parts of an image one after the other"),
    Refused("deterministic", WHOLE_IMAGES, "each token attends by itself"),
    Refused("kv_cache_dtype", WHOLE_PROMPTS, "there is no cache"),
    Refused("quantization", EXPERTS, "they are not rounded when they are loaded"),
    Refused("quantization", LATENT, "it is not rounded when it is loaded"),
    Refused("enable_lora", FLEET, "no replica reads adapters"),
    Refused("lora_request", FLEET, "no replica reads adapters"),
    Refused("enable_kv_cache_events", FLEET, "each replica has a separate cache"),
    Refused("enable_sleep_mode", FLEET, "each replica has separate weights"),
    Refused("kv_transfer_config", FLEET, "prefill_replicas and decode_replicas choose each replica's role"),
    Refused("kv_transfer_params", FLEET, "the router chooses the engines of a prompt"),
    Refused("prefill_replicas", REMOTE, "KV blocks move within a machine; see kv_transfer_config for others"),
    Refused("record", FLEET, "each replica has a separate scheduler"),
    Refused("enable_lora", RANKS, "the ranks' schedulers would hold different adapters"),
    Refused("speculative_config", RANKS, "ranks verify in different steps, and a step is of all ranks"),
    Refused("pipeline_parallel_size", RANKS, "a step's experts are divided among all devices, not those of a stage"),
    Refused("kv_offloading_size", RANKS, "ranks would copy blocks at different times"),
    Refused("kv_transfer_config", RANKS, "a rank has the KV blocks of its requests only"),
    Refused("enable_sleep_mode", RANKS, "a rank cannot leave the others without its experts"),
    Refused("enable_kv_cache_events", RANKS, "each rank has a separate cache"),
    Refused("deterministic", RANKS, "experts compute the tokens of all ranks"),
    Refused(RANKS, POOLS, "ranks are for models that generate"),
    Refused("record", RANKS, "each rank has a separate scheduler"),
    Refused("data_parallel_address", RANKS, "the ranks are of one process"),
    Refused("data_parallel_size_local", RANKS, "the ranks are of one process"),
    Refused("enable_lora", HOSTS, "only host 0 reads adapters"),
    Refused("kv_offloading_size", HOSTS, "copies to the hosts' memory end at different times"),
    Refused("kv_transfer_config", HOSTS, "blocks arrive at one host only"),
    Refused("enable_sleep_mode", HOSTS, "only host 0 would change its weights"),
    Refused("speculative_config", HOSTS, "its draft models are not compared between hosts"),
    Refused("data_parallel_size", HOSTS, "a group of hosts is one engine"),
    Refused("record", HOSTS, "the calls go to the other hosts"),
    Refused("num_hosts", POOLS, "followers repeat steps that generate"),
    Refused("enable_sleep_mode", "kv_offloading_disk", "files are named after the first weights"),
    Refused("enable_sleep_mode", "kv_transfer_config", "KV blocks travel without the version of their weights"),
    Refused("beam_width", "speculative_config", "a search chooses among likeliest tokens, not drafts"),
    Refused("enable_sleep_mode", IMAGES, "the tower's weights stay on the device"),
    Refused("kv_transfer_config", IMAGES, "blocks are found by tokens, not by images or sound"),
    Refused("num_hosts", IMAGES, "followers get no images or sound"),
    Refused("beam_width", "multi_modal_data", "beams share the blocks of a prompt of tokens"),
    Refused("enable_lora", SEQ2SEQ, "their adapters have other names of modules"),
    Refused("pipeline_parallel_size", SEQ2SEQ, "its layers read the encoder's output"),
    Refused("speculative_config", SEQ2SEQ, "draft models have no encoder"),
    Refused("enable_sleep_mode", SEQ2SEQ, "the encoder's weights stay on the device"),
    Refused("kv_offloading_size", SEQ2SEQ, "an encoder's blocks are computed again, not copied"),
    Refused("kv_transfer_config", SEQ2SEQ, "an encoder's blocks stay in their engine"),
    Refused(
        "enable_kv_cache_events", SEQ2SEQ, "an encoder's blocks have no tokens to report; data_parallel_size sets it"
    ),
    Refused("quantization", SEQ2SEQ, "encoders are not rounded when they are loaded"),
    Refused("data_parallel_size", SEQ2SEQ, "prompts are sent to replicas for one model, not for two"),
    Refused("num_hosts", SEQ2SEQ, "followers get no encoder prompts"),
    Refused("truncate_prompt_tokens", SEQ2SEQ, "a request has two prompts; shorten them"),
    Refused("truncate_prompt_tokens", "multi_modal_data", "a part of an image, video or sound could be cut off"),
    Refused("multi_modal_data", FLEET, "prompts are sent to replicas as tokens"),
    Refused("stop", "skip_tokenizer_init", "a stop string needs the text; stop_token_ids does not"),
    Refused("structured_outputs", "skip_tokenizer_init", "a grammar needs the texts of tokens"),
    Refused("structured_outputs", NO_END, "nothing could end the output"),
)


def refusal(asked: str, other: str) -> UserError:
    (why,) = (one.why for one in REFUSED if (one.asked, one.other) == (asked, other))
    return UserError(f"{asked} is not supported with {other}: {why}. Leave one of them out.", asked.rpartition(" ")[2])


def check(asked: Collection[str], present: Collection[str]) -> None:
    for one in REFUSED:
        if one.asked in asked and one.other in present:
            raise refusal(one.asked, one.other)


def as_markdown() -> str:
    rows = (f"| `{one.asked}` | {_shown(one.other)} | {one.why} |" for one in REFUSED)
    return "\n".join(("| not supported | with | because |", "|---|---|---|", *rows)) + "\n"


def _shown(name: str) -> str:
    return f"`{name}`" if name.replace("_", "").isalpha() and "_" in name else name
