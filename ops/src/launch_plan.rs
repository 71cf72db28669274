//! Launch plans: which ops are fused and which run on the secondary stream, decided from shapes.
//!
//! In f32, results never depend on a plan: a fused op returns what the separate ops return. In 16-bit types, the
//! plans of shared experts round their sums differently.

use device::DType;
use kernels::{
    AttentionMetadata, FusedLinear, KernelBackend, KvLayout, PackedMatrix, PrologueLinear,
    QkNormRopeArgs, RopeAttention,
};

/// Maximum number of rows for which RoPE, KV write and decode attention are one launch. More rows would be
/// slower, because the thread block of each split of the keys computes norm and RoPE of the queries again.
/// Time per layer on an H200 with two launches and with one launch: Qwen3-8B at a context of 1,088 tokens,
/// 103.4 and 102.4 µs for 1 row, 112.1 and 116.5 µs for 4 rows; Qwen3-0.6B, 23.0 and 23.8 µs for 2 rows.
const ROPE_ATTENTION_ROWS: usize = 1;
/// Maximum number of tokens for which shared experts are computed as routed experts on GPUs: that saves
/// launches, but reads the weights of the shared experts once per group of tokens that one thread block
/// processes (kernels/KERNELS.md, MoE).
const FUSED_SHARED_EXPERT_TOKENS: usize = 16;

/// Decides how a linear layer is launched together with the ops before and after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearFusionPlan<'a> {
    pub(crate) backend: &'a KernelBackend,
    pub(crate) rows: usize,
    pub(crate) dtype: DType,
    pub(crate) weight: &'a PackedMatrix,
}

impl LinearFusionPlan<'_> {
    /// Whether the linear layer can be fused with a residual addition or a gate activation after it, and with
    /// a norm before it whose weight has the type of the activations.
    pub(crate) fn is_fused(self) -> bool {
        FusedLinear::supports(self.backend, self.rows, self.dtype, self.weight)
    }

    /// Whether the linear layer can be fused with a norm before it, whose weight has type `norm`.
    pub(crate) fn is_fused_with_norm(self, norm: DType) -> bool {
        norm == self.dtype && self.is_fused()
    }

    /// Whether the linear layer can be fused with a gate activation after it.
    pub(crate) fn is_fused_with_gate(self) -> bool {
        FusedLinear::supports_gate(self.backend, self.rows, self.dtype, self.weight)
    }

    /// Whether the linear layer can run the op before it (norm or gated activation) as a prologue that stores its
    /// output in fp8.
    pub(crate) fn has_prologue(self) -> bool {
        PrologueLinear::supports(self.backend, self.rows, self.dtype, self.weight)
    }
}

/// Whether RoPE, KV write and attention run as one launch.
pub(crate) fn fuses_rope_attention(
    backend: &KernelBackend,
    qk: &QkNormRopeArgs<'_>,
    rows: &AttentionMetadata<'_>,
    layout: &KvLayout,
) -> bool {
    rows.len() <= ROPE_ATTENTION_ROWS && RopeAttention::supports(backend, qk, rows, layout)
}

/// How the shared experts, to which every token is routed, are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedExpertPlan {
    /// Shared experts run as routed experts with weight 1, in the launches of the routed experts.
    Fused,
    /// Shared experts run as an MLP on the secondary stream, while routed experts are computed.
    SecondaryStream,
    /// Shared experts run as an MLP after the routed experts.
    Separate,
}

impl SharedExpertPlan {
    /// Returns the plan for `tokens` tokens. `on_16_bit_gpu`: the device is a GPU, and activations have a
    /// 16-bit type; in f32, the plan does not depend on the number of tokens, so that results do not depend on
    /// the batch. `fusable`: shared experts are packed with the routed experts.
    /// `separate`: data types of the weights of the shared experts packed as separate MLPs. `exchanges`:
    /// tokens are exchanged with other ranks between routing and the sum; with an exchange the secondary
    /// stream makes a step 6 % slower (two H200, DP attention with EP).
    ///
    /// The secondary stream adds two gaps between launches. For few tokens, separate MLPs with 16-bit weights
    /// are as fast, because their weights are prefetched while the preceding launches end; fp8 weights are
    /// not prefetched.
    pub(crate) fn new(
        on_16_bit_gpu: bool,
        tokens: usize,
        fusable: bool,
        separate: impl IntoIterator<Item = DType>,
        exchanges: bool,
    ) -> Self {
        let is_small_batch = tokens <= FUSED_SHARED_EXPERT_TOKENS;
        if fusable && (is_small_batch || !on_16_bit_gpu) {
            return Self::Fused;
        }
        let overlaps = |dtype| on_16_bit_gpu && (!is_small_batch || dtype == DType::F8E4M3);
        if !exchanges && separate.into_iter().all(overlaps) {
            Self::SecondaryStream
        } else {
            Self::Separate
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SharedExpertPlan::{Fused, SecondaryStream, Separate};

    #[test]
    fn shared_experts_are_fused_for_few_tokens() {
        let plan = |tokens| SharedExpertPlan::new(true, tokens, true, [DType::BF16], false);
        assert_eq!([1, 16, 17, 4096].map(plan), [Fused, Fused, SecondaryStream, SecondaryStream]);
        let in_f32 = |tokens| SharedExpertPlan::new(false, tokens, true, [DType::BF16], false);
        assert_eq!([1, 4096].map(in_f32), [Fused, Fused]);
    }

    #[test]
    fn separate_shared_experts_overlap_unless_16_bit_and_few() {
        let plan = |tokens, dtype, exchanges| {
            SharedExpertPlan::new(true, tokens, false, [dtype], exchanges)
        };
        assert_eq!(plan(16, DType::BF16, false), Separate);
        assert_eq!(plan(16, DType::F8E4M3, false), SecondaryStream);
        assert_eq!(plan(17, DType::BF16, false), SecondaryStream);
        assert_eq!(plan(17, DType::BF16, true), Separate);
        let in_f32 = SharedExpertPlan::new(false, 17, false, [DType::BF16], false);
        assert_eq!(in_f32, Separate);
    }
}
