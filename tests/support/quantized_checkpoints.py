"""Quantized checkpoints of random models, as each format's library packs them, and the same models dequantized.

Written from the formats' published packers with loops over nibbles, without product code: compressed- tensors'
`pack_to_int32`, AutoGPTQ's `QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM.from_linear`, DeepSeek-V3's `weight_dequant`,
transformers' `convert_moe_packed_tensors`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.support.checkpoints import random_tensors

Tensors = dict[str, np.ndarray]
F8 = ml_dtypes.float8_e4m3fn
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _words(numbers: np.ndarray, bits: int, order: Any = None) -> np.ndarray:
    """Pack unsigned numbers along the last axis into 32-bit words, padded with zeros."""
    each = 32 // bits
    padded = np.pad(numbers.astype(np.uint32), [(0, 0), (0, -numbers.shape[1] % each)])
    words = np.zeros((len(numbers), padded.shape[1] // each), np.uint32)
    for place in range(each):
        words |= padded[:, (order or range(each))[place] :: each] << np.uint32(bits * place)
    return words.view(np.int32)


def _grid(rng: Any, shape: tuple[int, ...], group: int | None, bits: int, has_zeros: bool) -> tuple[Any, ...]:
    """Draw unsigned numbers [O, D], scales [O, G] in float16, zeros [O, G], and the values that they encode [O, D]."""
    rows, columns = shape
    size = group or columns
    numbers = rng.integers(0, 2**bits, shape)
    scales = (rng.uniform(0.2, 1.0, (rows, columns // size)) * 0.4 / 2 ** (bits - 1)).astype(np.float16)
    middle = 2 ** (bits - 1)
    zeros = rng.integers(middle - 3, middle + 4, scales.shape) if has_zeros else np.full(scales.shape, middle)
    spread = np.repeat(np.arange(columns // size), size)
    exact = (numbers - zeros[:, spread]).astype(np.float32) * scales.astype(np.float32)[:, spread]
    return numbers, scales, zeros, exact


def _compressed(form: str, bits: int, group: int | None, symmetric: bool, strategy: str, kind: str = "int") -> Any:
    def write(name: str, shape: tuple[int, ...], rng: Any) -> tuple[Tensors, np.ndarray]:
        scale = f"{name}_scale"
        if kind == "float":
            values, factors, exact = _float8(rng, shape, strategy)
            extra = {name.replace("weight", "input_scale"): np.ones(1, np.float32)}
            return {name: values, scale: factors} | extra, exact
        numbers, scales, zeros, exact = _grid(rng, shape, group, bits, not symmetric)
        middle = 2 ** (bits - 1)
        signed = zeros - middle
        if form == "pack-quantized":
            tensors = {f"{name}_packed": _words(numbers, bits), f"{name}_shape": np.asarray(shape, np.int64)}
            packed_zeros = np.ascontiguousarray(_words(zeros.T, bits).T)
        else:
            tensors, packed_zeros = {name: (numbers - middle).astype(np.int8)}, signed.astype(np.int8)
        zero = {} if symmetric else {f"{name}_zero_point": packed_zeros}
        return tensors | {scale: scales} | zero, exact

    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": group}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}}
    return write, config | {"config_groups": groups, "ignore": ["lm_head", "re:.*mlp.gate$"]}


def _float8(rng: Any, shape: tuple[int, ...], strategy: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = rng.standard_normal(shape, np.float32).astype(F8)
    scales = rng.uniform(0.1, 0.3, (shape[0], 1) if strategy == "channel" else (1,)).astype(np.float32)
    return values, scales, values.astype(np.float32) * scales


def _blocks(name: str, shape: tuple[int, ...], rng: Any) -> tuple[Tensors, np.ndarray]:
    rows, columns = shape
    values = rng.standard_normal(shape, np.float32).astype(F8)
    scales = rng.uniform(0.1, 0.3, (-(-rows // 16), -(-columns // 16))).astype(np.float32)
    spread = np.kron(scales, np.ones((16, 16), np.float32))[:rows, :columns]
    return {name: values, f"{name}_scale_inv": scales}, values.astype(np.float32) * spread


def _gptq(bits: int, group: int, sym: bool, version: str) -> Any:
    def write(name: str, shape: tuple[int, ...], rng: Any) -> tuple[Tensors, np.ndarray]:
        stem = name.removesuffix("weight")
        numbers, scales, zeros, exact = _grid(rng, shape, None if group == -1 else group, bits, not sym)
        size = shape[1] if group == -1 else group
        return {
            f"{stem}qweight": np.ascontiguousarray(_words(numbers, bits).T),
            f"{stem}qzeros": _words(zeros.T - (version == "gptq"), bits),
            f"{stem}scales": np.ascontiguousarray(scales.T),
            f"{stem}g_idx": (np.arange(shape[1]) // size).astype(np.int32),
        }, exact

    own = {"bits": bits, "group_size": group, "sym": sym, "desc_act": False, "checkpoint_format": version}
    return write, {"quant_method": "gptq"} | own


def _awq(name: str, shape: tuple[int, ...], rng: Any) -> tuple[Tensors, np.ndarray]:
    stem = name.removesuffix("weight")
    numbers, scales, zeros, exact = _grid(rng, shape, 16, 4, True)
    return {
        f"{stem}qweight": _words(numbers.T, 4, _AWQ_ORDER),
        f"{stem}qzeros": _words(zeros.T, 4, _AWQ_ORDER),
        f"{stem}scales": np.ascontiguousarray(scales.T),
    }, exact


# By name: the function that packs a matrix, and its quantization_config.
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "w4a16": _compressed("pack-quantized", 4, 16, True, "group"),
    "w4a16-asymmetric": _compressed("pack-quantized", 4, 16, False, "group"),
    "w8a16": _compressed("pack-quantized", 8, None, True, "channel"),
    "w8a16-asymmetric": _compressed("pack-quantized", 8, 32, False, "group"),
    "w8a8": _compressed("int-quantized", 8, None, True, "channel"),
    "naive-int4": _compressed("naive-quantized", 4, 16, False, "group"),
    "fp8-dynamic": _compressed("float-quantized", 8, None, True, "channel", "float"),
    "fp8-static": _compressed("float-quantized", 8, None, True, "tensor", "float"),
    "fp8-blocks": (_blocks, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}),
    "gptq": _gptq(4, 16, True, "gptq"),
    "gptq-asymmetric": _gptq(4, 16, False, "gptq"),
    "gptq-v2": _gptq(4, -1, False, "gptq_v2"),
    "gptq-8": _gptq(8, 32, False, "gptq"),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}),
}


def quantized_model(name: str, config: dict[str, Any], seed: int = 0) -> tuple[dict[str, Any], Tensors, Tensors]:
    """Draw a model in a format: its config.json, its tensors, and the same tensors in float32."""
    write, quantization = FORMATS[name]
    rng = np.random.default_rng(seed)
    stored: Tensors = {}
    plain: Tensors = {}
    for tensor, values in random_tensors(config, seed).items():
        is_product = values.ndim == 2 and "_proj" in tensor
        if tensor.endswith("kv_b_proj.weight"):  # keys and values of all heads; random_tensors draws one head
            each = config["qk_nope_head_dim"] + config["v_head_dim"]
            values = np.zeros((config["num_attention_heads"] * each, config["kv_lora_rank"]), np.float32)
        if is_product:
            own, plain[tensor] = write(tensor, values.shape, rng)
            stored |= own
        else:
            stored[tensor] = plain[tensor] = values
    return config | {"quantization_config": quantization}, stored, plain


def mxfp4_model(config: dict[str, Any], tensors: Tensors, seed: int = 0) -> tuple[dict[str, Any], Tensors, Tensors]:
    """Give GPT-OSS's experts new values in MXFP4; return them in MXFP4 and in float32."""
    rng, stored, plain = np.random.default_rng(seed), {}, {}
    for name, values in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or values.ndim != 3:
            stored[name] = plain[name] = values
            continue
        experts, columns, rows = values.shape  # [E, in, out]
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
        exponents = rng.integers(121, 125, blocks.shape[:3]).astype(np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        table = np.asarray(_E2M1, np.float32)
        exact = np.stack([table[blocks & 15], table[blocks >> 4]], axis=-1).reshape(experts, rows, columns // 32, 32)
        exact = exact * np.exp2(exponents.astype(np.float32) - 127)[..., None]
        plain[name] = np.ascontiguousarray(exact.reshape(experts, rows, columns).swapaxes(1, 2))
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return config | {"quantization_config": quantization}, stored, plain


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write a checkpoint, possibly with 8-bit tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder
