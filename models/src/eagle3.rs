//! One layer that drafts for another model (EAGLE-3, arXiv 2503.01840; `LlamaForCausalLMEagle3`).
//!
//! It begins with what enters three layers of that model, joined to one state a token, and goes on with its own stream; it has a
//! vocabulary of its own, whose ids are some of the model's. As a draft layer it keeps keys and values of each position `p`, made
//! of token `p` and of the state before it. Shapes: T tokens, H hidden, R rows.

use crate::config::Eagle3Config;
use crate::layers::{
    GatedMlp, GqaHeads, LmHead, PROJECTIONS, ResidualStream, RmsNormLayer, RotaryEmbedding,
    VocabParallelEmbedding,
};
use crate::weight_table::{DRAFT_TO_TARGET, EAGLE_EMBEDDING, HEAD, MIDLAYER};
use crate::{ForwardContext, ForwardError, Model, ModelConfig, ModelLoadError, Weights};
use ops::{PackedLinear, Tensor, VocabShard};
use std::cell::RefCell;

/// The layer, and what is around it.
#[derive(Debug)]
pub struct Eagle3Model {
    /// What enters these layers of the model is joined; of as many channels as the model has.
    aux_layers: [usize; 3],
    aux_norms: Vec<RmsNormLayer>,
    /// The columns of `fc` that meet each of them.
    fc: Vec<PackedLinear>,
    /// Else the model's.
    embed: Option<VocabParallelEmbedding>,
    embedding_norm: RmsNormLayer,
    hidden_norm: RmsNormLayer,
    /// The columns that meet the embedding, and those that meet the state.
    qkv: Vec<PackedLinear>,
    heads: GqaHeads,
    mlp_norm: RmsNormLayer,
    mlp: GatedMlp,
    norm: RmsNormLayer,
    lm_head: LmHead,
    /// Its ids whose logits this rank makes.
    vocab_shard: VocabShard,
    /// What the model calls each of its ids, i32 `[1, V]`, if not by the same numbers.
    draft_to_target: Option<Tensor>,
    shape: Eagle3Config,
}

/// What a pass makes of each row.
#[derive(Debug)]
pub struct DraftPassOutput {
    /// For the head, `[R, H]`.
    pub hidden: Tensor,
    /// The state before the next token, where it is another, `[R, H]`.
    pub next_hidden: Option<Tensor>,
}

/// Joins what enters three layers of a model while it is computed.
#[derive(Debug)]
pub struct AuxHiddenStates<'a> {
    eagle: &'a Eagle3Model,
    /// Of those that have been passed.
    combined: RefCell<Option<Tensor>>,
}

impl Eagle3Model {
    /// Takes its weights by name; it drafts for the model `target`.
    pub(crate) fn load(
        (config, target): (&ModelConfig, &ModelConfig),
        w: &Weights<'_>,
    ) -> Result<Self, ModelLoadError> {
        let Some(shape) = config.eagle else {
            return Err(ModelLoadError::Table { tensor: "fc".to_owned(), what: "has no sizes" });
        };
        let norm = |w: &Weights<'_>| RmsNormLayer::load(w, config.rms_eps);
        let state_norm = |i: usize| norm(&w.at(format_args!("fc_norm.{i}")));
        let state_norms = if shape.aux_norms { 0..3 } else { 0..0 };
        let rope = RotaryEmbedding::load(config, w)?;
        let layer = w.at(MIDLAYER[0].trim_end_matches('.'));
        let attn = layer.at("self_attn");
        let embed = || VocabParallelEmbedding::load(w, EAGLE_EMBEDDING, config.vocab);
        let has_embedding = w.has(EAGLE_EMBEDDING);
        Ok(Self {
            aux_layers: shape.aux_layers_for(target.layers),
            aux_norms: state_norms.map(state_norm).collect::<Result<_, _>>()?,
            fc: w.linear_stacked(&["fc"], 3)?,
            embed: has_embedding.then(embed).transpose()?,
            embedding_norm: norm(&layer.at("input_layernorm"))?,
            hidden_norm: norm(&layer.at("hidden_norm"))?,
            qkv: attn.linear_stacked(&PROJECTIONS, 2)?,
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

    /// Watches a forward pass of the model.
    #[must_use]
    pub fn aux_hidden_states(&self) -> AuxHiddenStates<'_> {
        AuxHiddenStates { eagle: self, combined: RefCell::default() }
    }

    /// Token ids `[R]`, none at position 0, and the states before them, `[R, H]`, to what the head makes drafts of.
    pub fn draft(
        &self,
        f: &ForwardContext<'_>,
        (model, ids): (&dyn Model, &Tensor),
        before: Tensor,
    ) -> Result<DraftPassOutput, ForwardError> {
        let hidden = f.ops.rms_norm(&before, &self.hidden_norm.weight, self.hidden_norm.eps)?;
        let qkv = self.project_states(f, &self.embed_tokens(f, (model, ids))?, &hidden)?;
        let mut x = ResidualStream::new(if self.shape.normed_residual { hidden } else { before });
        self.heads.forward_skipping_first(f, &mut x, &qkv)?;
        self.mlp.forward(f, &mut x, &self.mlp_norm)?;
        let hidden = x.normed(f, &self.norm)?;
        let carried = (!self.shape.carries_normed_state).then(|| x.into_stream());
        Ok(DraftPassOutput { hidden, next_hidden: carried })
    }

    /// Of the same keeps what later drafts attend to, and computes no more. What it is given at position 0 is never seen.
    pub fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        (model, ids): (&dyn Model, &Tensor),
        before: &Tensor,
    ) -> Result<(), ForwardError> {
        let hidden = f.ops.rms_norm(before, &self.hidden_norm.weight, self.hidden_norm.eps)?;
        let qkv = self.project_states(f, &self.embed_tokens(f, (model, ids))?, &hidden)?;
        self.heads.write_kv(f, &qkv).map(drop)
    }

    /// Logits of its own ids, f32 `[n, V]`, of `hidden [n, H]`: every rank gets those of all.
    pub fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.full_logits(f, hidden)
    }

