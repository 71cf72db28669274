# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "transformers==5.23.0",
#     "torch==2.11.0",
#     "numpy==2.4.6",
#     "safetensors==0.8.0",
# ]
# ///
"""Writes the golden fixtures: results of HF transformers, in f32 and eager mode, for tiny models with
weights from a hash.

    uv run tests/golden/generate.py [CASE ...]

Rust never runs this script; it reads `tests/data/golden/*.safetensors`. The weights are not stored: both
sides make them from the tensor's name, its index and the case's seed (`models/src/synth/values.rs`
has the twin of `values_of` below). Quantised weights are dequantised: HF gets w = q * scale in f32.

A fixture contains one random sequence of 150 tokens with the logits of every position, the hidden
states after each layer at the last 16 positions, and the experts chosen by each sparse layer; then,
for prompts made of the first 1, 2, 17, 65 and 150 tokens, 64 tokens of greedy decoding. Attention is
causal, so every shorter prompt is contained in the long one. For a model with an MTP module it also
contains the module's most likely draft token at each position, its logits at the last 48, and chains
of four draft tokens after some positions, each from the module's previous output.
An EAGLE-3 layer has its own fixture in `drafts/`, in addition to that of its target model: the same
data, and chains of four draft tokens after some positions, each from the layer's previous output.
Files in `pooling/` have the pooled hidden states of prompts, and the scores of a classification head.

Seeds are tried from 0 upwards until no decision is close: the two largest logits differ by 1e-3 at
every position, greedy steps included, and every router's scores by 1e-5 at its cut. Equality tests
on the other side are therefore exact, on any machine.

Running it again gives identical bytes on the same kind of CPU (torch picks its kernels by
instruction set; other kinds differ in the last bits of the logits).
"""

import fnmatch
import hashlib
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers
from safetensors.numpy import save_file

FOLDER = Path(__file__).resolve().parent.parent / "data" / "golden"
VOCAB = 272
TOKENS = 150
TAPS = 16
PROMPTS = [1, 2, 17, 65, 150]
STEPS = 64
DRAFTS = 48
CHAIN = 4
CHAINS = [1, 2, 16, 47, 149]
LOGIT_GAP = 1e-3
ROUTER_GAP = 1e-5
FILE_LIMIT = 256 * 1024


# The hash -------------------------------------------------------------------------------------

U64 = 0xFFFF_FFFF_FFFF_FFFF
GAMMA = 0x9E37_79B9_7F4A_7C15


def fnv1a64(name: str) -> int:
    h = 0xCBF2_9CE4_8422_2325
    for byte in name.encode():
        h = ((h ^ byte) * 0x0100_0000_01B3) & U64
    return h


def mix(z: np.ndarray) -> np.ndarray:
    z = z ^ (z >> np.uint64(30))
    z = z * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = z ^ (z >> np.uint64(27))
    z = z * np.uint64(0x94D0_49BB_1331_11EB)
    return z ^ (z >> np.uint64(31))


def words(name: str, seed: int, count: int) -> np.ndarray:
    key = mix(np.array([fnv1a64(name) ^ seed], dtype=np.uint64))[0]
    index = np.arange(1, count + 1, dtype=np.uint64)
    return mix(key + index * np.uint64(GAMMA))


def values_of(name: str, seed: int, shape: tuple[int, ...], zero_centred: bool = False) -> np.ndarray:
    """The weight `name`, computed from the hash by the rule for its kind of tensor. `zero_centred`: the model adds
    1 to the weights of norms."""
    u = words(name, seed, math.prod(shape))
    is_norm = name.endswith(("norm.weight", "layernorm.weight", "layernorm_1.weight", "layernorm_2.weight"))
    is_factor = name.endswith(("layer_scalar", "router.scale", "per_expert_scale"))
    if is_norm or is_factor or name.startswith("fc_norm."):
        flat = (0.0 if zero_centred else 1.0) + ((u >> np.uint64(60)).astype(np.float32) - 8.0) / 128.0
    else:
        x = (2.0 * (u >> np.uint64(57)).astype(np.float32) - 127.0) / 128.0
        flat = x * np.float32(2.0 ** exponent(name, shape))
    return flat.astype(np.float32).reshape(shape)


