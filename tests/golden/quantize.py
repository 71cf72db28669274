"""Writes the checkpoints in tests/data/quantized: tiny models quantised to FP8 by llm-compressor, ModelOpt and transformers.

    python tests/golden/quantize.py [CASE ...]

Needs transformers 5.23.0, torch 2.11.0, llmcompressor 0.14.0, compressed-tensors 0.20.0, nvidia-modelopt 0.47.0, accelerate
and safetensors. Rust never runs this script. Each folder has the files that the tool wrote, and `expected.safetensors` with
40 tokens and their logits in f32, twice:

    weights    transformers with the stored weights times their scales, activations unquantised, as on the CPU
    quantised  the tool's own model, which also quantises activations (and, with scales for it, the KV cache)

transformers quantises on GPUs only ("No GPU or XPU found. A GPU or XPU is needed for FP8 quantization."), although its
quantisation is independent of the device: the check is skipped. Its kernels need a GPU, so that `quantised` is computed in
bf16 with dequantised weights, and with activations rounded to FP8 per token and group of 128 channels, as the kernels do.
"""

import contextlib
import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parent.parent / "data" / "quantized"
VOCAB = 96
TOKENS = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The first layer has experts, the second one is dense.
MOE_SIZES = SIZES | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
MODELS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
TENSOR = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
CHANNEL = TENSOR | {"strategy": "channel"}
TOKEN = TENSOR | {"strategy": "token", "dynamic": True}
HEADS = TENSOR | {"strategy": "attn_head"}
BLOCK = TENSOR | {"strategy": "block", "block_structure": [128, 128]}
GROUP = TENSOR | {"strategy": "group", "group_size": 128, "dynamic": True}
# Blocks of 128 x 128 need larger layers.
BLOCK_SIZES = SIZES | {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 128,
}
# Projections with two blocks, so that each of two ranks has a whole block. One layer, because these weights are large.
TWO_BLOCK_SIZES = SIZES | {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "head_dim": 128,
}
BLOCK_MOE_SIZES = MOE_SIZES | TWO_BLOCK_SIZES | {"moe_intermediate_size": 256, "mlp_only_layers": []}


def sizes_of(name: str) -> dict:
    if name in BLOCK_CASES:
        return BLOCK_CASES[name]
    return MOE_SIZES if CASES[name][0] == "qwen3_moe" else SIZES


def one_group(weights: dict, activations: dict) -> dict:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}


def model_of(kind: str, sizes: dict, folder: Path):
    """Class and folder of a model with random weights in bf16, which it writes."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, architectures=[MODELS[kind]], **sizes)
    model = getattr(transformers, MODELS[kind])(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            base = 1.0 if "norm" in name else 0.0
            parameter.copy_(base + torch.randn_like(parameter) * (0.05 if "norm" in name else 1.4 * spread))
    # llm-compressor reads the configuration again from the model's folder.
    model.to(torch.bfloat16).save_pretrained(folder)
    return type(model), folder


def loaded(model):
    """The model in bf16, with experts in one tensor per layer."""
    cls, folder = model
    return cls.from_pretrained(folder, dtype=torch.bfloat16)


def loaded_for_calibration(model):
    """The model in bf16, with linear layers for each expert, as llm-compressor needs them."""
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe

    cls, folder = model
    with load_quantizable_moe(cls):
        return cls.from_pretrained(folder, dtype=torch.bfloat16)


def batches():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (1, 64), generator=generator) for _ in range(4)]


def llm_compressor(model, folder: Path, groups: dict | str, cache: dict | None):
    """Quantises with a recipe of `groups`, or with the preset scheme of this name. The weights and the calibrated scales are
    rounded by the tool."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = loaded_for_calibration(model)
    ignored = ["lm_head", "re:.*mlp.gate$"]
    linear = {"scheme": groups, "targets": "Linear"} if isinstance(groups, str) else {"config_groups": groups}
    recipe = QuantizationModifier(**linear, ignore=ignored, kv_cache_scheme=cache)
    rows = [{"input_ids": b[0].tolist(), "attention_mask": [1] * b.shape[1]} for b in batches()]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    processor = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")
    oneshot(
        model=model,
        processor=processor,
        dataset=Dataset.from_list(rows),
        recipe=recipe,
        num_calibration_samples=4,
        max_seq_length=64,
    )
    logits = model(tokens()).logits.float()
    model.save_pretrained(folder, save_compressed=True)
    return logits


