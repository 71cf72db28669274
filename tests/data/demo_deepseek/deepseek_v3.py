"""The DeepSeek-V3 decoder and its multi-token-prediction (MTP) module in plain torch functions, for training: f32 master
weights, bf16 maths as served. All experts are computed for every token and the unselected ones have weight 0: with
so few and so small experts this costs less than gathering, and every shape is fixed."""

import json
import math

import torch
import torch.nn.functional as F

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 5, "num_nextn_predict_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "intermediate_size": 384, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 3, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_interleave": True, "rope_scaling": None, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "attention_bias": False, "attention_dropout": 0.0, "use_cache": True, "initializer_range": 0.02, "eos_token_id": 2,
    "pad_token_id": 0, "bos_token_id": None,
}
GENERATION_CONFIG = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0, "max_new_tokens": 256}
EPS = CONFIG["rms_norm_eps"]
LAYERS, DENSE_LAYERS, HEADS = CONFIG["num_hidden_layers"], CONFIG["first_k_dense_replace"], CONFIG["num_attention_heads"]
LATENT, NOPE, ROPE, VALUE = (CONFIG[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
EXPERTS, GROUPS, INNER = CONFIG["n_routed_experts"], CONFIG["n_group"], CONFIG["moe_intermediate_size"]
SHARED = CONFIG["n_shared_experts"]
DRAFT = f"model.layers.{LAYERS}."
BIAS = "mlp.gate.e_score_correction_bias"
ATTENTION = [  # the order in which blocks take a layer's weights; routed experts are stacked until `export`
    "input_layernorm", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj", "post_attention_layernorm",
]
DENSE = ATTENTION + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SPARSE = ATTENTION + [
    "mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj", "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj",
]


def shapes():
    """Maps each trained tensor's name to its shape, in a fixed order."""
    h, rank, inner, shared = CONFIG["hidden_size"], CONFIG["q_lora_rank"], CONFIG["intermediate_size"], SHARED * INNER
    attention = [(h,), (rank, h), (rank,), (HEADS * (NOPE + ROPE), rank), (LATENT + ROPE, h), (LATENT,),
                 (HEADS * (NOPE + VALUE), LATENT), (h, HEADS * VALUE), (h,)]
    dense = attention + [(inner, h), (inner, h), (h, inner)]
    sparse = attention + [(EXPERTS, h), (EXPERTS, INNER, h), (EXPERTS, INNER, h), (EXPERTS, h, INNER),
                          (shared, h), (shared, h), (h, shared)]
    out = {"model.embed_tokens.weight": (CONFIG["vocab_size"], h)}
    for i in range(LAYERS + 1):
        names, layer = (DENSE, dense) if i < DENSE_LAYERS else (SPARSE, sparse)
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in zip(names, layer)}
    out |= {DRAFT + "enorm.weight": (h,), DRAFT + "hnorm.weight": (h,), DRAFT + "eh_proj.weight": (h, 2 * h),
            DRAFT + "shared_head.norm.weight": (h,)}
    return out | {"model.norm.weight": (h,), "lm_head.weight": (CONFIG["vocab_size"], h)}


def initial_weights(device, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            value = torch.ones(shape)
        else:
            std = 0.04 if "embed" in name or "lm_head" in name else shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:  # keep the residual stream's scale independent of depth
                std /= math.sqrt(2 * LAYERS)
            if name.endswith("mlp.gate.weight"):  # scores begin near a half, so choices begin even
                std *= 0.3
            value = torch.randn(shape, generator=generator) * std
        weights[name] = value.to(device).requires_grad_()
    return weights


def sparse_layers():
    """Indices of the layers with a router; the MTP module is the last one."""
    return range(DENSE_LAYERS, LAYERS + 1)


def initial_biases(device):
    """Bias of the scores in the selection of experts: [layers with a router, experts]."""
    return torch.zeros(len(sparse_layers()), EXPERTS, device=device)


def rms_norm(x, weight):
    wide = x.float()
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotate(x, cos, sin):
    """Applies RoPE to neighbouring channels; the output has the first channels of all pairs before the second ones."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def rope_tables(length, device, dtype=torch.bfloat16):
    inverse = CONFIG["rope_theta"] ** (-torch.arange(0, ROPE, 2, device=device).float() / ROPE)
    angle = torch.outer(torch.arange(length, device=device).float(), inverse)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def attend(x, cos, sin, norm, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, wo):
    rows, length, _ = x.shape
    linear = lambda y, w: F.linear(y, w.to(y.dtype))
    h = rms_norm(x, norm)
    q = linear(rms_norm(linear(h, q_a), q_norm), q_b).view(rows, length, HEADS, NOPE + ROPE).transpose(1, 2)
    q = torch.cat((q[..., :NOPE], rotate(q[..., NOPE:], cos, sin)), dim=-1)
    latent = linear(h, kv_a)
    made = linear(rms_norm(latent[..., :LATENT], kv_norm), kv_b).view(rows, length, HEADS, NOPE + VALUE).transpose(1, 2)
    turned = rotate(latent[..., LATENT:], cos, sin)[:, None].expand(-1, HEADS, -1, -1)
    k = torch.cat((made[..., :NOPE], turned), dim=-1)
    v = F.pad(made[..., NOPE:], (0, NOPE + ROPE - VALUE))  # fast attention needs values as wide as keys
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :VALUE]
    return x + linear(mixed.transpose(1, 2).reshape(rows, length, HEADS * VALUE), wo)


def first_ones(values, count):
    """Whether each element of the last axis is among the `count` largest. Compares all pairs, which compiles to one kernel; a sort does not."""
    index = torch.arange(values.shape[-1], device=values.device)
    this, other = values[..., :, None], values[..., None, :]
    ahead = (other > this) | ((other == this) & (index[None, :] < index[:, None]))
    return ahead.sum(-1) < count


def route(h, gate, bias):
    """Weights of all experts, most of them zero, and whether each is selected: both [..., experts], f32 and bool."""
    scores = F.linear(h.float(), gate.to(h.dtype).float()).sigmoid()
    choice = scores.detach() + bias
    each = EXPERTS // GROUPS
    parts = choice.unflatten(-1, (GROUPS, each))
    two_largest = (parts * first_ones(parts, 2)).sum(-1)
    kept = first_ones(two_largest, CONFIG["topk_group"])[..., None].expand(*parts.shape).flatten(-2)
    chosen = first_ones(choice.masked_fill(~kept, -math.inf), CONFIG["num_experts_per_tok"])
    weights = scores * chosen
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * CONFIG["routed_scaling_factor"], chosen


def dense_block(x, cos, sin, *weights):
    x = attend(x, cos, sin, *weights[:8])
    norm, gate, up, down = weights[8:]
    h = rms_norm(x, norm)
    return x + F.linear(F.silu(F.linear(h, gate.to(h.dtype))) * F.linear(h, up.to(h.dtype)), down.to(h.dtype))


def sparse_block(x, cos, sin, mask, bias, *weights):
    """The residual stream, and the number of tokens in `mask` (1 or 0) routed to each expert."""
    x = attend(x, cos, sin, *weights[:8])
    norm, router, gates, ups, downs, shared_gate, shared_up, shared_down = weights[8:]
    h = rms_norm(x, norm)
    share, chosen = route(h, router, bias)
    gate = torch.cat((gates.flatten(0, 1), shared_gate)).to(h.dtype)
    up = torch.cat((ups.flatten(0, 1), shared_up)).to(h.dtype)
    down = torch.cat((downs.permute(1, 0, 2).flatten(1), shared_down), dim=1).to(h.dtype)
    share = torch.cat((share, torch.ones_like(share[..., :SHARED])), dim=-1).to(h.dtype)
    inner = F.silu(F.linear(h, gate)) * F.linear(h, up)
    inner = (inner.unflatten(-1, (EXPERTS + SHARED, INNER)) * share[..., None]).flatten(-2)
    return x + F.linear(inner, down), (chosen * mask[..., None]).sum((0, 1))


def join(embedded, x, norm, embedding_norm, hidden_norm, projection):
    """Input of the MTP module: a token's embedding and the normed hidden state of the token before it."""
    both = torch.cat((rms_norm(embedded, embedding_norm), rms_norm(rms_norm(x, norm), hidden_norm)), dim=-1)
    return F.linear(both, projection.to(both.dtype))


def embed(ids, embedding, dtype=torch.bfloat16):
    """Embedding lookup as a matrix product: exact, and its gradient is one product too, without a sort or a synchronisation."""
    one_hot = (ids[..., None] == torch.arange(embedding.shape[0], device=ids.device)).to(dtype)
    return one_hot @ embedding.to(dtype)


class Parts:
    """The functions above, each wrapped by `compiled`, for example `torch.compile`."""

    def __init__(self, compiled=lambda f: f):
        self.dense_block, self.sparse_block, self.join, self.embed = map(compiled, (dense_block, sparse_block, join, embed))


def layer_weights(weights, i, names):
    return (weights[f"model.layers.{i}.{name}.weight"] for name in names)


def trunk(weights, biases, embedded, mask, tables, parts):
    """Hidden states [rows, length, hidden_size] before the last norm, and the number of tokens per expert of each MoE layer."""
    cos, sin = (t[: embedded.shape[1]] for t in tables)
    x, loads = embedded, []
    for i in range(LAYERS):
        if i < DENSE_LAYERS:
            x = parts.dense_block(x, cos, sin, *layer_weights(weights, i, DENSE))
        else:
            x, load = parts.sparse_block(x, cos, sin, mask, biases[i - DENSE_LAYERS], *layer_weights(weights, i, SPARSE))
            loads.append(load)
    return x, loads


def draft(weights, biases, embedded, x, mask, tables, parts):
    """Hidden states of the MTP module: at i for the token i + 2, from the trunk's `x` at i and the embedding of i + 1."""
    cos, sin = (t[: x.shape[1]] for t in tables)
    own = (weights[DRAFT + name + ".weight"] for name in ("enorm", "hnorm", "eh_proj"))
    y = parts.join(embedded, x, weights["model.norm.weight"], *own)
    return parts.sparse_block(y, cos, sin, mask, biases[-1], *layer_weights(weights, LAYERS, SPARSE))


def logits(x, norm, head):
    return F.linear(rms_norm(x, norm), head.to(x.dtype)).float()


def both_logits(weights, biases, ids, tables):
    """Logits [rows, length, vocab_size] of the next tokens and [rows, length - 1, vocab_size] of the tokens after those."""
    parts, dtype = Parts(), tables[0].dtype
    mask = torch.ones(ids.shape, device=ids.device)
    embedded = embed(ids, weights["model.embed_tokens.weight"], dtype)
    x, _ = trunk(weights, biases, embedded, mask, tables, parts)
    y, _ = draft(weights, biases, embedded[:, 1:], x[:, :-1], mask[:, 1:], tables, parts)
    head = weights["lm_head.weight"]
    return logits(x, weights["model.norm.weight"], head), logits(y, weights[DRAFT + "shared_head.norm.weight"], head)


def checkpoint(weights, biases):
    """Tensors as DeepSeek-V3 stores them: experts one by one, biases in f32, and the embedding and output head again for the MTP module."""
    out = {}
    for name, w in weights.items():
        w = w.detach().bfloat16()
        if ".experts." not in name:
            out[name] = w
            continue
        prefix, which = name.split("experts.")
        out |= {f"{prefix}experts.{e}.{which}": one for e, one in enumerate(w)}
    out |= {f"model.layers.{i}.{BIAS}": bias.detach().float() for i, bias in zip(sparse_layers(), biases)}
    out[DRAFT + "embed_tokens.weight"] = out["model.embed_tokens.weight"]
    out[DRAFT + "shared_head.head.weight"] = out["lm_head.weight"]
    return {name: w.cpu().clone().contiguous() for name, w in out.items()}


def from_checkpoint(stored, device):
    """Weights and biases as `checkpoint` stored them, in f32."""
    weights = {}
    for name in shapes():
        if ".experts." in name:
            prefix, which = name.split("experts.")
            w = torch.stack([stored[f"{prefix}experts.{e}.{which}"] for e in range(EXPERTS)])
        else:
            w = stored[name]
        weights[name] = w.float().to(device)
    return weights, torch.stack([stored[f"model.layers.{i}.{BIAS}"] for i in sparse_layers()]).to(device)


def export(weights, biases, folder):
    """Writes config.json, generation_config.json and model.safetensors."""
    from safetensors.torch import save_file

    save_file(checkpoint(weights, biases), f"{folder}/model.safetensors", metadata={"format": "pt"})
    for name, value in (("config", CONFIG), ("generation_config", GENERATION_CONFIG)):
        with open(f"{folder}/{name}.json", "w") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