def quantised(name: str, seed: int, shape: tuple[int, ...], quantization: dict) -> np.ndarray:
    """The fp8 weight `name` times its scales; computes the same as `Values::Scale` and `Generator::e4m3` in Rust."""
    u = words(name, seed, math.prod(shape))
    x = (2.0 * (u >> np.uint64(57)).astype(np.float32) - 127.0) / 128.0
    rounded = torch.from_numpy(x.astype(np.float32)).to(torch.float8_e4m3fn).to(torch.float32)
    suffix = "_scale_inv" if quantization["quant_method"] == "fp8" else "_scale"
    each = scale_block(quantization, name.removesuffix(".weight"), shape)
    grid = [-(-n // e) for n, e in zip(shape, each)]
    u = words(name + suffix, seed, math.prod(grid)) >> np.uint64(62)
    scales = np.float32(2.0 ** (exponent(name, shape) - 1)) * (np.uint64(1) << u).astype(np.float32)
    for axis, e in enumerate(each):
        scales = scales.reshape(grid) if axis == 0 else scales
        scales = scales.repeat(e, axis)
    return rounded.numpy().reshape(shape) * scales[: shape[0], : shape[1]]


def scale_block(quantization: dict, module: str, shape: tuple[int, ...]) -> list[int]:
    """Rows and columns of the weight of `module` that share a scale."""
    strategy = "tensor"
    if quantization["quant_method"] == "compressed-tensors":
        groups = list(quantization["config_groups"].values())
        named = [g for g in groups if any(t.startswith("re:") and re.match(t[3:], module) for t in g["targets"])]
        linear = [g for g in groups if "Linear" in g["targets"]]
        strategy = (named + linear)[0]["weights"]["strategy"]
    if block := quantization.get("weight_block_size"):
        return block
    return list(shape) if strategy == "tensor" else [1, shape[1]]


def mxfp4(name: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """The MXFP4 weight `name` times its scales; computes the same as `mxfp4_generators` in Rust."""
    elements = words(name, seed, math.prod(shape)) >> np.uint64(60)
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
    signed = np.concatenate([values, -values])[elements].reshape(shape)
    u = words(name + "_scale", seed, math.prod(shape) // 32) >> np.uint64(62)
    scales = np.float32(2.0 ** (exponent(name, shape) - 4)) * (np.uint64(1) << u).astype(np.float32)
    return signed * scales.reshape(shape[0], -1).repeat(32, 1)


def exponent(name: str, shape: tuple[int, ...]) -> int:
    if name.endswith(".sinks"):
        return 1
    if name.endswith((".A_log", ".conv1d.weight")):
        return 0
    if name.endswith((".bias", "_bias")):
        return -4
    if name.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight")):
        return 0
    e = 1
    while 4.0**e * shape[-1] > 6.0:
        e -= 1
    return e + 2 if name.endswith("mlp.gate.weight") else e


def check_vectors() -> None:
    def first(name: str, seed: int, i: int) -> tuple[int, float]:
        u = words(name, seed, i + 1)[i]
        return int(u), (2.0 * float(u >> np.uint64(57)) - 127.0) / 128.0

    embed, q = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
    assert fnv1a64(embed) == 0xA88F_D795_D5C6_D156
    assert first(embed, 0, 0) == (0x14C5_AE35_E159_AEE3, -0.8359375)
    assert first(embed, 0, 1) == (0x6D6A_6DC5_DEF1_B6D4, -0.1484375)
    assert first(q, 0, 1_000_000) == (0x7190_5EB6_BA06_FC5B, -0.1171875)
    assert first("lm_head.weight", 7, 0) == (0x3514_6076_CF07_D6C9, -0.5859375)


# The cases ------------------------------------------------------------------------------------


def config(architecture: str, heads: int, kv_heads: int, head_dim: int, **more) -> dict:
    return {
        "architectures": [architecture],
        "model_type": {
            "LlamaForCausalLM": "llama",
            "MistralForCausalLM": "mistral",
            "MixtralForCausalLM": "mixtral",
            "Phi3ForCausalLM": "phi3",
            "Qwen2ForCausalLM": "qwen2",
            "Qwen3ForCausalLM": "qwen3",
            "Qwen3MoeForCausalLM": "qwen3_moe",
            "Qwen2MoeForCausalLM": "qwen2_moe",
            "GraniteForCausalLM": "granite",
            "GraniteMoeHybridForCausalLM": "granitemoehybrid",
            "Ministral3ForCausalLM": "ministral3",
            "Olmo2ForCausalLM": "olmo2",
            "Olmo3ForCausalLM": "olmo3",
            "SmolLM3ForCausalLM": "smollm3",
            "SeedOssForCausalLM": "seed_oss",
            "Ernie4_5ForCausalLM": "ernie4_5",
            "GlmForCausalLM": "glm",
            "Glm4ForCausalLM": "glm4",
            "DeepseekV2ForCausalLM": "deepseek_v2",
            "DeepseekV3ForCausalLM": "deepseek_v3",
            "Gemma3ForCausalLM": "gemma3_text",
            "Gemma4ForCausalLM": "gemma4_text",
            "GptOssForCausalLM": "gpt_oss",
            "Qwen3NextForCausalLM": "qwen3_next",
            "Qwen3_5ForCausalLM": "qwen3_5_text",
            "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
        }[architecture],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 96,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 271,
        "dtype": "float32",
    } | more


def deepseek(architecture: str, **more) -> dict:
    """MLA with four heads: keys and values are computed from the compressed KV."""
    case = config(architecture, 4, 4, 0, **({"num_nextn_predict_layers": 0} | more))
    del case["head_dim"]
    return case


def phi3(heads: int, kv_heads: int, **more) -> dict:
    case = config("Phi3ForCausalLM", heads, kv_heads, 0, **({"pad_token_id": None} | more))
    del case["head_dim"]
    return case


def gemma3(heads: int, kv_heads: int, head_dim: int, **more) -> dict:
    case = config("Gemma3ForCausalLM", heads, kv_heads, head_dim, hidden_activation="gelu_pytorch_tanh", **more)
    del case["hidden_act"]
    if "rope_parameters" in case:
        del case["rope_theta"]
    return case


def gemma4(heads: int, kv_heads: int, head_dim: int, **more) -> dict:
    case = config("Gemma4ForCausalLM", heads, kv_heads, head_dim, hidden_activation="gelu_pytorch_tanh", **(GEMMA4 | more))
    del case["hidden_act"], case["rope_theta"]
    return case


def multimodal(architecture: str, model_type: str, text: dict, **more) -> dict:
    """A model with a small vision encoder, of which the reference uses the text part only."""
    small = {"hidden_size": 32, "image_size": 28, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision = {
        "mistral3": small | {"model_type": "pixtral"},
        "gemma3": small | {"model_type": "siglip_vision_model", "patch_size": 14},
        "gemma4": None,
        "gemma4_unified": None,
    }.get(model_type, {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64})
    kept = {k: v for k, v in text.items() if k != "architectures"}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": kept,
        "vision_config": vision,
        "dtype": "float32",
        "tie_word_embeddings": text["tie_word_embeddings"],
    } | more


def text_part(case: dict) -> dict:
    """Fields of the language model."""
    return case.get("text_config", case)


def llama3(factor: float, original: int) -> dict:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
STEP2 = {
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
# Whole blocks of 128 on each of two and of four ranks.
WHOLE_BLOCKS = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 512}
# Sizes that are no multiple of the 128 block size, and stacked projections that start inside a block.
UNEVEN = {"hidden_size": 192, "intermediate_size": 320}
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*layers\\.2\\.mlp.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": FLOAT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": FLOAT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
# One scale per weight, and a static scale of activations, in the formats of three tools.
TENSORS = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.layers.1.self_attn.o_proj"],
    "kv_cache_scheme": "static",
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head", "*layers.2.self_attn*"],
    "producer": {"name": "modelopt", "version": "0.33.0"},
}
# Two groups with formats of their own: the second one names its layers.
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head", "re:.*layers\\.3\\.self_attn.*"],
    "config_groups": {
        "group_0": CHANNELS["config_groups"]["group_0"] | {"format": "float-quantized"},
        "group_1": {
            "format": "naive-quantized",
            "targets": ["re:.*(down|o)_proj$"],
            "weights": FLOAT8 | {"strategy": "tensor", "dynamic": False},
            "input_activations": FLOAT8 | {"strategy": "tensor", "dynamic": False},
        },
    },
}
# MLA sizes: qk_nope_head_dim 16, qk_rope_head_dim 8, compressed KV of 32.
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GREEDY = {"topk_method": "greedy", "norm_topk_prob": False, "n_shared_experts": 2}
LIMITED = {
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 4.0,
}
SIGMOID = {
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Mixtral: every layer has experts.
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
MROPE = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [8, 4, 4]}
# Phi-4-mini: 12 of 16 channels rotate.
LONGROPE = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.0, 1.0, 1.125, 1.25, 1.5],
        "long_factor": [1.0, 1.125, 1.5, 2.5, 6.0, 14.0],
    },
}
# Ministral 3: the temperature of queries changes every 32 positions.
TEMPERATURE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.25,
}
# Granite 4 without experts and Mamba layers.
GRANITE4 = {
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["attention"] * 4,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 1.5,
}
OLMO = {"pad_token_id": None}
# Gemma 3: every second layer attends to the whole context, with a RoPE of its own. √96 is not exact.
GEMMA3 = {
    "hidden_size": 96,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 168,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "final_logit_softcapping": 30.0,
}
# The same settings in the new form, in one layer type after another.
GEMMA3_TEXT = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 256,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# Gemma 4: layers with a window have four KV heads of 16 channels, or in the last case two of 256.
GEMMA4 = {
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# The layers without a window have one KV head, whose values are its keys.
GEMMA4_DENSE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0}
GEMMA4_MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size": 96,
}
# Inputs per layer; the last three layers read the keys and values of earlier layers, and have wider MLPs.
GEMMA4_INPUTS = {
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "attention_k_eq_v": False,
}
GEMMA4_WIDE = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 512,
    "sliding_window": 40,
    "final_logit_softcapping": 5.0,
}
# gpt-oss: every second layer, from the first on, has a window; every layer has experts.
GPT_OSS = {
    "intermediate_size": 160,  # Four ranks divide a group of 32 inputs.
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 8,
    "pad_token_id": None,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
NEW_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}

# Models that add 1 to the weights of norms; norms within gated delta nets are not zero-centred.
ZERO_CENTRED = ("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Qwen3-Next: every fourth layer has attention; two value heads share a key head.
QWEN3_NEXT = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "shared_expert_intermediate_size": 48,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}
# Qwen3.5: listed layers, one value head per key head, and a convolution of three tokens.
QWEN3_5 = {
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
    },
}
QWEN3_5_MOE = {
    "num_hidden_layers": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["full_attention", "linear_attention"],
}
QWEN3_5_MOE_MTP = {
    "layer_types": ["linear_attention", "full_attention"],
    "mtp_num_hidden_layers": 1,
    "rope_parameters": QWEN3_5["rope_parameters"] | {"partial_rotary_factor": 0.25},
}
# As in published FP8 checkpoints, projections of gated delta nets are quantised, except those of their gates.
QWEN3_5_FP8 = QWEN3_5_MOE | {
    "hidden_size": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "quantization_config": BLOCKS
    | {
        "modules_to_not_convert": ["lm_head"]
        + [
            f"model.layers.{i}.{module}"
            for i in range(2)
            for module in ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d", "mlp.gate", "mlp.shared_expert_gate")
        ]
    },
}

