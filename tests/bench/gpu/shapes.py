#!/usr/bin/env python3
"""Writes model folders without weights, with the shapes used in the results: shapes.py OUT.

They are served with `--load-format synth`; the tokenizer is the demo model's, since load is ids. Sizes are those of
deepseek-ai/DeepSeek-V2-Lite, deepseek-ai/DeepSeek-V3, Qwen3's 0.6B, 8B and 30B-A3B, gpt-oss, Gemma 3 27B, Qwen3.5-35B-A3B and
Qwen3-Next-80B-A3B as published.
"""
import json
import pathlib
import shutil
import sys

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
LATENT = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LITE = LATENT | {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "vocab_size": 102400, "routed_scaling_factor": 1.0,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid",
      "norm_topk_prob": True, "num_nextn_predict_layers": 1}  # fmt: skip
QWEN = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960, "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip

FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPT_OSS = QWEN | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "rope_theta": 150000, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
    "attention_bias": True, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
                     "truncate": False},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
# Gated delta nets: every fourth layer has attention. Published FP8 checkpoints keep the projections of gates, the convolution,
# routers and the LM head in bf16.
HYBRID = QWEN | {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "quantization_config": FP8_BLOCKS | {"modules_to_not_convert": ["lm_head"] + [
        f"model.layers.{i}.{module}" for i in range(48) for module in (
            "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba", "linear_attn.conv1d", "mlp.gate",
            "mlp.shared_expert_gate")]},
}  # fmt: skip

GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "vocab_size": 262144, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "final_logit_softcapping": 30.0, "attention_bias": False,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "gemma-3-27b": {k: v for k, v in QWEN.items() if k != "hidden_act"} | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
        "intermediate_size": 21504, "num_hidden_layers": 62, "num_key_value_heads": 16, "vocab_size": 262208, "sliding_window": 1024,
        "sliding_window_pattern": 6, "max_position_embeddings": 131072, "rope_local_base_freq": 10000, "query_pre_attn_scalar": 168,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": True},
    # Gemma 4 31B, and 26B-A4B with the hidden size that gives its number of parameters.
    "gemma-4-31b": GEMMA4 | {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4},
    "gemma-4-26b-a4b": GEMMA4 | {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "qwen3.5-35b-a3b-fp8": HYBRID | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_experts": 256,
        "num_experts_per_tok": 8, "vocab_size": 248320,
        "rope_theta": 10000000, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}},
    "qwen3-next-80b-a3b-fp8": HYBRID | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512,
        "num_experts_per_tok": 10, "intermediate_size": 5120, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "v2-lite": LITE | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy",
                       "scoring_func": "softmax", "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "v2-lite-mtp": LITE | V3 | {"n_group": 1, "topk_group": 1},
    "v3-slice": LATENT | V3 | {
        "hidden_size": 7168, "num_hidden_layers": 6, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    },
    "qwen3-8b": QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36},
    "qwen3-8b-fp8": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    },
    # One scale per weight; activation scales are dynamic, or static as in files of ModelOpt.
    "qwen3-8b-fp8-tensor": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    },
    "qwen3-8b-fp8-static": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"},
    },
    "qwen3-8b-fp8-ue8m0": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    },
    "qwen3-0.6b": QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
                          "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-30b-a3b": QWEN | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48,
                             "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_key_value_heads": 4,
                             "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
                             "mlp_only_layers": []},
    "olmo2-7b": QWEN | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_hidden_layers": 32, "intermediate_size": 11008,
                        "num_key_value_heads": 32, "max_position_embeddings": 4096, "rope_theta": 500000, "vocab_size": 100352},
    "qwen3-8b-eagle3": QWEN | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
                               "draft_vocab_size": 32000},
}  # fmt: skip

out = pathlib.Path(sys.argv[1])
demo = pathlib.Path(__file__).resolve().parents[2] / "data/demo"
for name, shape in SHAPES.items():
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    shutil.copy(demo / "tokenizer.json", folder)
    shutil.copy(demo / "tokenizer_config.json", folder)
