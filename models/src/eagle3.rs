//! EAGLE-3 draft model of one layer (arXiv 2503.01840; `LlamaForCausalLMEagle3`).
//!
//! The first draft pass starts from the inputs of three layers of the target model, projected to one hidden
//! state per token; each later pass starts from the hidden state of the previous pass. The draft vocabulary
//! is a subset of the target vocabulary. As in an MTP module, keys and values at position `p` are computed
//! from the embedding of token `p` and the hidden state of token `p - 1`.

use crate::config::Eagle3Config;
use crate::layers::{
    GatedMlp, GqaAttentionCore, LmHead, ResidualStream, RmsNormLayer, RotaryEmbedding,
    VocabParallelEmbedding,
};
use crate::weight_table::{DRAFT_TO_TARGET, EAGLE_EMBEDDING, HEAD, MIDLAYER};
use crate::weights::QKV_PROJECTIONS;
use crate::{ForwardContext, ForwardError, Model, ModelConfig, ModelLoadError, Weights};
use ops::{GateActivation, PackedLinear, Tensor, VocabShard};
use std::cell::RefCell;

/// EAGLE-3 draft model: its weights on this rank and its forward pass.
#[derive(Debug)]
pub struct Eagle3Model {
    /// Ids of the target model's layers whose inputs are the auxiliary hidden states.
    aux_layers: [usize; 3],
    fc_norms: Vec<RmsNormLayer>,
    /// Column blocks of the projection `fc`, one for each auxiliary hidden state.
    fc: Vec<PackedLinear>,
    /// Embedding of the draft model; `None` = the embedding of the target model is used.
    embed: Option<VocabParallelEmbedding>,
    embedding_norm: RmsNormLayer,
    hidden_norm: RmsNormLayer,
    /// Column blocks of the stacked QKV projection: first the block that multiplies the token embedding, then
    /// the block that multiplies the hidden state.
    qkv_proj: Vec<PackedLinear>,
    heads: GqaAttentionCore,
    mlp_norm: RmsNormLayer,
    mlp: GatedMlp,
    norm: RmsNormLayer,
    lm_head: LmHead,
    /// Range of the draft vocabulary on this rank.
    vocab_shard: VocabShard,
    /// Target token id of each draft token id, i32 `[1, draft vocabulary]`; `None` if every draft id equals
    /// its target id.
    draft_to_target: Option<Tensor>,
    shape: Eagle3Config,
}

/// Output of a draft pass: hidden states of its tokens, one row per token.
#[derive(Debug)]
pub struct DraftPassOutput {
    /// Hidden states after the final norm, which are the input of the LM head, `[rows, hidden size]`.
    pub hidden: Tensor,
    /// Hidden states from which the next draft pass starts, `[rows, hidden size]`; `None` if they equal
    /// `hidden`.
    pub next_hidden: Option<Tensor>,
}

/// Collects the auxiliary hidden states during one forward pass of the target model, and projects them with
/// `fc`.
#[derive(Debug)]
pub struct AuxHiddenStateCollector<'a> {
    eagle: &'a Eagle3Model,
    /// Sum of the projections of the auxiliary hidden states that were collected so far.
    combined: RefCell<Option<Tensor>>,
}

impl Eagle3Model {
    /// Loads the draft model for the target model `target`. Each weight is taken from `w` by its name.
    pub(crate) fn load(
        config: &ModelConfig,
        target: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<Self, ModelLoadError> {
        let not_eagle3 = || ModelLoadError::table("fc", "is not of an EAGLE-3 model");
        let shape = config.eagle.ok_or_else(not_eagle3)?;
        let norm = |w: &Weights<'_>| RmsNormLayer::load(w, config.rms_eps);
        let rope = RotaryEmbedding::load(config, w)?;
        let layer = w.at(MIDLAYER[0].trim_end_matches('.'));
        let attn = layer.at("self_attn");
        Ok(Self {
            aux_layers: shape.aux_layers_for(target.layers),
            fc_norms: load_fc_norms(config, &shape, w)?,
            fc: w.linear_stacked(&["fc"], 3)?,
            embed: load_embedding(config, w)?,
            embedding_norm: norm(&layer.at("input_layernorm"))?,
            hidden_norm: norm(&layer.at("hidden_norm"))?,
            qkv_proj: attn.linear_stacked(&QKV_PROJECTIONS, 2)?,
            heads: GqaAttentionCore::load(config, &attn, &rope, 0)?,
            mlp_norm: norm(&layer.at("post_attention_layernorm"))?,
            mlp: GatedMlp::load(&layer.at("mlp"), false, GateActivation::Silu)?,
            norm: norm(&w.at("norm"))?,
            lm_head: LmHead::load(w, HEAD, shape.vocab)?,
            vocab_shard: w.ranks().vocab_shard(shape.vocab),
            draft_to_target: w.draft_to_target(DRAFT_TO_TARGET)?,
            shape,
        })
    }

    /// Returns a collector for one forward pass of the target model.
    #[must_use]
    pub fn aux_hidden_states(&self) -> AuxHiddenStateCollector<'_> {
        AuxHiddenStateCollector { eagle: self, combined: RefCell::default() }
    }