# As in published FP8 checkpoints: heads and experts are whole scale blocks, the gates of gated delta nets, the routers and the
# `fc` of the MTP module are not quantised. Rows of a key head: 128 of q, 128 of k, 256 of v and 256 of z.
QWEN3_NEXT_FP8 = QWEN3_NEXT | {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "full_attention_interval": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "mtp_num_hidden_layers": 1,
    "quantization_config": BLOCKS
    | {
        "modules_to_not_convert": ["lm_head", "model.layers.0.linear_attn.conv1d", "model.layers.0.linear_attn.in_proj_ba", "mtp.fc"]
        + [f"{layer}.mlp.{gate}" for layer in ("model.layers.0", "model.layers.1", "mtp.layers.0") for gate in ("gate", "shared_expert_gate")]
    },
}

CASES = {
    "llama-untied": config("LlamaForCausalLM", 4, 2, 16, rms_norm_eps=1e-5),
    "llama-tied-llama3": config(
        "LlamaForCausalLM", 4, 1, 16, tie_word_embeddings=True, rope_scaling=llama3(8.0, 64)
    ),
    "llama-linear-biases": config(
        "LlamaForCausalLM", 4, 4, 16, attention_bias=True, mlp_bias=True, rope_theta=500000.0, rope_parameters=NEW_ROPE
    ),
    "llama-d64-gqa8": config("LlamaForCausalLM", 8, 1, 64, rope_scaling=llama3(32.0, 128)),
    "llama-d128-gqa1": config("LlamaForCausalLM", 2, 2, 128, rope_theta=500000.0),
    "mistral-untied": config(
        "MistralForCausalLM", 4, 2, 32, sliding_window=None, rope_theta=1000000.0
    ),
    "mistral-d128-gqa4": config("MistralForCausalLM", 4, 1, 128, sliding_window=None),
    "mistral-window": config("MistralForCausalLM", 4, 2, 32, sliding_window=17, rope_theta=1000000.0),
    "mixtral-untied": config("MixtralForCausalLM", 4, 2, 16, rope_theta=1000000.0, **MIXTRAL),
    "mixtral-window": config(
        "MixtralForCausalLM", 4, 2, 32, num_hidden_layers=2, rope_theta=1000000.0, **(MIXTRAL | {"sliding_window": 21})
    ),
    "mistral3-text": multimodal(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        config("MistralForCausalLM", 4, 2, 32, sliding_window=None, rope_theta=1000000000.0),
    ),
    "ministral3-text": multimodal(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        config("Ministral3ForCausalLM", 4, 2, 32, rope_theta=1000000.0, rope_parameters=TEMPERATURE),
    ),
    "ministral3-tied-d128": config(
        "Ministral3ForCausalLM", 4, 1, 128, tie_word_embeddings=True, rope_theta=1000000.0, rope_parameters=TEMPERATURE
    ),
    "qwen3_vl-tied": multimodal(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        config("Qwen3ForCausalLM", 4, 2, 32, tie_word_embeddings=True, rope_theta=5e6, rope_scaling=MROPE)
        | {"model_type": "qwen3_vl_text"},
    ),
    "qwen3_vl_moe-step2": multimodal(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        config("Qwen3MoeForCausalLM", 4, 1, 32, rope_theta=5e6, rope_scaling=MROPE, **(MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2}))
        | {"model_type": "qwen3_vl_moe_text"},
    ),
    "gemma3-d256-gqa2": gemma3(4, 2, 256, **GEMMA3),
    "gemma3-text-window64-tied-d64": multimodal(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        gemma3(4, 1, 64, tie_word_embeddings=True, **GEMMA3_TEXT),
        mm_tokens_per_image=4,
    ),
    "gemma4-dense-shared-values": multimodal(
        "Gemma4ForConditionalGeneration", "gemma4", gemma4(4, 4, 16, tie_word_embeddings=True, **GEMMA4_DENSE), audio_config=None
    ),
    "gemma4-moe": gemma4(4, 2, 32, **(GEMMA4_DENSE | GEMMA4_MOE)),
    "gemma4-layer-inputs": gemma4(4, 2, 16, **GEMMA4_INPUTS),
    "gemma4-unified-d256-d512": multimodal(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        {k: v for k, v in gemma4(4, 2, 256, **GEMMA4_WIDE).items() if k != "hidden_size_per_layer_input"}
        | {"model_type": "gemma4_unified_text"},
        audio_config=None,
    ),
    "gpt_oss-mxfp4": config(
        "GptOssForCausalLM",
        4,
        2,
        64,
        rope_theta=150000.0,
        rope_scaling=GPT_OSS_YARN,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        **GPT_OSS,
    ),
    "gpt_oss-plain-limits": config(
        "GptOssForCausalLM", 8, 2, 32, **(GPT_OSS | {"sliding_window": 64, "swiglu_alpha": 1.25, "swiglu_limit": 0.25})
    ),
    "qwen3_next-grouped": config(
        "Qwen3NextForCausalLM", 4, 2, 32, **(MOE | QWEN3_NEXT | {"norm_topk_prob": True, "decoder_sparse_step": 2})
    ),
    "qwen3_next-plain-d64": config(
        "Qwen3NextForCausalLM",
        4,
        1,
        64,
        **(
            MOE
            | QWEN3_NEXT
            | {"num_experts": 16, "norm_topk_prob": False, "mlp_only_layers": [0, 3]}
            | {"linear_value_head_dim": 16, "full_attention_interval": 2}
        ),
    ),
    "qwen3_5-text-tied": multimodal(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        config("Qwen3_5ForCausalLM", 4, 2, 32, tie_word_embeddings=True, **QWEN3_5),
    ),
    "qwen3_5_moe-fp8-blocks": config("Qwen3_5MoeForCausalLM", 4, 2, 128, **QWEN3_5_FP8),
    "qwen3_5_moe-fused-d256": config("Qwen3_5MoeForCausalLM", 4, 2, 256, **QWEN3_5_MOE),
    "qwen3_next-mtp": config(
        "Qwen3NextForCausalLM", 4, 2, 32, **(MOE | QWEN3_NEXT | {"norm_topk_prob": True, "mlp_only_layers": [0, 1, 2], "mtp_num_hidden_layers": 1})
    ),
    "qwen3_next-fp8-blocks-mtp": config("Qwen3NextForCausalLM", 4, 2, 128, **(MOE | QWEN3_NEXT_FP8)),
    "qwen3_5-mtp": config("Qwen3_5ForCausalLM", 4, 1, 32, **(QWEN3_5 | {"mtp_num_hidden_layers": 1})),
    # The multimodal architecture, as Qwen3.5 and Qwen3.6 checkpoints have it.
    "qwen3_5_moe-text-mtp": multimodal(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        config("Qwen3_5MoeForCausalLM", 4, 1, 64, **(QWEN3_5_MOE | QWEN3_5_MOE_MTP)),
    ),
    "phi3-default": phi3(4, 2, sliding_window=1024),
    "phi3-window-tied": phi3(4, 1, sliding_window=47, tie_word_embeddings=True),
    "phi3-longrope-tied": phi3(4, 1, tie_word_embeddings=True, **LONGROPE),
    "phi3-longrope-short": phi3(4, 4, **(LONGROPE | {"original_max_position_embeddings": 1024})),
    "qwen2-untied": config(
        "Qwen2ForCausalLM", 4, 2, 16, use_sliding_window=False, sliding_window=32
    ),
    "qwen2-upper-windows": config(
        "Qwen2ForCausalLM", 4, 2, 16, use_sliding_window=True, sliding_window=16, max_window_layers=2
    ),
    "qwen2-tied-d64-gqa8": config("Qwen2ForCausalLM", 8, 1, 64, tie_word_embeddings=True),
    "granite-multipliers": config(
        "GraniteForCausalLM",
        4,
        2,
        16,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=1.5,
    ),
    "granite-tied-biases-d64": config(
        "GraniteForCausalLM",
        8,
        2,
        64,
        embedding_multiplier=0.4,
        residual_multiplier=0.5,
        attention_multiplier=0.015625,
        logits_scaling=4.0,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "granite4-dense": config(
        "GraniteMoeHybridForCausalLM", 4, 2, 16, position_embedding_type="rope", **GRANITE4
    ),
    "granite4-nope-tied-d64": config(
        "GraniteMoeHybridForCausalLM",
        8,
        2,
        64,
        position_embedding_type="nope",
        tie_word_embeddings=True,
        attention_bias=True,
        **(GRANITE4 | {"embedding_multiplier": 0.4}),
    ),
    "olmo2-untied": config("Olmo2ForCausalLM", 4, 4, 16, rope_theta=500000.0, **OLMO),
    "olmo2-tied-biases-d64-gqa4": config(
        "Olmo2ForCausalLM", 8, 2, 64, tie_word_embeddings=True, attention_bias=True, **OLMO
    ),
    "olmo3-full-yarn-d128": config(
        "Olmo3ForCausalLM",
        4,
        1,
        128,
        layer_types=["full_attention"] * 4,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
        **OLMO,
    ),
    # Three of four layers have a window, and RoPE without scaling.
    "olmo3-windows-yarn": config(
        "Olmo3ForCausalLM",
        4,
        2,
        32,
        sliding_window=24,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        **OLMO,
    ),
    "smollm3-windows": config(
        "SmolLM3ForCausalLM",
        4,
        2,
        32,
        use_sliding_window=True,
        sliding_window=9,
        no_rope_layers=[1, 0, 1, 0],
        pad_token_id=None,
    ),
    "smollm3-every-fourth": config(
        "SmolLM3ForCausalLM", 4, 2, 16, tie_word_embeddings=True, rope_theta=5e6, pad_token_id=None
    ),
    "smollm3-listed-d128": config(
        "SmolLM3ForCausalLM", 4, 1, 128, no_rope_layers=[0, 1, 1, 0], pad_token_id=None
    ),
    "seed_oss-biases": config("SeedOssForCausalLM", 4, 2, 32, rope_theta=1e7),
    "seed_oss-all-biases-d128": config(
        "SeedOssForCausalLM", 8, 1, 128, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "ernie4_5-tied-d64": config("Ernie4_5ForCausalLM", 4, 2, 64, tie_word_embeddings=True, rope_theta=500000.0),
    "ernie4_5-biases-d128": config("Ernie4_5ForCausalLM", 8, 2, 128, use_bias=True),
    "glm-biases": config("GlmForCausalLM", 4, 2, 32, pad_token_id=None),
    "glm4-sandwich-tied": config(
        "Glm4ForCausalLM",
        4,
        2,
        64,
        tie_word_embeddings=True,
        partial_rotary_factor=0.25,
        attention_bias=False,
        pad_token_id=None,
    ),
    "glm4-biases-d128": config("Glm4ForCausalLM", 8, 2, 128, pad_token_id=None),
    "qwen2_moe-gated-shared": config(
        "Qwen2MoeForCausalLM",
        4,
        2,
        16,
        **(MOE | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    ),
    "qwen2_moe-normalised-d64": config(
        "Qwen2MoeForCausalLM",
        8,
        1,
        64,
        **(MOE | STEP2 | {"shared_expert_intermediate_size": 128, "qkv_bias": False}),
    ),
    "qwen3-tied": config("Qwen3ForCausalLM", 4, 2, 32, tie_word_embeddings=True, rope_theta=1e6),
    "qwen3-d64-gqa8": config("Qwen3ForCausalLM", 8, 1, 64, rope_theta=1e6),
    "qwen3-d128-gqa4": config("Qwen3ForCausalLM", 4, 1, 128, rope_theta=1e6),
    "qwen3-listed-windows-d128": config(
        "Qwen3ForCausalLM",
        4,
        2,
        128,
        use_sliding_window=True,
        sliding_window=65,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "qwen3-yarn": config(
        "Qwen3ForCausalLM",
        4,
        4,
        64,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen3-fp8-blocks": config(
        "Qwen3ForCausalLM", 4, 2, 32, rope_theta=1e6, quantization_config=BLOCKS, **UNEVEN
    ),
    "qwen3-fp8-channels": config(
        "Qwen3ForCausalLM", 4, 2, 64, rope_theta=1e6, quantization_config=CHANNELS, **UNEVEN
    ),
    "qwen3-fp8-tensors": config(
        "Qwen3ForCausalLM", 4, 2, 32, rope_theta=1e6, quantization_config=TENSORS, **UNEVEN
    ),
    "llama-fp8-mixed": config("LlamaForCausalLM", 4, 2, 32, quantization_config=MIXED, **UNEVEN),
    "qwen3_moe-fp8-modelopt": config(
        "Qwen3MoeForCausalLM",
        4,
        2,
        32,
        quantization_config=MODELOPT,
        **(MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2, "hidden_size": 192, "moe_intermediate_size": 64}),
    ),
    "qwen3_moe-fp8-blocks": config(
        "Qwen3MoeForCausalLM",
        4,
        2,
        64,
        quantization_config=BLOCKS,
        **(MOE | UNEVEN | {"moe_intermediate_size": 160, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    ),
    "qwen3_moe-fp8-whole-blocks": config(
        "Qwen3MoeForCausalLM",
        4,
        2,
        128,
        quantization_config=BLOCKS,
        **(MOE | WHOLE_BLOCKS | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    ),
    "qwen3_moe-normalised-dense1": config(
        "Qwen3MoeForCausalLM", 4, 2, 16, **(MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]})
    ),
    "qwen3_moe-plain-tied": config(
        "Qwen3MoeForCausalLM", 4, 1, 16, tie_word_embeddings=True, **(MOE | {"norm_topk_prob": False})
    ),
    "qwen3_moe-step2-d64-gqa8": config(
        "Qwen3MoeForCausalLM",
        8,
        1,
        64,
        **(MOE | STEP2),
    ),
    "deepseek_v2-greedy": deepseek("DeepseekV2ForCausalLM", **(LATENT | GREEDY | {"q_lora_rank": None})),
    "deepseek_v2-groups-yarn": deepseek(
        "DeepseekV2ForCausalLM",
        **(LATENT | LIMITED | {"rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707}, "first_k_dense_replace": 2}),
    ),
    "deepseek_v3-groups-yarn": deepseek(
        "DeepseekV3ForCausalLM", **(LATENT | SIGMOID | {"rope_scaling": DEEPSEEK_YARN})
    ),
    "deepseek_v3-whole-queries": deepseek(
        "DeepseekV3ForCausalLM",
        **(LATENT | SIGMOID | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
    ),
    "deepseek_v3-mtp": deepseek(
        "DeepseekV3ForCausalLM", **(LATENT | SIGMOID | {"num_nextn_predict_layers": 1})
    ),
    "deepseek_v3-fp8-blocks": deepseek(
        "DeepseekV3ForCausalLM",
        quantization_config=BLOCKS,
        **(LATENT | SIGMOID | UNEVEN | {"q_lora_rank": 160, "kv_lora_rank": 144, "moe_intermediate_size": 160}),
    ),
    # Every rank of four has whole blocks of 128 channels of the MLPs.
    "deepseek_v3-fp8-ue8m0": deepseek(
        "DeepseekV3ForCausalLM",
        quantization_config=BLOCKS | {"scale_fmt": "ue8m0"},
        hidden_size=192,
        intermediate_size=512,
        **(LATENT | SIGMOID | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 512, "first_k_dense_replace": 2}),
    ),
}


def eagle(**more) -> dict:
    """An EAGLE-3 layer with a draft vocabulary of 96 ids."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": VOCAB,
        "draft_vocab_size": 96,
        "hidden_size": 64,
        "target_hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    } | more


# Each case is a target model with its EAGLE-3 layer. The second case uses every checkpoint variant.
EAGLES = {
    "llama-eagle3": ("llama-untied", eagle()),
    "qwen3_moe-eagle3-variants": (
        "qwen3_moe-step2-d64-gqa8",
        eagle(
            hidden_size=48,
            num_attention_heads=2,
            head_dim=32,
            num_key_value_heads=1,
            eagle_aux_hidden_state_layer_ids=[0, 1, 3],
            fc_norm=True,
            norm_before_residual=True,
            norm_output=True,
        ),
    ),
}


# The model ------------------------------------------------------------------------------------


def plain(case: dict, name: str) -> bool:
    """Whether a weight is not quantised: it is not a layer's linear weight, or the configuration excludes it."""
    linear = ("_proj.weight", "_with_mqa.weight", "in_proj_qkv.weight", "in_proj_qkvz.weight", "in_proj_z.weight")
    if "quantization_config" not in case or not name.endswith(linear) or name.endswith(".eh_proj.weight"):
        return True
    if case["quantization_config"]["quant_method"] == "mxfp4":
        return ".experts." not in name
    lists = ("ignore", "ignored_layers", "modules_to_not_convert")
    ignored = [entry for key in lists for entry in case["quantization_config"].get(key, [])]

    def matches(entry: str) -> bool:
        if entry.startswith("re:"):
            return re.match(entry[3:], name) is not None
        return fnmatch.fnmatchcase(name.removesuffix(".weight"), entry)

    return any(map(matches, ignored))


def weight(case: dict, name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a parameter of the HF module; experts that HF stacks in one tensor are generated one by one."""

    def values(name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
        if plain(case, name):
            centred = case["model_type"] in ZERO_CENTRED and not name.endswith("linear_attn.norm.weight")
            return values_of(name, seed, shape, centred)
        if case["quantization_config"]["quant_method"] == "mxfp4":
            return mxfp4(name, seed, shape)
        return quantised(name, seed, shape, case["quantization_config"])

    path, _, kind = name.rpartition(".")
    module, _, fused = path.rpartition(".")
    if fused in ("qkv_proj", "gate_up_proj"):
        names = ("q_proj", "k_proj", "v_proj") if fused == "qkv_proj" else ("gate_proj", "up_proj")
        parts = []
        for part in names:
            rows = shape[0] // 2 if fused == "gate_up_proj" else head_rows(case, part)
            parts.append(values(f"{module}.{part}.{kind}", seed, (rows, *shape[1:])))
        return np.concatenate(parts)
    prefix, _, fused = name.rpartition(".")
    if case["model_type"] == "gpt_oss" and prefix.endswith(".experts"):
        return np.stack([gpt_oss_expert(values, f"{prefix}.{e}", fused, seed, shape[1:]) for e in range(shape[0])])
    if fused not in ("gate_up_proj", "down_proj") or not prefix.endswith(".experts"):
        return values(name, seed, shape)

    def one(expert: int, weight: str, rows: int) -> np.ndarray:
        return values(f"{prefix}.{expert}.{weight}.weight", seed, (rows, shape[2]))

    experts = range(shape[0])
    if fused == "down_proj":
        return np.stack([one(e, "down_proj", shape[1]) for e in experts])
    half = shape[1] // 2
    both = [[one(e, w, half) for w in ("gate_proj", "up_proj")] for e in experts]
    return np.stack([np.concatenate(pair) for pair in both])


def gpt_oss_expert(values, prefix: str, fused: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """A matrix of a fused tensor, transposed, or its biases. Rows of gate and up projections alternate."""
    names = ("gate_proj", "up_proj") if fused.startswith("gate_up") else ("down_proj",)
    rows = shape[-1] // len(names)
    if fused.endswith("_bias"):
        return np.stack([values(f"{prefix}.{name}.bias", seed, (rows,)) for name in names], 1).reshape(-1)
    parts = [values(f"{prefix}.{name}.weight", seed, (rows, shape[0])) for name in names]
    return np.stack(parts, 1).reshape(-1, shape[0]).T


def head_rows(case: dict, projection: str) -> int:
    heads = case["num_attention_heads"] if projection == "q_proj" else case["num_key_value_heads"]
    return heads * case.get("head_dim", case["hidden_size"] // case["num_attention_heads"])


def canonical(name: str, model_type: str) -> str | None:
    """Name from which values are computed; None for weights of vision encoders, which text does not need."""
    if name.startswith(("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")):
        return None
    names = {
        "model.language_model.": "model.",
        ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.down_proj.",
        ".mlp.router.": ".mlp.gate.",
    }
    if model_type == "glm4":
        names |= {
            ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
            ".post_self_attn_layernorm.": ".post_attention_layernorm.",
            ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
        }
    if model_type in ("gemma4", "gemma4_text"):
        names |= {".router.proj.": ".mlp.gate.", ".experts.": ".mlp.experts."}
    for stored, known in names.items():
        name = name.replace(stored, known)
    return name


# Configuration keys that are removed for HF, because its weights are dequantised.
UNSEEN = ("architectures", "model_type", "dtype", "quantization_config")


@torch.no_grad()
def use_long_factors(body) -> None:
    """Uses one list of longrope factors for all sequences, as Hadron and vLLM do: the long ones if the longest
    sequence is longer than the original context. HF chooses by the length of each sequence."""
    parameters = body.config.rope_parameters
    original = parameters.get("original_max_position_embeddings")
    if parameters.get("rope_type") != "longrope" or body.config.max_position_embeddings <= original:
        return
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    frequencies, _ = compute(body.config, seq_len=original + 1)
    body.rotary_emb.original_inv_freq.copy_(frequencies)


class Watched:
    """A model whose hidden states and router decisions are recorded as it runs."""

    def __init__(self, case: dict, seed: int):
        kwargs = {k: v for k, v in case.items() if k not in UNSEEN}
        hf_config = transformers.AutoConfig.for_model(case["model_type"], **kwargs)
        hf_config._attn_implementation = "eager"
        hf_config._experts_implementation = "eager"
        cls = getattr(transformers, case["architectures"][0])
        self.model = cls(hf_config).to(torch.float32).eval()
        assert self.model.config._attn_implementation == "eager"
        with torch.no_grad():
            stored = [*self.model.named_parameters()]
            stored += [(n, b) for n, b in self.model.named_buffers() if n.endswith(("correction_bias", "layer_scalar"))]
            for name, parameter in stored:
                if (known := canonical(name, case["model_type"])) is None:
                    continue
                made = weight(text_part(case), known, seed, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(made))
        body = self.model.model
        self.body = body = getattr(body, "language_model", body)
        use_long_factors(body)
        self.case = case
        self.hidden: list[torch.Tensor] = []
        self.routes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.routers = []
        for layer in body.layers:
            layer.register_forward_hook(lambda _, __, out: self.hidden.append(first(out)))
            mlp = getattr(layer, "mlp", None)
            router = getattr(mlp, "gate", getattr(mlp, "router", getattr(layer, "router", None)))
            if router is not None:
                self.routers.append(router)
                router.register_forward_hook(lambda _, __, out: self.routes.append(out))

    @torch.no_grad()
    def run(self, ids: list[int], cache=None):
        self.hidden.clear()
        self.routes.clear()
        return self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)

    def router_gap(self) -> float:
        """Distance between the last score chosen and the first one not chosen, of experts and of groups."""
        return self.gap_of(self.routers, self.routes)

    def gap_of(self, routers: list, routes: list) -> float:
        gap = math.inf
        for layer, (logits, _, chosen) in zip(routers, routes):
            choice, groups = self.scores(layer, logits)
            if groups is not None:
                kept = self.case["topk_group"]
                order = groups.sort(-1, descending=True)
                gap = min(gap, (order.values[:, kept - 1] - order.values[:, kept]).min().item())
                left = torch.zeros_like(groups, dtype=torch.bool).scatter(1, order.indices[:, :kept], True)
                each = choice.shape[-1] // groups.shape[-1]
                choice = choice.masked_fill(~left.repeat_interleave(each, -1), -math.inf)
            k = chosen.shape[-1]
            scores = choice.sort(-1, descending=True).values
            gap = min(gap, (scores[:, k - 1] - scores[:, k]).min().item())
        return gap

    def scores(self, router, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores for the selection of experts, and of expert groups if these are selected first."""
        sigmoid = hasattr(router, "e_score_correction_bias")
        if sigmoid:
            choice = logits.sigmoid() + router.e_score_correction_bias
        elif self.case.get("model_type") == "gpt_oss":
            choice = logits  # Selected before the softmax.
        elif self.case.get("model_type") == "gemma4_text":
            choice = logits  # The router returns probabilities.
        else:
            choice = logits.softmax(-1, dtype=torch.float)
        if not sigmoid and self.case.get("topk_method") != "group_limited_greedy":
            return choice, None
        count, kept = self.case["n_group"], self.case["topk_group"]
        if count == kept:
            return choice, None
        parts = choice.view(len(choice), count, -1)
        return choice, parts.topk(2, -1).values.sum(-1) if sigmoid else parts.amax(-1)

    def chosen(self) -> np.ndarray | None:
        """Chosen experts [MoE layers, tokens, experts per token], in ascending order per token."""
        if not self.routes:
            return None
        return np.stack([c.sort(-1).values.numpy().astype(np.uint8) for _, _, c in self.routes])


class DraftLayer:
    """The MTP module of DeepSeek-V3 (arXiv 2412.19437), section 2.2, formulas 21 to 23.

    `h'_i = M [norm(embed(t_{i+1})); norm(h_i)]`, in the order of the published weights; one block of
    the model over all of these; then a norm and the model's own head. `h_i` is the input of the head.
    Qwen3-Next and Qwen3.5 have the same module, whose block is an attention layer and whose norms are
    zero-centred (vLLM `qwen3_next_mtp.py`, `qwen3_5_mtp.py`).
    """

    def __init__(self, watched: Watched, seed: int):
        self.watched = watched
        self.case = text_part(watched.case)
        config = watched.model.config.get_text_config()
        prefix = f"model.layers.{config.num_hidden_layers}."
        assert "linear_attn" not in watched.body.layers[-1]._modules
        layer = type(watched.body.layers[-1])(config, config.num_hidden_layers - 1)
        self.layer = layer.to(torch.float32).eval()

        def made(name: str, *shape: int) -> torch.Tensor:
            return torch.from_numpy(weight(self.case, prefix + name, seed, shape))

        stored = [*self.layer.named_parameters()]
        stored += [(n, b) for n, b in self.layer.named_buffers() if n.endswith("correction_bias")]
        with torch.no_grad():
            for name, parameter in stored:
                parameter.copy_(made(name, *parameter.shape))
        width = config.hidden_size
        self.norms = [made(f"{n}.weight", width) for n in ("enorm", "hnorm", "shared_head.norm")]
        self.join = made("eh_proj.weight", width, 2 * width)
        self.routes: list[tuple[torch.Tensor, ...]] = []
        self.routers = [self.layer.mlp.gate] if hasattr(self.layer.mlp, "gate") else []
        for router in self.routers:
            router.register_forward_hook(lambda _, __, out: self.routes.append(out))

    @torch.no_grad()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """Hidden states of the model, `[tokens, hidden_size]`."""
        return self.watched.body(torch.tensor([tokens])).last_hidden_state[0]

    @torch.no_grad()
    def run(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits for each pair of a token and the hidden state before it, and the module's outputs, which replace the
        hidden states for the next draft token."""
        centre = 1.0 if self.case["model_type"] in ZERO_CENTRED else 0.0

        def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (centre + w) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.case["rms_norm_eps"]))

        body = self.watched.body
        embedded = body.embed_tokens(torch.tensor([tokens]))
        joined = torch.cat([norm(embedded, self.norms[0]), norm(states[None], self.norms[1])], -1) @ self.join.T
        count = joined.shape[1]
        unseen = torch.full((count, count), -math.inf).triu(1)[None, None]
        turns = body.rotary_emb(joined, torch.arange(count)[None])
        self.routes.clear()
        out = norm(first(self.layer(joined, attention_mask=unseen, position_embeddings=turns)), self.norms[2])[0]
        return self.watched.model.lm_head(out), out

    def chain(self, tokens: list[int], states: torch.Tensor) -> tuple[list[int], float, float]:
        """Four draft tokens after the last token, and the smallest gaps; `states` are those of all but the last token."""
        tokens, drafts, gaps = tokens[1:], [], [math.inf, math.inf]
        for _ in range(CHAIN):
            logits, made = self.run(tokens, states)
            gaps = [min(gaps[0], logit_gap(logits[-1])), min(gaps[1], self.router_gap())]
            drafts.append(int(logits[-1].argmax()))
            tokens, states = tokens + drafts[-1:], torch.cat([states, made[-1:]])
        return drafts, *gaps

    def router_gap(self) -> float:
        return self.watched.gap_of(self.routers, self.routes)


class Eagle3:
    """The EAGLE-3 layer (arXiv 2503.01840), section 3.1: over pairs of the token at i + 1 and the hidden state at i.

    A hidden state concatenates the inputs of three layers of the model; for the next draft token the
    EAGLE-3 layer's own output replaces it.
    """

    def __init__(self, watched: Watched, case: dict, seed: int):
        self.watched, self.case = watched, case
        width, state, ids = case["hidden_size"], case["target_hidden_size"], case["draft_vocab_size"]
        heads, kv_heads, dim = (case[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        mlp = case["intermediate_size"]

        def made(name: str, *shape: int) -> torch.Tensor:
            return torch.from_numpy(values_of(f"{name}.weight", seed, shape))

        def made_within(name: str, *shape: int) -> torch.Tensor:
            return made(f"midlayer.{name}", *shape)

        self.join = made("fc", width, 3 * state)
        self.state_norms = [made(f"fc_norm.{i}", state) for i in range(3)] if case.get("fc_norm") else None
        self.norms = {n: made_within(n, width) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        self.norm, self.head = made("norm", width), made("lm_head", ids, width)
        own = width != state
        self.embed = made("embed_tokens", VOCAB, width) if own else watched.model.model.embed_tokens.weight
        rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        self.projections = {p: made_within(f"self_attn.{p}_proj", n, 2 * width) for p, n in rows.items()}
        self.out = made_within("self_attn.o_proj", width, heads * dim)
        self.gate, self.up = (made_within(f"mlp.{p}_proj", mlp, width) for p in ("gate", "up"))
        self.down = made_within("mlp.down_proj", width, mlp)
        self.names = [i * VOCAB // ids for i in range(ids)]

    def scaled(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.case["rms_norm_eps"]))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Applies RoPE to heads `[heads, tokens, head_dim]`; pairs are formed from the two halves of a head."""
        dim = x.shape[-1]
        waves = 1.0 / self.case["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(x.shape[1]).float()[:, None] * waves
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    @torch.no_grad()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """Auxiliary hidden states of the target model, joined and projected: `[tokens, hidden_size]`."""
        entered = self.watched.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        parts = [entered[i][0] for i in self.case["eagle_aux_hidden_state_layer_ids"]]
        if self.state_norms is not None:
            parts = [self.scaled(part, w) for part, w in zip(parts, self.state_norms)]
        return torch.cat(parts, -1) @ self.join.T

    @torch.no_grad()
    def run(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits for each pair, and the layer's outputs, which replace the hidden states."""
        case, norms, count = self.case, self.norms, len(tokens)
        heads, kv_heads, dim = (case[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        normed = self.scaled(states, norms["hidden_norm"])
        pairs = torch.cat([self.scaled(self.embed[tokens], norms["input_layernorm"]), normed], -1)
        q, k, v = (
            (pairs @ self.projections[p].T).view(count, -1, dim).transpose(0, 1) for p in ("q", "k", "v")
        )
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (self.turned(k), v))
        unseen = torch.full((count, count), -math.inf).triu(1)
        weights = (self.turned(q) @ k.transpose(1, 2) / math.sqrt(dim) + unseen).softmax(-1)
        mixed = (weights @ v).transpose(0, 1).reshape(count, -1)
        x = (normed if case.get("norm_before_residual") else states) + mixed @ self.out.T
        h = self.scaled(x, norms["post_attention_layernorm"])
        x = x + (torch.nn.functional.silu(h @ self.gate.T) * (h @ self.up.T)) @ self.down.T
        last = self.scaled(x, self.norm)
        return last @ self.head.T, last if case.get("norm_output") else x

    def chain(self, tokens: list[int], states: torch.Tensor) -> tuple[list[int], float]:
        """Four draft tokens after the last token, and the smallest logit gap; `states` are those of all but the last token."""
        tokens, drafts, gap = tokens[1:], [], math.inf
        for _ in range(CHAIN):
            logits, made = self.run(tokens, states)
            gap = min(gap, logit_gap(logits[-1]))
            drafts.append(self.names[int(logits[-1].argmax())])
            tokens, states = tokens + drafts[-1:], torch.cat([states, made[-1:]])
        return drafts, gap


def attempt_eagle(watched: Watched, case: dict, tokens: list[int], seed: int):
    """Does what `attempt` does, for an EAGLE-3 layer of the model `watched`."""
    layer = Eagle3(watched, case, seed)
    states = layer.states(tokens)
    logits, _ = layer.run(tokens[1:], states[:-1])
    gap, chains = logit_gap(logits), []
    for at in CHAINS:
        if gap < LOGIT_GAP:
            return None
        chain, clear = layer.chain(tokens[: at + 1], states[:at])
        gap = min(gap, clear)
        chains.append(chain)
    if gap < LOGIT_GAP:
        return None
    tensors = {
        "draft_tokens": np.array([layer.names[i] for i in logits.argmax(-1)], dtype=np.int32),
        "draft_logits": logits[-DRAFTS:].numpy().astype(np.float32),
        "chain_starts": np.array(CHAINS, dtype=np.int32),
        "chains": np.array(chains, dtype=np.int32),
    }
    return tensors, [gap, math.inf]


def write_eagle(name: str, of: str, case: dict) -> None:
    with safetensors.safe_open(FOLDER / f"{of}.safetensors", "np") as model:
        about = json.loads(model.metadata()["golden"])
        tokens = [int(i) for i in model.get_tensor("tokens")]
    watched, seed = Watched(CASES[of], about["seed"]), 0
    while (found := attempt_eagle(watched, case, tokens, seed)) is None:
        seed += 1
    tensors, gaps = found
    save(FOLDER / "drafts" / f"{name}.safetensors", tensors, gaps, case, seed, {"model": of})


def first(out):
    return out[0] if isinstance(out, tuple) else out


def logit_gap(logits: torch.Tensor) -> float:
    top = logits.topk(2, -1).values
    return (top[..., 0] - top[..., 1]).min().item()


def greedy(watched: Watched, prompt: list[int]) -> tuple[list[int], float, float] | None:
    """64 greedily decoded tokens after the prompt, or None as soon as the two largest logits are close."""
    ids, cache, chosen, gaps = prompt, None, [], (math.inf, math.inf)
    for _ in range(STEPS):
        out = watched.run(ids, cache)
        cache = out.past_key_values
        last = out.logits[0, -1]
        gaps = min(gaps[0], logit_gap(last)), min(gaps[1], watched.router_gap())
        if gaps[0] < LOGIT_GAP or gaps[1] < ROUTER_GAP:
            return None
        ids = [int(last.argmax())]
        chosen += ids
    return chosen, *gaps


def attempt(case: dict, seed: int):
    """The fixture tensors of one seed and its smallest gaps, or None if a decision is close."""
    watched = Watched(case, seed)
    tokens = [int(w) for w in words("tokens", seed, TOKENS) % np.uint64(VOCAB)]
    logits = watched.run(tokens).logits[0]
    gaps = [logit_gap(logits), watched.router_gap()]
    if gaps[0] < LOGIT_GAP or gaps[1] < ROUTER_GAP:
        return None
    tensors = {
        "tokens": np.array(tokens, dtype=np.int32),
        "logits": logits.numpy().astype(np.float32),
        "hidden": torch.stack([h[0, -TAPS:] for h in watched.hidden]).numpy().astype(np.float32),
        "prompts": np.array(PROMPTS, dtype=np.int32),
    }
    if (chosen := watched.chosen()) is not None:
        tensors["routes"] = chosen
    if case.get("num_nextn_predict_layers") or text_part(case).get("mtp_num_hidden_layers"):
        draft = DraftLayer(watched, seed)
        states = draft.states(tokens)
        logits, _ = draft.run(tokens[1:], states[:-1])
        gaps = [min(gaps[0], logit_gap(logits)), min(gaps[1], draft.router_gap())]
        tensors["draft_tokens"] = logits.argmax(-1).numpy().astype(np.int32)
        tensors["draft_logits"] = logits[-DRAFTS:].numpy().astype(np.float32)
        chains = []
        for at in CHAINS:
            if gaps[0] < LOGIT_GAP or gaps[1] < ROUTER_GAP:
                return None
            chain, *clear = draft.chain(tokens[: at + 1], states[:at])
            gaps = [min(pair) for pair in zip(gaps, clear)]
            chains.append(chain)
        if gaps[0] < LOGIT_GAP or gaps[1] < ROUTER_GAP:
            return None
        tensors["chain_starts"] = np.array(CHAINS, dtype=np.int32)
        tensors["chains"] = np.array(chains, dtype=np.int32)
    rows = []
    for length in PROMPTS:
        if (found := greedy(watched, tokens[:length])) is None:
            return None
        rows.append(found[0])
        gaps = [min(gaps[0], found[1]), min(gaps[1], found[2])]
    tensors["greedy"] = np.array(rows, dtype=np.int32)
    return tensors, gaps


def bf16_gate(case: dict) -> dict:
    """Factor on the maximum bf16 log-probability differences of a case, and the reason for it."""
    if case.get("model_type") == "gpt_oss":
        return {
            "scale": 2,
            "reason": "transformers itself, in bf16, chooses the experts of f32 at 135 to 140 of 150 positions, and has mean 0.03, "
            "p99 0.19, regret 0.08",
        }
    if "quantization_config" in case and "mtp_num_hidden_layers" in case:
        return {
            "scale": 8,
            "reason": "at few of 150 positions other experts are chosen, which costs regret 1.19 at one of them (mean 0.02, p99 0.20); "
            "transformers itself, in bf16, chooses the experts of f32 at 147 of 150 positions, and has regret 0.54",
        }
    text = text_part(case)
    is_sparse_hybrid = "linear_num_key_heads" in text and "num_experts" in text
    if is_sparse_hybrid and case is not text:
        return {
            "scale": 4,
            "reason": "transformers itself, in bf16, chooses the experts of f32 at 144 of 150 positions, and has mean 0.02, p99 0.30, "
            "regret 0.23",
        }
    if is_sparse_hybrid:
        flat = "decoder_sparse_step" not in text
        return {
            "scale": 20 if flat or text["num_experts"] > 8 else 4,
            "reason": "transformers itself, in bf16, chooses the experts of f32 at 134 to 144 of 150 positions, and has mean 0.13, "
            "p99 1.01, regret 0.61; another expert at one position changes the convolution and the states of later positions, "
            "also where their experts agree",
        }
    if "num_local_experts" in case:
        return {
            "scale": 20,
            "reason": "transformers itself, in bf16, chooses the experts of f32 at 137 of 150 positions, and has mean 0.05, "
            "p99 0.49, regret 3.96; where the experts agree, mean 0.03, p99 0.18, regret 0.14",
        }
    if "num_experts" in case.get("text_config", {}):
        return {
            "scale": 10,
            "reason": "transformers itself, in bf16, chooses the experts of f32 at 147 of 150 positions, and has regret 1.39; "
            "where the experts agree, mean 0.01, p99 0.05, regret 0.03",
        }
    if case.get("moe_intermediate_size") == WHOLE_BLOCKS["moe_intermediate_size"]:
        return {
            "scale": 15,
            "reason": "at one of 150 positions other experts are chosen, which costs regret 2.83 there (mean 0.02, p99 0.10); where "
            "the experts agree, transformers in bf16 has mean 0.01, p99 0.04, regret 0.01",
        }
    if "quantization_config" in case and "num_experts" in case:
        return {
            "scale": 10,
            "reason": "the router's scores come within 2e-5 of each other at the cut, nearer than bf16 can tell: at one "
            "position other experts are chosen, which costs regret 1.9 there (mean 0.04, p99 0.38)",
        }
    if "kv_lora_rank" in case and "quantization_config" in case:
        return {
            "scale": 6,
            "same_experts": 0.5,
            "reason": "transformers itself, in bf16, chooses the experts of f32 at 82 of 150 positions, and has mean 0.15, "
            "p99 0.77, regret 1.04 there",
        }
    if "kv_lora_rank" in case:
        return {
            "scale": 2,
            "reason": "keys, values and queries are made of latents that are rounded themselves: regret to 0.30 where the "
            "same experts are chosen",
        }
    if not case.get("tie_word_embeddings"):
        return {"scale": 1, "reason": "none: the usual gates"}
    return {
        "scale": 4,
        "reason": "a synthetic embedding used as a head gives logits 4 times as large as a synthetic head, "
        "and rounding errors are in proportion",
    }


def fp8_gate(case: dict) -> dict | None:
    """Factor and reason if inputs of linear layers are also quantised to fp8, which the reference does not do."""
    if "quantization_config" not in case or case["model_type"] == "gpt_oss":
        return None
    if "n_routed_experts" in case:
        return {
            "scale": 12,
            "same_experts": 0.15,
            "reason": "quantising the inputs of this model's linears, in torch, leaves the experts of f32 at 32 of 150 "
            "positions: mean 0.37, p99 1.34 there",
        }
    if "linear_num_key_heads" in case and "mtp_num_hidden_layers" in case:
        return {
            "scale": 6,
            "reason": "quantising the inputs of this model's linears, in torch, leaves the experts of f32 at 128 (in f32) to "
            "131 (in bf16) of 150 positions: mean 0.09, p99 0.40, regret 0.82 there",
        }
    if case.get("moe_intermediate_size") == WHOLE_BLOCKS["moe_intermediate_size"]:
        return {
            "scale": 4,
            "reason": "quantising the inputs of this model's linears, in torch, leaves the experts of f32 at 149 of 150 positions: "
            "mean 0.05, p99 0.20, regret 0.37 there",
        }
    if "num_experts" in case:
        return {
            "scale": 12,
            "same_experts": 0.65,
            "reason": "quantising the inputs of this model's linears, in torch, leaves the experts of f32 at 105 (in f32) to "
            "110 (in bf16) of 150 positions: mean 0.14, p99 0.71 there",
        }
    if "config_groups" in case["quantization_config"] and len(case["quantization_config"]["config_groups"]) > 1:
        return {
            "scale": 10,
            "reason": "quantising the inputs of this model's linears, in torch, gives mean 0.23, p99 0.92, regret 1.25 in f32 "
            "and mean 0.24, p99 0.99, regret 1.73 in bf16: synthetic static scales are coarse",
        }
    return {
        "scale": 3,
        "reason": "quantising the inputs of this model's linears, in torch, gives mean 0.11, p99 0.38, regret 0.48",
    }


def write(name: str, case: dict) -> None:
    seed = 0
    while (found := attempt(case, seed)) is None:
        seed += 1
    tensors, gaps = found
    more = {"bf16_gate": bf16_gate(case)}
    if (gate := fp8_gate(case)) is not None:
        more["fp8_gate"] = gate
    save(FOLDER / f"{name}.safetensors", tensors, gaps, case, seed, more)


def save(path: Path, tensors: dict, gaps: list, case: dict, seed: int, more: dict) -> None:
    text = json.dumps(case, sort_keys=True)
    about = more | {
        "config": text,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "seed": seed,
        "logit_gap": gaps[0],
        "router_gap": None if math.isinf(gaps[1]) else gaps[1],
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__.split("+")[0],
            "numpy": np.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    # A single key: the order of several keys would vary between runs.
    save_file(tensors, path, metadata={"golden": json.dumps(about, sort_keys=True)})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    assert size <= FILE_LIMIT, f"{path.stem}: {size} bytes"
    print(f"{digest[:16]} {size:7} seed {seed:3} gaps {gaps[0]:.1e} {gaps[1]:.1e} {path.stem}", flush=True)


# Models whose pooled hidden states are written, with the seed of their weights. No decision is close in them.
POOLED = {"qwen3": ("qwen3-d64-gqa8", 0), "llama": ("llama-untied", 0)}


@torch.no_grad()
def write_pooled(name: str, of: str, seed: int) -> None:
    """Hidden states after the final norm, of the last token and as a mean, and outputs of a classification head."""
    case = CASES[of]
    watched = Watched(case, seed)
    kwargs = {k: v for k, v in case.items() if k not in UNSEEN} | {"num_labels": 1, "pad_token_id": 0}
    hf_config = transformers.AutoConfig.for_model(case["model_type"], **kwargs)
    hf_config._attn_implementation = "eager"
    family = case["architectures"][0].removesuffix("ForCausalLM")
    scorer = getattr(transformers, f"{family}ForSequenceClassification")(hf_config).to(torch.float32).eval()
    for key, parameter in scorer.named_parameters():
        parameter.copy_(torch.from_numpy(weight(case, key, seed, tuple(parameter.shape))))
    # Token 0 is the padding token of the scorer, so that prompts have no such token.
    tokens = [1 + int(w) % (VOCAB - 1) for w in words("tokens", seed, TOKENS)]
    rows = {"last": [], "mean": [], "score": []}
    for length in PROMPTS:
        ids = torch.tensor([tokens[:length]])
        hidden = watched.model.model(ids).last_hidden_state[0]
        rows["last"].append(hidden[-1])
        rows["mean"].append(hidden.mean(0))
        rows["score"].append(scorer(ids).logits[0])
    lists = {key: [[float(f"{x:.9g}") for x in row.tolist()] for row in made] for key, made in rows.items()}
    about = {"config": json.dumps(case, sort_keys=True), "seed": seed, "tokens": tokens, "prompts": PROMPTS}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    text = json.dumps(about | lists | {"versions": versions}, sort_keys=True)
    (FOLDER / "pooling" / f"{name}.json").write_text(text + "\n")


def main() -> None:
    check_vectors()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "drafts").mkdir(exist_ok=True)
    (FOLDER / "pooling").mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*CASES, *EAGLES, *POOLED]:
        if name in EAGLES:
            write_eagle(name, *EAGLES[name])
        elif name in POOLED:
            write_pooled(name, *POOLED[name])
        else:
            write(name, CASES[name])


if __name__ == "__main__":
    main()