    /// Of these logits those of this rank's part of its ids.
    pub fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.lm_head.shard_logits(f, hidden)
    }

    /// That part.
    #[must_use]
    pub fn vocab_shard(&self) -> &VocabShard {
        &self.vocab_shard
    }

    /// What the model calls each of its ids, i32 `[1, V]`; `None` = the same.
    #[must_use]
    pub fn draft_to_target(&self) -> Option<&Tensor> {
        self.draft_to_target.as_ref()
    }

    /// Normed embeddings `[R, H]`.
    fn embed_tokens(
        &self,
        f: &ForwardContext<'_>,
        (model, ids): (&dyn Model, &Tensor),
    ) -> Result<Tensor, ForwardError> {
        let embedding = match &self.embed {
            Some(own) => own.forward(f, ids)?,
            None => model.embed(f, ids)?,
        };
        Ok(f.ops.rms_norm(&embedding, &self.embedding_norm.weight, self.embedding_norm.eps)?)
    }

    /// Queries, keys and values `[R, (N + 2 K) D]` of both.
    fn project_states(
        &self,
        f: &ForwardContext<'_>,
        embedding: &Tensor,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let of_embedding = f.ops.linear(embedding, &self.qkv[0])?;
        Ok(f.ops.add(&of_embedding, &f.ops.linear(hidden, &self.qkv[1])?)?)
    }
}

impl AuxHiddenStates<'_> {
    /// The states of all tokens, `[T, H]`, once the model has been computed.
    #[must_use]
    pub fn states(self) -> Option<Tensor> {
        self.combined.into_inner()
    }

    /// Whether what enters layer `layer` is wanted.
    pub(crate) fn wants_layer(&self, layer: usize) -> bool {
        self.eagle.aux_layers.contains(&layer)
    }

    /// Takes in what enters such a layer, `x [T, H of the model]`.
    pub(crate) fn collect(
        &self,
        f: &ForwardContext<'_>,
        layer: usize,
        x: &Tensor,
    ) -> Result<(), ForwardError> {
        let Eagle3Model { aux_layers: inputs, aux_norms: input_norms, fc: join, .. } = self.eagle;
        for (which, _) in inputs.iter().enumerate().filter(|(_, input)| **input == layer) {
            let part = match input_norms.get(which) {
                Some(norm) => {
                    f.ops.linear(&f.ops.rms_norm(x, &norm.weight, norm.eps)?, &join[which])?
                }
                None => f.ops.linear(x, &join[which])?,
            };
            let mut joined = self.combined.borrow_mut();
            *joined = Some(match joined.take() {
                Some(sum) => f.ops.add(&sum, &part)?,
                None => part,
            });
        }
        Ok(())
    }
}
