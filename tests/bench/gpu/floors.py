#!/usr/bin/env python3
"""Prints the least time that an H200 needs for the loads of serving.md: floors.py SHAPES MODEL LOAD...

SHAPES is a folder that `shapes.py` has written, a load is `CONCURRENCY/INPUT/OUTPUT`. A step takes the time to read its bytes at
4.29 TB/s, or to compute its products at 790 TFLOP/s (1,580 with FP8 weights), whichever is longer; prefill and decode are added.
Bytes are weights, of experts those that the rows are routed to if all experts are equally likely, keys and values, and recurrent
states, read and written. A request at a time has its own steps; several start together.

    python3 tests/bench/gpu/shapes.py /tmp/shapes && python3 tests/bench/gpu/floors.py /tmp/shapes gpt-oss-20b 1/1024/256 64/1024/256
"""

import dataclasses
import json
import pathlib
import sys

BANDWIDTH, BF16_RATE, FP8_RATE = 4.29e12, 790e12, 1580e12
BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 17 / 32}


@dataclasses.dataclass(frozen=True)
class Product:
    """Multiplications per token of a layer, and the bytes of its weights."""

    elements: float
    dtype: str

    def bytes(self):
        return self.elements * BYTES[self.dtype]

    def seconds(self, tokens):
        return 2 * self.elements * tokens / (FP8_RATE if self.dtype == "fp8" else BF16_RATE)


@dataclasses.dataclass
class Model:
    dense: list  # products of every token
    expert: Product  # one expert
    experts: int
    per_token: int
    head: Product
    attention: list  # (key bytes and value bytes per token, FLOP per query and key, window or None) of each layer
    state_bytes: float  # recurrent state of a request, in all layers
    layers: int = 0


def model_of(config):
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    method = config.get("quantization_config", {}).get("quant_method")
    linear, expert_dtype = ("fp8", "fp8") if method == "fp8" else ("bf16", "mxfp4" if method == "mxfp4" else "bf16")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    every = config.get("full_attention_interval")  # gated delta nets between
    dense, attention, states = [], [], 0.0
    for layer in range(layers):
        if every and (layer + 1) % every:
            keys, values = (config[f"linear_num_{kind}_heads"] * config[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
            dense += [Product(hidden * (2 * keys + 3 * values), linear), Product(hidden * 2 * config["linear_num_value_heads"], "bf16")]
            states += values * config["linear_key_head_dim"] * 4
            continue
        period = config.get("sliding_window_pattern", 6 if "gemma" in config["model_type"] else 2)
        window = config.get("sliding_window")
        window = window if window and (layer % 2 == 0 if "gpt_oss" in config["model_type"] else (layer + 1) % period) else None
        dim, kv = config["head_dim"], kv_heads
        if window is None and "global_head_dim" in config:
            dim, kv = config["global_head_dim"], config["num_global_key_value_heads"]
        stored = 1 if window is None and config.get("attention_k_eq_v") else 2
        gates = 2 if every else 1
        dense.append(Product(hidden * dim * (heads * (1 + gates) + stored * kv), linear))
        attention.append((2 * kv * dim * 2, 4 * heads * dim, window))
    count = config.get("num_local_experts") or config.get("num_experts") or 0
    top = config.get("num_experts_per_tok") or config.get("top_k_experts") or 0
    inner = config.get("moe_intermediate_size", config.get("intermediate_size"))
    if shared := config.get("shared_expert_intermediate_size"):
        dense.append(Product(layers * 3 * hidden * shared, linear))
    if not count or config.get("enable_moe_block"):
        dense.append(Product(layers * 3 * hidden * config["intermediate_size"], linear))
    if count:
        dense.append(Product(layers * hidden * count, "bf16"))
    expert = Product(3 * hidden * inner if count else 0, expert_dtype)
    return Model(dense, expert, count, top, Product(hidden * config["vocab_size"], "bf16"), attention, states, layers if count else 0)


def step_seconds(model, tokens, rows, context):
    """Least time of a step with `tokens` tokens of `rows` requests that attend to `context` keys on average."""
    used = model.experts * (1 - (1 - model.per_token / model.experts) ** tokens) if model.experts else 0
    bytes_read = sum(p.bytes() for p in model.dense) + model.head.bytes() + model.layers * used * model.expert.bytes()
    compute = sum(p.seconds(tokens) for p in model.dense) + model.head.seconds(rows)
    compute += model.layers * model.per_token * model.expert.seconds(tokens)
    for key_value_bytes, flop, window in model.attention:
        keys = min(context, window) if window else context
        bytes_read += rows * key_value_bytes * keys
        compute += tokens * flop * keys / BF16_RATE
    bytes_read += rows * 2 * model.state_bytes
    return max(bytes_read / BANDWIDTH, compute)


def main():
    shapes, name, *loads = sys.argv[1:]
    model = model_of(json.loads((pathlib.Path(shapes) / name / "config.json").read_text()))
    for load in loads:
        rows, length, output = map(int, load.split("/"))
        prefill = step_seconds(model, rows * length, rows, length / 2)
        decode = step_seconds(model, rows, rows, length + output / 2)
        total = prefill + output * decode
        print(f"{name} {load}: TTFT {prefill * 1e3:.1f} ms of all, TPOT {decode * 1e3:.2f} ms, "
              f"output {rows * output / total:,.0f} tok/s, total {rows * (length + output) / total:,.0f} tok/s")  # fmt: skip


if __name__ == "__main__":
    main()