def modelopt(model, folder: Path, preset: str = "FP8_DEFAULT_CFG", overrides: list = (), cache: bool = False):
    """Quantises with the configuration `preset` of ModelOpt and the quantisers `overrides`, of which later ones win."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = loaded(model)
    config = copy.deepcopy(getattr(mtq, preset))
    config["quant_cfg"].extend(overrides)
    if cache:
        config = mtq.utils.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
    model = mtq.quantize(model, config, lambda m: [m(b) for b in batches()])
    logits = model(tokens()).logits.float()
    export_hf_checkpoint(model, export_dir=folder)
    return logits


def transformers_fp8(model, folder: Path):
    """Quantises with `FineGrainedFP8Config`. The model that transformers quantised cannot run on a CPU."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    cls, source = model
    check = FineGrainedFP8HfQuantizer.validate_environment
    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **kwargs: None
    try:
        config = transformers.FineGrainedFP8Config()
        cls.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config).save_pretrained(folder)
    finally:
        FineGrainedFP8HfQuantizer.validate_environment = check


@contextlib.contextmanager
def rounded_activations():
    """Rounds the inputs of all linear layers except the LM head and the router to FP8, with one scale per token and group of
    128 channels."""
    linear = torch.nn.functional.linear

    def rounded(x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)

    def quantised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_quantised = len(weight) not in (VOCAB, MOE_SIZES["num_experts"])
        return linear(rounded(x) if is_quantised else x, weight, bias)

    torch.nn.functional.linear = quantised
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(3))