    /// Computes a draft pass: `ids [rows]` are token ids at positions above 0, and `previous [rows, hidden
    /// size]` are the hidden states of the preceding tokens.
    pub fn draft(
        &self,
        f: &ForwardContext<'_>,
        target: &dyn Model,
        ids: &Tensor,
        previous: Tensor,
    ) -> Result<DraftPassOutput, ForwardError> {
        let hidden = f.ops.rms_norm(&previous, &self.hidden_norm.weight, self.hidden_norm.eps)?;
        let qkv = self.project_states(f, &self.embed_tokens(f, target, ids)?, &hidden)?;
        let mut x =
            ResidualStream::new(if self.shape.norm_before_residual { hidden } else { previous });
        self.heads.forward_skipping_first(f, &mut x, &qkv)?;
        self.mlp.forward(f, &mut x, &self.mlp_norm)?;
        let hidden = x.normed(f, &self.norm)?;
        let next_hidden = (!self.shape.norm_output).then(|| x.into_stream());
        Ok(DraftPassOutput { hidden, next_hidden })
    }

    /// Writes the draft model's keys and values of the tokens `ids` to the KV cache, for later draft passes;
    /// computes no hidden states. Later draft passes never read the keys and values at position 0.
    pub fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        target: &dyn Model,
        ids: &Tensor,
        previous: &Tensor,
    ) -> Result<(), ForwardError> {
        let hidden = f.ops.rms_norm(previous, &self.hidden_norm.weight, self.hidden_norm.eps)?;
        let qkv = self.project_states(f, &self.embed_tokens(f, target, ids)?, &hidden)?;
        self.heads.write_kv(f, &qkv).map(drop)
    }

    /// Computes the logits of the whole draft vocabulary on every rank: f32 `[rows, draft vocabulary]` from
    /// `hidden [rows, hidden size]`.
    pub fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.full_logits(f, hidden)
    }

    /// Computes the logits of this rank's range of the draft vocabulary.
    pub fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.lm_head.shard_logits(f, hidden)
    }

    /// Range of the draft vocabulary on this rank.
    #[must_use]
    pub fn vocab_shard(&self) -> &VocabShard {
        &self.vocab_shard
    }

    /// Target token id of each draft token id, i32 `[1, draft vocabulary]`; `None` if every draft id equals
    /// its target id.
    #[must_use]
    pub fn draft_to_target(&self) -> Option<&Tensor> {
        self.draft_to_target.as_ref()
    }

    /// Embeds token ids and applies the RMS norm of embeddings: `[rows, hidden size]`.
    fn embed_tokens(
        &self,
        f: &ForwardContext<'_>,
        target: &dyn Model,
        ids: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let embedding = match &self.embed {
            Some(own) => own.forward(f, ids)?,
            None => target.embed(f, ids)?,
        };
        Ok(f.ops.rms_norm(&embedding, &self.embedding_norm.weight, self.embedding_norm.eps)?)
    }

    /// Computes queries, keys and values `[rows, query channels + key channels + value channels]` from token
    /// embeddings and hidden states.
    fn project_states(
        &self,
        f: &ForwardContext<'_>,
        embedding: &Tensor,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let embedding_part = f.ops.linear(embedding, &self.qkv_proj[0])?;
        Ok(f.ops.add(&embedding_part, &f.ops.linear(hidden, &self.qkv_proj[1])?)?)
    }
}

/// Loads the RMS norms of the auxiliary hidden states; empty if the draft model has none.
fn load_fc_norms(
    config: &ModelConfig,
    shape: &Eagle3Config,
    w: &Weights<'_>,
) -> Result<Vec<RmsNormLayer>, ModelLoadError> {
    let norms = if shape.fc_norm { 0..3 } else { 0..0 };
    norms.map(|i| RmsNormLayer::load(&w.at(format_args!("fc_norm.{i}")), config.rms_eps)).collect()
}

/// Loads the embedding of the draft model; `None` if the checkpoint omits it.
fn load_embedding(
    config: &ModelConfig,
    w: &Weights<'_>,
) -> Result<Option<VocabParallelEmbedding>, ModelLoadError> {
    let load = || VocabParallelEmbedding::load(w, EAGLE_EMBEDDING, config.vocab);
    w.has(EAGLE_EMBEDDING).then(load).transpose()
}

impl AuxHiddenStateCollector<'_> {
    /// Returns the projected auxiliary hidden states after the forward pass, `[tokens, hidden size]`; `None`
    /// if no auxiliary hidden state was collected.
    #[must_use]
    pub fn states(self) -> Option<Tensor> {
        self.combined.into_inner()
    }

    /// Whether the input of the target model's layer `layer` is an auxiliary hidden state.
    pub(crate) fn collects_layer(&self, layer: usize) -> bool {
        self.eagle.aux_layers.contains(&layer)
    }

    /// Adds the projection of `x [tokens, target hidden size]`, the input of the target's layer `layer`.
    pub(crate) fn collect(
        &self,
        f: &ForwardContext<'_>,
        layer: usize,
        x: &Tensor,
    ) -> Result<(), ForwardError> {
        let Eagle3Model { aux_layers, fc_norms, fc, .. } = self.eagle;
        for (i, _) in aux_layers.iter().enumerate().filter(|(_, id)| **id == layer) {
            let part = match fc_norms.get(i) {
                Some(norm) => f.ops.linear(&f.ops.rms_norm(x, &norm.weight, norm.eps)?, &fc[i])?,
                None => f.ops.linear(x, &fc[i])?,
            };
            let mut combined = self.combined.borrow_mut();
            *combined = Some(match combined.take() {
                Some(sum) => f.ops.add(&sum, &part)?,
                None => part,
            });
        }
        Ok(())
    }
}
