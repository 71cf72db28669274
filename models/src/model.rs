//! Interface of models: traits for target models and MTP modules, inputs of a forward pass, and KV cache
//! layout.

use crate::config::MlaConfig;
use crate::sharding::{ParallelRanks, UnevenSplitError};
use crate::{
    AuxHiddenStateCollector, ExpertLoadStats, ForwardError, GroupLayersPerSlot, KvGrouping,
    ModelConfig, OutputMemory,
};
use collectives::ParallelGroup;
use ops::{
    DType, DeviceBatchMetadata, ExpertRouting, GroupKvLayout, GroupedKvLayouts, KvLayout, KvPool,
    KvPoolLayout, KvTileOrder, MlaKvLayout, OpError, Ops, RecurrentStateLayout, Tensor,
};
use protocol::{KvGroup, KvKind, KvSpec};
use std::fmt;

/// Inputs of a forward pass. A forward pass does not access global variables, the environment or requests.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    /// Tensor operations on this rank's device.
    pub ops: &'a Ops,
    /// Tensor-parallel group: the ranks over which every layer is split.
    pub tp: &'a ParallelGroup,
    /// Data-parallel group: the ranks of all replicas among which the experts are distributed. All these
    /// ranks have the same part of all other weights, but process different tokens.
    pub dp: &'a ParallelGroup,
    /// Maximum number of tokens that any rank of `dp` has in this step; each rank has this number of rows in
    /// the all-gather buffers.
    pub dp_rows: usize,
    /// Collective operation by which tokens are exchanged with experts on other ranks of `dp`.
    pub expert_exchange: ExpertExchangeMethod,
    /// KV cache of this rank.
    pub kv: &'a KvPool,
    /// Positions, KV slots, sequence lengths and block tables of the step's tokens.
    pub batch: &'a DeviceBatchMetadata,
    /// Indices of the tokens for which hidden states are requested, i32 `[rows]`: the last layer drops all
    /// other tokens after its attention. `None` = hidden states of all tokens.
    pub logits_indices: Option<&'a Tensor>,
    /// Collector of auxiliary hidden states for an EAGLE-3 proposer; `None` if there is no such proposer.
    pub aux_hidden_states: Option<&'a AuxHiddenStateCollector<'a>>,
    /// Counters of the tokens routed to each expert; `None` if they are not counted.
    pub expert_load: Option<&'a ExpertLoadStats>,
    /// Memory of the caller for the result; `None` = memory of the arena.
    pub output_memory: Option<&'a OutputMemory>,
    /// Probe that receives intermediate results; `None` in normal operation.
    pub probe: Option<&'a dyn ForwardObserver>,
}

/// Method by which tokens are exchanged with experts on other ranks. In a step, all ranks use the same
/// method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertExchangeMethod {
    /// All-gather of the tokens, then reduce-scatter of the results. Buffer sizes do not depend on routing,
    /// so that the exchange can be captured into a CUDA or HIP graph.
    AllGather,
    /// All-to-all: each rank receives only the tokens that are routed to its experts. Before the exchange,
    /// the ranks exchange token counts through the host.
    AllToAll,
    /// All-gather or all-to-all, whichever is expected to be faster if tokens are routed uniformly to all
    /// experts.
    Auto,
}

impl fmt::Debug for ForwardContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ops, batch, probed) = (self.ops, self.batch, self.probe.is_some());
        write!(f, "ForwardContext({ops:?}, {} tokens, probed: {probed})", batch.tokens())
    }
}

/// Observer that receives intermediate results of a forward pass, for comparison with a reference. It never
/// changes the outputs of the model.
pub trait ForwardObserver {
    /// Called with the hidden states `x [tokens, hidden size]` after layer `layer`.
    fn hidden(&self, ops: &Ops, layer: usize, x: &Tensor) -> Result<(), OpError>;

    /// Called with the experts and routing weights that the router of layer `layer` selected for each token.
    fn routes(&self, ops: &Ops, layer: usize, routing: &ExpertRouting) -> Result<(), OpError>;
}

/// Target model, with the classification head and the MTP module of the same checkpoint if they are used.
pub struct LoadedModel {
    /// Target model, without its MTP module.
    pub model: Box<dyn Model>,
    /// Weights of the classification head, f32 `[hidden size]`, if the checkpoint has one.
    pub score: Option<Vec<f32>>,
    /// MTP module; `None` unless `ModelConfig::load_mtp` is set.
    pub mtp: Option<Box<dyn MtpModel>>,
}

impl fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoadedModel(MTP module: {})", self.mtp.is_some())
    }
}

/// MTP (NextN) module: predicts the token after the next token. The LM head of the target model computes the
/// logits from the module's hidden states.
pub trait MtpModel: Send {
    /// Computes hidden states `[tokens, hidden size]`. `ids [tokens]` are token ids at positions above 0, and
    /// `previous [tokens, hidden size]` are the hidden states of the preceding tokens. From the result, the
    /// LM head computes the logits of the tokens that follow `ids`.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: &Tensor,
    ) -> Result<Tensor, ForwardError>;

    /// Writes the keys and values of the tokens `ids` to the KV cache, for later draft tokens; computes no
    /// hidden states. Keys and values at position 0 are never read.
    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: &Tensor,
    ) -> Result<(), ForwardError>;
}

