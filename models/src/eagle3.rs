//! EAGLE-3 draft model of one layer (arXiv 2503.01840; `LlamaForCausalLMEagle3`).
//!
//! The first draft pass starts from the inputs of three layers of the target model, projected to one hidden
//! state per token; later passes start from the previous pass. The draft vocabulary is a subset of the target
//! vocabulary. As in an MTP module, keys and values at position `p` are made of token `p` and the hidden
//! state of the token before it. Shapes: T tokens, H hidden, R rows.

use crate::config::Eagle3Config;
use crate::layers::{
    GatedMlp, GqaHeads, LmHead, QKV_PROJECTIONS, ResidualStream, RmsNormLayer, RotaryEmbedding,
    VocabParallelEmbedding,
};
use crate::weight_table::{DRAFT_TO_TARGET, EAGLE_EMBEDDING, HEAD, MIDLAYER};
use crate::{ForwardContext, ForwardError, Model, ModelConfig, ModelLoadError, Weights};
use ops::{PackedLinear, Tensor, VocabShard};
use std::cell::RefCell;

/// EAGLE-3 draft model.
#[derive(Debug)]
pub struct Eagle3Model {
    /// Target layers with inputs that are auxiliary hidden states, of the target model's hidden size.
    aux_layers: [usize; 3],
    fc_norms: Vec<RmsNormLayer>,
    /// Columns of `fc` for each auxiliary hidden state.
    fc: Vec<PackedLinear>,
    /// Embedding; `None` = that of the target model.
    embed: Option<VocabParallelEmbedding>,
    embedding_norm: RmsNormLayer,
    hidden_norm: RmsNormLayer,
    /// Columns for the embedding, then columns for the hidden state.
    qkv_proj: Vec<PackedLinear>,
    heads: GqaHeads,
    mlp_norm: RmsNormLayer,
    mlp: GatedMlp,
    norm: RmsNormLayer,
    lm_head: LmHead,
    /// Shard of the draft vocabulary on this rank.
    vocab_shard: VocabShard,
    /// Target id of each draft id, i32 `[1, V]`; `None` if both ids are equal.
    draft_to_target: Option<Tensor>,
    shape: Eagle3Config,
}

/// Output of a draft pass, per row.
#[derive(Debug)]
pub struct DraftPassOutput {
    /// Input of the LM head, `[R, H]`.
    pub hidden: Tensor,
    /// Hidden state for the next draft pass, `[R, H]`; `None` = `hidden`.
    pub next_hidden: Option<Tensor>,
}

/// Collects and projects the auxiliary hidden states during a forward pass of the target model.
#[derive(Debug)]
pub struct AuxHiddenStates<'a> {
    eagle: &'a Eagle3Model,
    /// Sum of the projections collected so far.
    combined: RefCell<Option<Tensor>>,
}

impl Eagle3Model {
    /// Loads the draft model of the target model `target`; weights are taken by name.
    pub(crate) fn load(
        config: &ModelConfig,
        target: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<Self, ModelLoadError> {
        let Some(shape) = config.eagle else {
            return Err(ModelLoadError::Table {
                tensor: "fc".to_owned(),
                what: "is not of an EAGLE-3 model",
            });
        };
        let norm = |w: &Weights<'_>| RmsNormLayer::load(w, config.rms_eps);
        let fc_norm = |i: usize| norm(&w.at(format_args!("fc_norm.{i}")));
        let fc_norms = if shape.fc_norm { 0..3 } else { 0..0 };
        let rope = RotaryEmbedding::load(config, w)?;
        let layer = w.at(MIDLAYER[0].trim_end_matches('.'));
        let attn = layer.at("self_attn");
        let embed = || VocabParallelEmbedding::load(w, EAGLE_EMBEDDING, config.vocab);
        let has_embedding = w.has(EAGLE_EMBEDDING);
        Ok(Self {
            aux_layers: shape.aux_layers_for(target.layers),
            fc_norms: fc_norms.map(fc_norm).collect::<Result<_, _>>()?,
            fc: w.linear_stacked(&["fc"], 3)?,
            embed: has_embedding.then(embed).transpose()?,
            embedding_norm: norm(&layer.at("input_layernorm"))?,
            hidden_norm: norm(&layer.at("hidden_norm"))?,
            qkv_proj: attn.linear_stacked(&QKV_PROJECTIONS, 2)?,
            heads: GqaHeads::load(config, &attn, None, &rope, 0)?,
            mlp_norm: norm(&layer.at("post_attention_layernorm"))?,
            mlp: GatedMlp::load(&layer.at("mlp"), false)?,
            norm: norm(&w.at("norm"))?,
            lm_head: LmHead::load(w, HEAD, shape.vocab)?,
            vocab_shard: w.ranks().vocab_shard(shape.vocab),
            draft_to_target: w.draft_to_target(DRAFT_TO_TARGET)?,
            shape,
        })
    }

    /// Returns a collector for one forward pass of the target model.
    #[must_use]
    pub fn aux_hidden_states(&self) -> AuxHiddenStates<'_> {
        AuxHiddenStates { eagle: self, combined: RefCell::default() }
    }

    /// Computes a draft pass from token ids `[R]`, none at position 0, and the hidden states
    /// `previous [R, H]` of the tokens before them.
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

    /// Writes keys and values of these tokens for later draft passes, and computes no more. The keys and
    /// values at position 0 are never read.
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

    /// Logits of the whole draft vocabulary, f32 `[n, V]`, from `hidden [n, H]`, on every rank.
    pub fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.full_logits(f, hidden)
    }

    /// Logits of this rank's shard of the draft vocabulary.
    pub fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.lm_head.shard_logits(f, hidden)
    }

    /// Shard of the draft vocabulary on this rank.
    #[must_use]
    pub fn vocab_shard(&self) -> &VocabShard {
        &self.vocab_shard
    }

    /// Target id of each draft id, i32 `[1, V]`; `None` if both ids are equal.
    #[must_use]
    pub fn draft_to_target(&self) -> Option<&Tensor> {
        self.draft_to_target.as_ref()
    }

    /// Normed token embeddings, `[R, H]`.
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

    /// Queries, keys and values `[R, (N + 2 K) D]` from embedding and hidden state.
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

impl AuxHiddenStates<'_> {
    /// Projected states of all tokens, `[T, H]`, after the forward pass.
    #[must_use]
    pub fn states(self) -> Option<Tensor> {
        self.combined.into_inner()
    }

    /// Whether the input of layer `layer` is collected.
    pub(crate) fn collects_layer(&self, layer: usize) -> bool {
        self.eagle.aux_layers.contains(&layer)
    }

    /// Adds the projection of the input `x [T, H of the target model]` of layer `layer`.
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