CASES = {
    "llm_compressor-static-kv": (
        "llama",
        lambda m, f: llm_compressor(m, f, one_group(TENSOR, TENSOR), TENSOR),
    ),
    "llm_compressor-groups": (
        "qwen3",
        lambda m, f: llm_compressor(
            m,
            f,
            {
                "group_0": {"targets": ["re:.*self_attn.*_proj$"], "weights": CHANNEL, "input_activations": TOKEN},
                "group_1": {"targets": ["re:.*mlp.*_proj$"], "weights": TENSOR, "input_activations": TENSOR},
            },
            None,
        ),
    ),
    "llm_compressor-block-heads": (
        "qwen3",
        lambda m, f: llm_compressor(m, f, one_group(BLOCK, GROUP), HEADS),
    ),
    "llm_compressor-dynamic": ("llama", lambda m, f: llm_compressor(m, f, one_group(TENSOR, TOKEN), None)),
    "llm_compressor-channels-static-heads": (
        "qwen3",
        lambda m, f: llm_compressor(m, f, one_group(CHANNEL, TENSOR), HEADS),
    ),
    # A group states its format: otherwise FP8 groups with quantised activations have the same one.
    "llm_compressor-mixed": (
        "llama",
        lambda m, f: llm_compressor(
            m,
            f,
            {
                "group_0": {
                    "targets": ["re:.*self_attn.*_proj$"],
                    "weights": CHANNEL,
                    "input_activations": TOKEN,
                    "format": "float-quantized",
                },
                "group_1": {
                    "targets": ["re:.*(gate|up)_proj$"],
                    "weights": TENSOR,
                    "input_activations": TENSOR,
                    "format": "naive-quantized",
                },
                "group_2": {
                    "targets": ["re:.*down_proj$"],
                    "weights": TENSOR,
                    "input_activations": TOKEN,
                    "format": "float-quantized",
                },
            },
            None,
        ),
    ),
    "llm_compressor-experts": (
        "qwen3_moe",
        lambda m, f: llm_compressor(m, f, "FP8_DYNAMIC", None),
    ),
    "llm_compressor-block-experts": ("qwen3_moe", lambda m, f: llm_compressor(m, f, "FP8_BLOCK", None)),
    "modelopt-kv": ("llama", lambda m, f: modelopt(m, f, cache=True)),
    "modelopt-experts": ("qwen3_moe", lambda m, f: modelopt(m, f)),
    "modelopt-channels": ("qwen3", lambda m, f: modelopt(m, f, "FP8_PER_CHANNEL_PER_TOKEN_CFG")),
    "modelopt-channel-experts": ("qwen3_moe", lambda m, f: modelopt(m, f, "FP8_PER_CHANNEL_PER_TOKEN_CFG")),
    "modelopt-blocks": ("qwen3", lambda m, f: modelopt(m, f, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")),
    "modelopt-block-experts": ("qwen3_moe", lambda m, f: modelopt(m, f, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")),
    # Attention has scales per channel and token, the experts and the dense MLP have one scale, and the key projection of
    # layer 1 is not quantised: MIXED_PRECISION.
    "modelopt-mixed-experts": (
        "qwen3_moe",
        lambda m, f: modelopt(
            m,
            f,
            overrides=[
                {"quantizer_name": "*self_attn.*weight_quantizer", "cfg": {"num_bits": (4, 3), "axis": 0}},
                {
                    "quantizer_name": "*self_attn.*input_quantizer",
                    "cfg": {"num_bits": (4, 3), "axis": None, "type": "dynamic", "block_sizes": {-1: None}},
                },
                {"quantizer_name": "*layers.1.self_attn.k_proj*", "enable": False},
            ],
        ),
    ),
    "transformers-blocks": ("qwen3", transformers_fp8),
    "transformers-block-experts": ("qwen3_moe", transformers_fp8),
}
BLOCK_CASES = {
    "llm_compressor-block-heads": BLOCK_SIZES,
    "llm_compressor-block-experts": BLOCK_MOE_SIZES,
    "modelopt-blocks": TWO_BLOCK_SIZES,
    "modelopt-block-experts": BLOCK_MOE_SIZES,
    "transformers-blocks": TWO_BLOCK_SIZES,
    "transformers-block-experts": BLOCK_MOE_SIZES,
}


def scaled(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`value` times `scale`: one scale, one per row (also without the second dimension), or one per block of 128 x 128
    (also as `[rows, 1, columns, 1]`)."""
    scale = scale.to(torch.float32)
    if scale.dim() == 1 and len(scale) == len(value):
        scale = scale[:, None]
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0]
    if list(scale.shape) == [n // 128 for n in value.shape]:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return value.to(torch.float32) * scale


def scale_of(stored: dict, name: str) -> torch.Tensor:
    """Scale of the weight `name`: of its own, or in the tensor with the scales of all experts of a layer."""
    for suffix in ("_scale", "_scale_inv"):
        if name + suffix in stored:
            return stored[name + suffix]
    if ".experts." not in name:
        return torch.ones(())
    layer, _, expert = name.partition(".experts.")
    index, projection, _ = expert.split(".")
    fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
    scales = stored.get(f"{layer}.experts.{fused}_scale_inv")
    if scales is None:
        return torch.ones(())
    scale = scales[int(index)]
    return scale if fused == "down_proj" else scale.chunk(2)[projection == "up_proj"]


def dequantised(kind: str, sizes: dict, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of transformers for the stored weights times their scales."""
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for name, value in stored.items():
        if not name.endswith(("scale", "scale_inv")):
            weights[name] = scaled(value, scale_of(stored, name))
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, MODELS[kind])(config).to(dtype).eval()
    model.load_state_dict(fused_experts(weights))
    return model(tokens()).logits.float()


def fused_experts(weights: dict) -> dict:
    """Replaces the weights of single experts by the tensors of transformers, which contain all experts of a layer."""
    found = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in sorted({name.partition(".experts.")[0] for name in weights if ".experts." in name}):
        expert = lambda e, projection: weights[f"{layer}.experts.{e}.{projection}.weight"]
        each = range(MOE_SIZES["num_experts"])
        found[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat([expert(e, "gate_proj"), expert(e, "up_proj")]) for e in each])
        found[f"{layer}.experts.down_proj"] = torch.stack([expert(e, "down_proj") for e in each])
    return found


@torch.no_grad()
def write(name: str) -> None:
    kind, quantise = CASES[name]
    with tempfile.TemporaryDirectory() as path:
        found = quantise(model_of(kind, sizes_of(name), Path(path) / "source"), Path(path))
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in ("config.json", "hf_quant_config.json", "model.safetensors"):
            if (Path(path) / file).exists():
                shutil.copyfile(Path(path) / file, folder / file)
    if found is None:
        with rounded_activations():
            found = dequantised(kind, sizes_of(name), folder, torch.bfloat16)
    weights = dequantised(kind, sizes_of(name), folder, torch.float32)
    expected = {"tokens": tokens()[0].to(torch.int32), "weights": weights[0], "quantised": found[0]}
    save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
    with safe_open(folder / "model.safetensors", "pt") as file:
        dtypes = {str(file.get_tensor(key).dtype) for key in file.keys()}
    print(name, sorted(dtypes), json.dumps(sorted(p.name for p in folder.iterdir())))
    difference = (expected["weights"] - expected["quantised"]).abs()
    print("  mean difference of logits", float(difference.mean()), "largest", float(difference.max()))


for case in sys.argv[1:] or CASES:
    write(case)
