//! What a model is to those who run it: a forward pass over a batch, and the logits of some rows.

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

/// Everything a forward pass may see. No globals, no environment, no request.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    /// Maths on this rank's device.
    pub ops: &'a Ops,
    /// Ranks that share every layer.
    pub tp: &'a ParallelGroup,
    /// Ranks of other replicas that share experts with this one: they hold the same part of everything else and
    /// have tokens of their own.
    pub dp: &'a ParallelGroup,
    /// Rows that any rank of `dp` has room for where they bring their tokens together: those of none are more.
    pub dp_rows: usize,
    /// How tokens come to experts of other ranks of `dp`.
    pub expert_exchange: ExpertExchange,
    /// This rank's KV bytes.
    pub kv: &'a KvPool,
    /// Positions, slots, lengths and block tables of the step.
    pub batch: &'a BatchView,
    /// Tokens whose hidden states anyone asks for, i32 `[n]`: the last layer computes no others behind its attention. `None` = all.
    pub logits_indices: Option<&'a Tensor>,
    /// Who drafts from what enters some layers, if someone does.
    pub aux_hidden_states: Option<&'a AuxHiddenStates<'a>>,
    /// Where the choices of routers are counted, if they are.
    pub expert_load: Option<&'a ExpertLoad>,
    /// Who watches, if anyone.
    pub probe: Option<&'a dyn ForwardProbe>,
}

/// How tokens come to experts of other ranks, and back what these make of them. All ranks say the same of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertExchange {
    /// Each rank gets the tokens of all, and the sums of its own are scattered to it. No size depends on what routers choose, so it can be
    /// recorded.
    AllGather,
    /// Each rank gets the tokens that go to its experts. The host learns their numbers on the way.
    AllToAll,
    /// The one that moves fewer bytes if a router chooses all experts alike.
    Auto,
}

impl fmt::Debug for ForwardContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ops, batch, probed) = (self.ops, self.batch, self.probe.is_some());
        write!(f, "Forward({ops:?}, {} tokens, probed: {probed})", batch.tokens())
    }
}

/// Watches a forward pass from inside, for comparison with a reference. Results never depend on it.
pub trait ForwardProbe {
    /// The residual stream `[T, H]` after layer `layer`.
    fn hidden(&self, ops: &Ops, layer: usize, x: &Tensor) -> Result<(), OpError>;

    /// The experts that layer `layer` chose.
    fn routes(&self, ops: &Ops, layer: usize, routing: &ExpertRouting) -> Result<(), OpError>;
}

/// Why a forward pass failed.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// This rank's device, or a bug in a model.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Another rank.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Draft tokens were asked for, but no MTP module was loaded.
    #[error("no MTP module was loaded")]
    NoMtpModule,
    /// A pass of a draft model that begins with hidden states was given none.
    #[error("a draft pass needs hidden states of the target model")]
    NoHiddenStates,
}

/// A model, and what drafts for it out of the same checkpoint.
pub struct LoadedModel {
    /// The model.
    pub model: Box<dyn Model>,
    /// Its MTP module, if the configuration asks for it.
    pub mtp: Option<Box<dyn MtpModel>>,
}

impl fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoadedModel(MTP module: {})", self.mtp.is_some())
    }
}

/// An MTP (NextN) module: drafts the token after the next one. Logits are made by the model's head.
pub trait MtpModel: Send {
    /// Token ids `[T]`, none at position 0, and the hidden states `before [T, H]` of the tokens before them, to the hidden states
    /// `[T, H]` after the module. Their logits are those of the tokens that follow.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: &Tensor,
    ) -> Result<Tensor, ForwardError>;

    /// Writes keys and values of these tokens for later draft tokens, and computes no more. What is written for position 0 is
    /// never read.
    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: &Tensor,
    ) -> Result<(), ForwardError>;
}

/// One architecture with its weights.
pub trait Model: Send {
    /// Token ids `[T]` to the hidden states `[n, H]` after the final norm: of the `n` tokens asked for, or of all.
    fn forward(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError>;

    /// Token ids `[T]` to the embeddings `[T, H]` that the first layer begins with.
    fn embed(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError>;

    /// Logits, f32 `[n, V]`, of `hidden [n, H]`: every rank gets those of all.
    fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError>;

    /// Of these logits those of this rank's part of the vocabulary, as `ParallelRanks::vocab_shard` describes it.
    fn shard_logits(&self, f: &ForwardContext<'_>, hidden: &Tensor)
    -> Result<Tensor, ForwardError>;
}

/// What the scheduler must know about this model's KV cache, of elements in `dtype`, on one of `ranks`.
///
/// Every supported layer keeps the keys and values of every position, or what they are made of: one group. A model that drafts
/// also needs the hidden state at the end of each block, which is counted here and lies outside the pool.
pub fn kv_spec(
    config: &ModelConfig,
    dtype: DType,
    block_tokens: u32,
    ranks: &ParallelRanks,
) -> Result<KvSpec, UnevenSplit> {
    let size = (1, block_tokens as usize);
    let layout = kv_layout(config, dtype, size, KvOrder::Rows, ranks)?;
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

/// The pool of such a cache, of so many blocks of so many tokens each, `order` being the device's.
pub fn kv_layout(
    config: &ModelConfig,
    dtype: DType,
    (blocks, block_tokens): (usize, usize),
    order: KvOrder,
    ranks: &ParallelRanks,
) -> Result<PoolLayout, UnevenSplit> {
    let layers = config.kv_layers();
    if let Some(MlaConfig { kv_lora_rank: latent, qk_rope_head_dim: rotary, .. }) = config.mla {
        let layout = MlaKvLayout {
            layers,
            blocks,
            block_tokens,
            kv_lora_rank: latent,
            rope_dim: rotary,
            dtype,
        };
        return Ok(PoolLayout::Mla(layout));
    }
    let (kv_heads, head_dim) = (ranks.kv_heads(config)?.len(), config.head_dim);
    let layout = KvLayout { layers, blocks, block_tokens, kv_heads, head_dim, dtype, order };
    Ok(PoolLayout::Heads(layout))
}
