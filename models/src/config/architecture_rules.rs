//! Kinds and rules that the rows of `architecture_traits.rs` select.

/// Implementation of the decoder layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecoderLayerKind {
    /// GQA, then a gated MLP (`llama.rs`).
    Llama,
    /// GQA with QK norm, then a gated MLP (`qwen3.rs`).
    Qwen3,
    /// GQA, then experts or a gated MLP (`qwen3_moe.rs`).
    Qwen3Moe,
    /// Gated delta net or GQA, then experts or a gated MLP (`qwen3_next.rs`).
    Qwen3Next,
    /// GQA whose layers may share KV caches, then experts in parallel with a gated MLP, and per-layer inputs (`gemma4.rs`).
    Gemma4,
    /// MLA, then experts or a gated MLP (`deepseek.rs`).
    Deepseek,
    /// Draft models, which only run with a target model (`eagle3.rs`).
    DraftOnly,
}

/// Special tokens and chat template of synthetic checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SynthTokenizerKind {
    /// `<|im_start|>` and `<|im_end|>`.
    ChatMl,
    /// Llama 3.
    Llama3,
    /// `[INST]`.
    Mistral,
    /// Phi-3 and Phi-4.
    Phi,
    /// Gemma 3.
    Gemma,
    /// Gemma 4.
    Gemma4,
    /// GLM-4.
    Glm,
    /// Harmony format of gpt-oss.
    Harmony,
    /// DeepSeek-V2 and V3.
    Deepseek,
}

/// Layers with a sliding window if there is no list of layer types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowedLayerRule {
    /// No layer. A list of layer types must agree.
    Absent,
    /// All layers, if there is a window. A list of layer types must agree.
    All,
    /// Layers with an even index.
    Even,
    /// All layers except every fourth.
    ExceptEveryFourth,
    /// All layers except every n-th, where n is `sliding_window_pattern`.
    ExceptEveryNth,
    /// All layers except every sixth. The last layer has no window, whatever the list of layer types contains.
    ExceptEverySixthAndLast,
    /// Layers from the index `max_window_layers` on.
    FromIndex,
    /// Layers with an even index below `max_window_layers`.
    EvenBelowIndex,
    /// Layers without RoPE.
    WithoutRope,
}

/// Biases of the attention projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionBiasRule {
    /// The output projection has no bias; those of query, key and value have biases if `qkv` is true.
    Fixed { qkv: bool },
    /// The field `qkv_bias` (default true) tells whether query, key and value have biases; the output projection has none.
    QkvField,
    /// The field `attention_bias` (default true) tells whether query, key and value have biases; the output projection has
    /// none.
    QkvOnly,
    /// The field `attention_bias` tells whether all projections have biases.
    Field { default: bool },
    /// The field `use_bias` tells whether all projections of attention and of dense MLPs have biases.
    SharedField,
    /// `attention_bias` (default true) applies to query, key and value, `attention_out_bias` to the output.
    TwoFields,
}

impl AttentionBiasRule {
    /// Whether the field `attention_bias` is read.
    pub(crate) const fn reads_field(self) -> bool {
        matches!(self, Self::Field { .. } | Self::QkvOnly | Self::TwoFields)
    }
}

/// Projections whose rows are stacked in one tensor of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StackedRowKind {
    /// No projections.
    Absent,
    /// `gate_up_proj` of dense MLPs.
    GateUp,
    /// `qkv_proj` of attention and `gate_up_proj` of dense MLPs.
    QkvAndGateUp,
}

/// Tensors of the experts of a layer in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredExpertKind {
    /// Each expert has its own tensors.
    Separate,
    /// Two tensors with the matrices of all experts.
    Stacked,
    /// Two tensors with the transposed matrices of all experts.
    Transposed,
}

/// RMS norm of queries and keys before RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNormKind {
    /// No norm.
    Absent,
    /// A norm per head, with the same weights for all heads.
    PerHead,
    /// One norm over all query heads, and one over all key heads.
    AllHeads,
}
