"""The Qwen3 decoder in plain torch functions, for training: f32 master weights, bf16 maths as served."""

import json
import math

import torch
import torch.nn.functional as F

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
    "vocab_size": 512, "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "intermediate_size": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": None, "max_position_embeddings": 2048, "tie_word_embeddings": True, "attention_bias": False,
    "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 6, "use_cache": True,
    "initializer_range": 0.02, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
}
GENERATION_CONFIG = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0, "max_new_tokens": 256}
EPS = CONFIG["rms_norm_eps"]
HEADS, KV_HEADS, HEAD_DIM = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
BLOCK = [  # the order in which `block` takes a layer's weights
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
    "self_attn.k_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
]


def shapes():
    """Maps each checkpoint tensor name to its shape, in a fixed order."""
    h, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = [(h,), (q, h), (kv, h), (kv, h), (h, q), (HEAD_DIM,), (HEAD_DIM,), (h,), (inner, h), (inner, h), (h, inner)]
    out = {"model.embed_tokens.weight": (CONFIG["vocab_size"], h)}
    for i in range(CONFIG["num_hidden_layers"]):
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in zip(BLOCK, layer)}
    return out | {"model.norm.weight": (h,)}


def initial_weights(device, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            value = torch.ones(shape)
        else:
            std = 0.04 if "embed" in name else shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:  # keep the residual stream's scale independent of depth
                std /= math.sqrt(2 * CONFIG["num_hidden_layers"])
            value = torch.randn(shape, generator=generator) * std
        weights[name] = value.to(device).requires_grad_()
    return weights


def rms_norm(x, weight):
    wide = x.float()
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def rope_tables(length, device):
    inverse = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)
    angle = torch.outer(torch.arange(length, device=device).float(), inverse)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def block(x, cos, sin, norm1, wq, wk, wv, wo, q_norm, k_norm, norm2, gate, up, down):
    rows, length, _ = x.shape
    cast = lambda w: w.to(x.dtype)
    heads = lambda y: y.view(rows, length, -1, HEAD_DIM)
    h = rms_norm(x, norm1)
    q = rotate(rms_norm(heads(F.linear(h, cast(wq))), q_norm).transpose(1, 2), cos, sin)
    k = rotate(rms_norm(heads(F.linear(h, cast(wk))), k_norm).transpose(1, 2), cos, sin)
    v = heads(F.linear(h, cast(wv))).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), cast(wo))
    h = rms_norm(x, norm2)
    return x + F.linear(F.silu(F.linear(h, cast(gate))) * F.linear(h, cast(up)), cast(down))


def embed(ids, embedding):
    """Embedding lookup as a matrix product: exact, and its gradient is one product too, without a sort or a synchronisation."""
    one_hot = (ids[..., None] == torch.arange(embedding.shape[0], device=ids.device)).bfloat16()
    return one_hot @ embedding.bfloat16()


def trunk(weights, ids, tables, run_block=block, run_embed=embed):
    """Hidden states [rows, length, hidden_size] before the last norm."""
    cos, sin = (t[: ids.shape[1]] for t in tables)
    x = run_embed(ids, weights["model.embed_tokens.weight"])
    for i in range(CONFIG["num_hidden_layers"]):
        x = run_block(x, cos, sin, *(weights[f"model.layers.{i}.{name}.weight"] for name in BLOCK))
    return x


def logits(x, norm, embedding):
    return F.linear(rms_norm(x, norm), embedding.to(x.dtype)).float()


def export(weights, folder):
    """Writes config.json, generation_config.json and the bf16 model.safetensors."""
    from safetensors.torch import save_file

    save_file({name: w.detach().bfloat16().cpu().contiguous() for name, w in weights.items()},
              f"{folder}/model.safetensors", metadata={"format": "pt"})
    for name, value in (("config", CONFIG), ("generation_config", GENERATION_CONFIG)):
        with open(f"{folder}/{name}.json", "w") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
