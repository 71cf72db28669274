//! Interface of models: forward pass over a batch, and logits of some rows.

use crate::config::MlaConfig;
use crate::sharding::{ParallelRanks, UnevenSplit};
use crate::{AuxHiddenStates, ExpertLoad, ModelConfig};
use collectives::{CollectiveError, ParallelGroup};
use ops::{
    BatchView, DType, ExpertRouting, KvLayout, KvOrder, KvPool, MlaKvLayout, OpError, Ops,
    PoolLayout, Tensor,
};
use protocol::{KvGroup, KvKind, KvSpec};
use std::fmt;

/// Inputs of a forward pass. A forward pass uses no globals, no environment and no request.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    /// Ops on this rank's device.
    pub ops: &'a Ops,
    /// Tensor-parallel group: ranks that share every layer.
    pub tp: &'a ParallelGroup,
    /// Data-parallel group: ranks of other replicas that share experts with this rank; apart from experts
    /// they have the same part of the model, and tokens of their own.
    pub dp: &'a ParallelGroup,
    /// Maximum number of rows per rank of `dp` in an expert exchange; no rank has more tokens.
    pub dp_rows: usize,
    /// Exchange of tokens with experts on other ranks of `dp`.
    pub expert_exchange: ExpertExchange,
    /// KV cache of this rank.
    pub kv: &'a KvPool,
    /// Positions, KV slots, lengths and block tables of the step.
    pub batch: &'a BatchView,
    /// Indices of the tokens with requested hidden states, i32 `[n]`: the last layer drops all other tokens
    /// after its attention. `None` = all tokens.
    pub logits_indices: Option<&'a Tensor>,
    /// Collector of auxiliary hidden states for an EAGLE-3 proposer, if any.
    pub aux_hidden_states: Option<&'a AuxHiddenStates<'a>>,
    /// Counters of the tokens routed to each expert, if any.
    pub expert_load: Option<&'a ExpertLoad>,
    /// Probe of intermediate results, if any.
    pub probe: Option<&'a dyn ForwardProbe>,
}

/// Exchange of tokens with experts on other ranks. All ranks use the same exchange in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertExchange {
    /// All-gather of the tokens, reduce-scatter of the results. Sizes are independent of routing, so the
    /// exchange can be captured into a graph.
    AllGather,
    /// All-to-all: each rank receives the tokens that are routed to its experts. The host exchanges the
    /// counts first.
    AllToAll,
    /// The exchange that moves fewer bytes for uniform routing.
    Auto,
}

impl fmt::Debug for ForwardContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ops, batch, probed) = (self.ops, self.batch, self.probe.is_some());
        write!(f, "ForwardContext({ops:?}, {} tokens, probed: {probed})", batch.tokens())
    }
}

/// Observes intermediate results of a forward pass, for comparison with a reference. Outputs never depend on
/// it.
pub trait ForwardProbe {
    /// Called with the residual stream `[T, H]` after layer `layer`.
    fn hidden(&self, ops: &Ops, layer: usize, x: &Tensor) -> Result<(), OpError>;

    /// Called with the experts that the router of layer `layer` selected.
    fn routes(&self, ops: &Ops, layer: usize, routing: &ExpertRouting) -> Result<(), OpError>;
}

/// Error of a forward pass.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// This rank's device failed, or a model has a bug.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Draft tokens were requested, but no MTP module was loaded.
    #[error("no MTP module was loaded")]
    NoMtpModule,
    /// A draft pass that needs hidden states got none.
    #[error("a draft pass needs hidden states of the target model")]
    NoHiddenStates,
}

/// Model with the MTP module of the same checkpoint.
pub struct LoadedModel {
    /// Target model.
    pub model: Box<dyn Model>,
    /// MTP module, if the configuration enables it.
    pub mtp: Option<Box<dyn MtpModel>>,
}

impl fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoadedModel(MTP module: {})", self.mtp.is_some())
    }
}

/// MTP (NextN) module: predicts the token after the next one. The model's LM head computes the logits.
pub trait MtpModel: Send {
    /// Computes hidden states `[T, H]` from token ids `[T]`, none at position 0, and the hidden states
    /// `previous [T, H]` of the tokens before them. The results give the logits of the tokens that follow.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: &Tensor,
    ) -> Result<Tensor, ForwardError>;

    /// Writes keys and values of these tokens for later draft tokens, and computes no more. The keys and
    /// values at position 0 are never read.
    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: &Tensor,
    ) -> Result<(), ForwardError>;
}

/// Architecture with its weights.
pub trait Model: Send {
    /// Computes the hidden states `[n, H]` after the final norm from token ids `[T]`: of the `n` tokens of
    /// [`ForwardContext::logits_indices`], or of all tokens.
    fn forward(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError>;

    /// Embeds token ids `[T]`: `[T, H]`, the input of the first layer.
    fn embed(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError>;

    /// Logits of the whole vocabulary, f32 `[n, V]`, from `hidden [n, H]`, on every rank.
    fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError>;

    /// Logits of this rank's shard of the vocabulary, as described by `ParallelRanks::vocab_shard`.
    fn shard_logits(&self, f: &ForwardContext<'_>, hidden: &Tensor)
    -> Result<Tensor, ForwardError>;
}

/// KV cache of this model for the scheduler, with elements in `dtype`, on one rank of `ranks`.
///
/// Every supported layer caches keys and values of every position, or their compressed form: one group. A
/// model with a proposer also needs the hidden state at each block boundary, which is counted here and stored
/// outside of the pool.
pub fn kv_spec(
    config: &ModelConfig,
    dtype: DType,
    block_tokens: u32,
    ranks: &ParallelRanks,
) -> Result<KvSpec, UnevenSplit> {
    let layout = kv_layout(config, dtype, 1, block_tokens as usize, KvOrder::RowMajor, ranks)?;
    let kind = match layout {
        PoolLayout::Heads(_) => KvKind::Full,
        PoolLayout::Mla(_) => KvKind::Mla,
    };
    let layers = (0..config.kv_layers() as u16).collect();
    let bytes_per_block =
        (layout.bytes_per_block() + config.boundary_state_channels() * dtype.bytes()) as u64;
    let groups = vec![KvGroup { layers, kind, bytes_per_block }];
    Ok(KvSpec { block_tokens, groups })
}

/// Layout of the KV pool, with `blocks` blocks of `block_tokens` tokens; `order` depends on the device.
pub fn kv_layout(
    config: &ModelConfig,
    dtype: DType,
    blocks: usize,
    block_tokens: usize,
    order: KvOrder,
    ranks: &ParallelRanks,
) -> Result<PoolLayout, UnevenSplit> {
    let layers = config.kv_layers();
    if let Some(MlaConfig { kv_lora_rank, qk_rope_head_dim, .. }) = config.mla {
        let layout = MlaKvLayout {
            layers,
            blocks,
            block_tokens,
            kv_lora_rank,
            rope_dim: qk_rope_head_dim,
            dtype,
        };
        return Ok(PoolLayout::Mla(layout));
    }
    let (kv_heads, head_dim) = (ranks.kv_heads(config)?.len(), config.head_dim);
    let layout = KvLayout { layers, blocks, block_tokens, kv_heads, head_dim, dtype, order };
    Ok(PoolLayout::Heads(layout))
}
