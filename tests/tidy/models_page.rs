//! Checks that `docs/models.md` is up to date; it is generated from the support table of the crate `models`.
//!
//! `UPDATE_EXPECT=1 cargo test --test tidy models_page` writes the page.

use expect_test::expect_file;
use models::ModelArchitecture;
use models::support::{ArchitectureSupport, AttentionKind};
use std::fmt::Write as _;

const INTRODUCTION: &str = "# Models

TL;DR: the architecture string in `config.json` decides whether a model is served. `hadron serve MODEL` takes a folder or a hub id;
an unsupported architecture or field is rejected at start with its name. This page is written by `tests/tidy/models_page.rs`, with the rows of `models/src/support.rs`.
The endings `Model` and `ForSequenceClassification` of causal architectures are served by [pooling](embeddings.md).

```sh
hadron serve Qwen/Qwen3-8B
hadron serve /models/my-finetune --served-model-name my-model
```

## Architectures

";

const FORMATS: &str = "
## Formats

| Format | `config.json` | CPU | NVIDIA | AMD |
|---|---|---|---|---|
| f32, bf16, f16 | no `quantization_config` | yes | yes | emulated |
| FP8 e4m3, scales per block of 128 × 128 | `fp8` with `weight_block_size: [128, 128]`, also with `scale_fmt: ue8m0`; `compressed-tensors` with `strategy: block`; `modelopt` with `FP8_PB_WO`, for all layers or for those in `quantized_layers` | yes | yes | emulated |
| FP8 e4m3, scales per output channel | `compressed-tensors` with `strategy: channel`; `modelopt` with `FP8_PER_CHANNEL_PER_TOKEN`, for all layers or, with `MIXED_PRECISION`, for those in `quantized_layers` | yes | yes | emulated |
| FP8 e4m3, one scale per weight | `fp8` without `weight_block_size`; `compressed-tensors` with `strategy: tensor`; `modelopt` with `FP8`, for all layers or for those in `quantized_layers` | yes | yes | emulated |
| MXFP4, experts of gpt-oss | `mxfp4` | dequantised to 16 bits (f32 with `--dtype float32`) when loaded | yes: 4 bits in memory, decoded in kernels | emulated |

### Fields and scales of formats

The column `config.json` names the `quant_method` of `quantization_config`; `hf_quant_config.json` of ModelOpt is read as well. `compressed-tensors` may have several
groups, which select layers by name, regular expression or the class `Linear`. Scales of activations are dynamic, or static (`activation_scheme: static`, `dynamic: false`);
static ones need weights with one scale, or with one per output channel. Of the static scales of a layer's experts, stored separately or in one tensor, the largest is used. Weight scales of separate experts may be in one tensor (`experts.gate_up_proj_scale_inv`). Dynamic scales of weights with one scale are computed per token, or per 128 inputs of a token where cuBLASLt multiplies by block scales. GPUs quantise activations of more than 16 tokens; fewer tokens, most
experts on NVIDIA GPUs, and the CPU multiply by dequantised weights.

### MXFP4 on several ranks

Tensor parallelism may cut the groups of 32 inputs that share a scale in MXFP4: on 4 or 8 ranks, down projections of gpt-oss have 720 or 360 inputs and are kept in
16 bits on GPUs. Expert parallelism keeps all experts in 4 bits.

### Scales of the KV cache

An FP8 KV cache (`--kv-cache-dtype fp8`) uses the stored scales `k_scale` and `v_scale` (twice these on MI300X, whose FP8 numbers end at 240):
one of each per layer, or one per KV head. The output projection includes the value scales; if they differ between heads, its static activation scales become dynamic, and weights with
one scale per output channel, or with heads that are not a multiple of 128 channels, are dequantised on GPUs.

### Formats that are rejected

Rejected with the name of the field: other algorithms of ModelOpt (`NVFP4`, `W4A16_AWQ`, …), also of a single layer in `quantized_layers`; GPTQ, AWQ, bitsandbytes, MLX and GGUF.

### Kernels of attention

On GPUs, heads of 64, 128, 256 and 512 channels have fast attention kernels, with sliding windows and attention sinks; other head sizes use a reference kernel, which is slow.

### Weight files

Weights are safetensors files, in one file or with an index. `--dtype` selects f32, bf16 or f16 for activations; the default is the type in
`config.json`.

### AMD GPUs

No AMD GPU has run a kernel ([status](amd-status.md)). \"Emulated\" means that kernels are compiled for gfx942 and gfx950, that the same sources run in a SIMT
emulator on the host, and that their machine code runs in an emulator of both GPUs.

## Limits

| Architecture | Fields |
|---|---|
";

const PARALLELISM: &str = "
Sizes that do not divide among ranks are rejected at start, with the nearest size that works ([parallelism](parallelism.md)).
Images, audio and LoRA adapters are rejected with an error that names the field.
";

fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

fn attention(kind: AttentionKind) -> &'static str {
    match kind {
        AttentionKind::Gqa => "GQA",
        AttentionKind::Mla => "MLA",
        AttentionKind::GatedDelta => "GDN, GQA",
    }
}

fn parallelism(support: &ArchitectureSupport) -> &'static str {
    match support {
        ArchitectureSupport { is_draft_only: true, .. } => "with the target model",
        ArchitectureSupport { has_experts: true, .. } => "TP, EP, DP, DP attention",
        _ => "TP, DP",
    }
}

fn proposers(support: &ArchitectureSupport) -> &'static str {
    match support {
        ArchitectureSupport { is_draft_only: true, .. } => {
            "is the proposer (`--speculative-config`, method `eagle3`)"
        }
        ArchitectureSupport { has_mtp: true, .. } => "n-gram, draft model, EAGLE-3, MTP",
        _ => "n-gram, draft model, EAGLE-3",
    }
}

fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    page.push_str("| Architecture | Examples | Attention | FP8 weights | FP8 KV cache | Parallelism | Draft tokens | AMD |\n");
    page.push_str("|---|---|---|---|---|---|---|---|\n");
    for architecture in ModelArchitecture::ALL {
        let support = architecture.support();
        let _infallible = writeln!(
            page,
            "| `{architecture}` | {} | {} | {} | {} | {} | {} | emulated |",
            support.examples.join(", "),
            attention(support.attention),
            yes(support.formats.fp8_weights),
            yes(support.formats.fp8_kv_cache),
            parallelism(&support),
            proposers(&support),
        );
    }
    page.push_str(FORMATS);
    for architecture in ModelArchitecture::ALL {
        let limits = architecture.support().limits.join("; ");
        let _infallible = writeln!(page, "| `{architecture}` | {limits} |");
    }
    page.push_str(PARALLELISM);
    page
}

#[test]
fn models_page_is_up_to_date() {
    expect_file!["../../docs/models.md"].assert_eq(&page());
}