/// Target model: an architecture with its weights on this rank.
pub trait Model: Send {
    /// Computes the hidden states after the final norm, `[rows, hidden size]`, from token ids `[tokens]`. The
    /// rows correspond to the tokens at [`ForwardContext::logits_indices`], or to all tokens if there are no
    /// indices.
    fn forward(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError>;

    /// Embeds token ids `[tokens]` to `[tokens, hidden size]`, the input of the first layer.
    fn embed(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError>;

    /// Computes the logits of the whole vocabulary, f32 `[rows, vocabulary]`, from `hidden [rows, hidden
    /// size]`, on every rank.
    fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError>;

    /// Computes the logits of this rank's shard of the vocabulary; `ParallelRanks::vocab_shard` describes the
    /// columns.
    fn shard_logits(&self, f: &ForwardContext<'_>, hidden: &Tensor)
    -> Result<Tensor, ForwardError>;
}

/// Returns the KV cache groups of this model for the scheduler, for one rank of `ranks` and KV cache elements
/// of the type `dtype`.
///
/// `grouping` assigns the layers to groups. All groups have the same `bytes_per_block`: the bytes of a block of
/// the pool, which stores the layers of whichever group it is allocated to. A model with an MTP or EAGLE-3
/// proposer also stores the hidden state at each block boundary. The bytes of this hidden state are included in
/// `bytes_per_block`, although it is stored outside of the KV pool.
pub fn kv_spec(
    config: &ModelConfig,
    grouping: &KvGrouping,
    dtype: DType,
    block_tokens: u32,
    ranks: &ParallelRanks,
) -> Result<KvSpec, UnevenSplitError> {
    let (blocks, order) = (1, KvTileOrder::RowMajor);
    let layout = kv_layout(config, grouping, dtype, blocks, block_tokens as usize, order, ranks)?;
    // On the device, the hidden states at block boundaries are indexed by the block ids of group 0.
    let boundary_states = config.boundary_state_channels() * grouping.layers_per_slot().first;
    let bytes_per_block = (layout.bytes_per_block() + boundary_states * dtype.bytes()) as u64;
    let layers_of = |group| grouping.layers_of(group).map(|layer| layer as u16).collect();
    let group = |(group, &kind): (usize, &KvKind)| KvGroup {
        layers: layers_of(group),
        kind,
        bytes_per_block,
    };
    let mut groups: Vec<KvGroup> = grouping.kinds().iter().enumerate().map(group).collect();
    if let Some(states) = state_layout(config, grouping, 1, ranks)? {
        let bytes_per_slot = states.bytes_per_slot() as u64;
        let kind = KvKind::State { slots_per_request: 1, bytes_per_slot };
        groups.push(KvGroup { layers: layers_of(groups.len()), kind, bytes_per_block: 0 });
    }
    Ok(KvSpec { block_tokens, groups })
}

/// Returns the layout of the recurrent states with `slots` state slots; `None` if no layer has a recurrent state.
pub fn state_layout(
    config: &ModelConfig,
    grouping: &KvGrouping,
    slots: usize,
    ranks: &ParallelRanks,
) -> Result<Option<RecurrentStateLayout>, UnevenSplitError> {
    let layers = grouping.state_layers();
    let Some(delta) = config.gated_delta.as_ref().filter(|_| layers > 0) else { return Ok(None) };
    let key_heads = ranks.key_heads(delta)?.len();
    Ok(Some(RecurrentStateLayout {
        layers,
        slots,
        key_heads,
        value_heads: key_heads * delta.heads_per_key(),
        key_dim: delta.key_dim,
        value_dim: delta.value_dim,
        conv_width: delta.conv_width,
    }))
}

/// Returns the layout of the KV pool with `blocks` blocks of `block_tokens` tokens, which all groups of
/// `grouping` share. `order` is the element
/// order within a block that the attention kernels of the device require.
pub fn kv_layout(
    config: &ModelConfig,
    grouping: &KvGrouping,
    dtype: DType,
    blocks: usize,
    block_tokens: usize,
    order: KvTileOrder,
    ranks: &ParallelRanks,
) -> Result<KvPoolLayout, UnevenSplitError> {
    let layers = grouping.pool_layers();
    if let Some(MlaConfig { kv_lora_rank, qk_rope_head_dim, .. }) = config.mla {
        let layout = MlaKvLayout {
            layers,
            blocks,
            block_tokens,
            kv_lora_rank,
            rope_dim: qk_rope_head_dim,
            dtype,
        };
        return Ok(KvPoolLayout::Mla(layout));
    }
    let heads = |config: &ModelConfig, layers| -> Result<KvLayout, UnevenSplitError> {
        let (kv_heads, head_dim) = (ranks.kv_heads(config)?.len(), config.head_dim);
        Ok(KvLayout { layers, blocks, block_tokens, kv_heads, head_dim, dtype, order })
    };
    let full = config.at_full_layers();
    let GroupLayersPerSlot { first, further } = grouping.layers_per_slot();
    if first == 1 && (config.layer_shapes.is_none() || grouping.kinds().len() == 1) {
        return Ok(KvPoolLayout::Heads(heads(&full, layers)?));
    }
    let of_group = |config: &ModelConfig, layers_per_slot| -> Result<_, UnevenSplitError> {
        let heads = heads(config, layers * layers_per_slot)?;
        Ok(GroupKvLayout { heads, layers_per_slot })
    };
    let (first, further) = (of_group(&full, first)?, of_group(config, further)?);
    Ok(KvPoolLayout::HeadsByGroup(GroupedKvLayouts { first, further }))
}
