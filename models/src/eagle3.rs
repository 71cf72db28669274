//! One layer that drafts for another model (EAGLE-3, arXiv 2503.01840; `LlamaForCausalLMEagle3`).
//!
//! It begins with what enters three layers of that model, joined to one state a token, and goes on with its own stream; it has a
//! vocabulary of its own, whose ids are some of the model's. As a draft layer it keeps keys and values of each position `p`, made
//! of token `p` and of the state before it. Shapes: T tokens, H hidden, R rows.

use crate::config::EagleConfig;
use crate::layers::{
    GatedMlp, Heads, LmHead, PROJECTIONS, Residual, RmsNorm, Rope, VocabParallelEmbedding,
};
use crate::table::{EAGLE_EMBEDDING, HEAD, MIDLAYER, OFFSETS};
use crate::{Config, Forward, ForwardError, LoadError, Model, Weights};
use ops::{PackedLinear, Tensor, VocabPart};
use std::cell::RefCell;

/// The layer, and what is around it.
#[derive(Debug)]
pub struct Eagle3 {
    /// What enters these layers of the model is joined; of as many channels as the model has.
    inputs: [usize; 3],
    input_norms: Vec<RmsNorm>,
    /// The columns of `fc` that meet each of them.
    join: Vec<PackedLinear>,
    /// Else the model's.
    embed: Option<VocabParallelEmbedding>,
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    /// The columns that meet the embedding, and those that meet the state.
    qkv: Vec<PackedLinear>,
    heads: Heads,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
    norm: RmsNorm,
    lm_head: LmHead,
    /// Its ids whose logits this rank makes.
    part: VocabPart,
    /// What the model calls each of its ids, i32 `[1, V]`, if not by the same numbers.
    names: Option<Tensor>,
    shape: EagleConfig,
}

/// What a pass makes of each row.
#[derive(Debug)]
pub struct Drafted {
    /// For the head, `[R, H]`.
    pub hidden: Tensor,
    /// The state before the next token, where it is another, `[R, H]`.
    pub carried: Option<Tensor>,
}

/// Joins what enters three layers of a model while it is computed.
#[derive(Debug)]
pub struct Taps<'a> {
    eagle: &'a Eagle3,
    /// Of those that have been passed.
    joined: RefCell<Option<Tensor>>,
}

impl Eagle3 {
    /// Takes its weights by name; it drafts for the model `target`.
    pub(crate) fn load(
        (config, target): (&Config, &Config),
        w: &Weights<'_>,
    ) -> Result<Self, LoadError> {
        let Some(shape) = config.eagle else {
            return Err(LoadError::Table { tensor: "fc".to_owned(), what: "has no sizes" });
        };
        let norm = |w: &Weights<'_>| RmsNorm::load(w, config.rms_eps);
        let state_norm = |i: usize| norm(&w.at(format_args!("fc_norm.{i}")));
        let state_norms = if shape.state_norms { 0..3 } else { 0..0 };
        let rope = Rope::load(config, w)?;
        let layer = w.at(MIDLAYER[0].trim_end_matches('.'));
        let attn = layer.at("self_attn");
        let embed = || VocabParallelEmbedding::load(w, EAGLE_EMBEDDING, config.vocab);
        let has_embedding = w.has(EAGLE_EMBEDDING);
        Ok(Self {
            inputs: shape.inputs(target.layers),
            input_norms: state_norms.map(state_norm).collect::<Result<_, _>>()?,
            join: w.linear_parts(&["fc"], 3)?,
            embed: has_embedding.then(embed).transpose()?,
            embedding_norm: norm(&layer.at("input_layernorm"))?,
            hidden_norm: norm(&layer.at("hidden_norm"))?,
            qkv: attn.linear_parts(&PROJECTIONS, 2)?,
            heads: Heads::load(config, &attn, None, &rope, 0)?,
            mlp_norm: norm(&layer.at("post_attention_layernorm"))?,
            mlp: GatedMlp::load(&layer.at("mlp"), false)?,
            norm: norm(&w.at("norm"))?,
            lm_head: LmHead::load(w, HEAD, shape.vocab)?,
            part: w.ranks().vocab_part(shape.vocab),
            names: w.draft_names(OFFSETS)?,
            shape,
        })
    }

    /// Watches a forward pass of the model.
    #[must_use]
    pub fn taps(&self) -> Taps<'_> {
        Taps { eagle: self, joined: RefCell::default() }
    }

    /// Token ids `[R]`, none at position 0, and the states before them, `[R, H]`, to what the head makes drafts of.
    pub fn draft(
        &self,
        f: &Forward<'_>,
        (model, ids): (&dyn Model, &Tensor),
        before: Tensor,
    ) -> Result<Drafted, ForwardError> {
        let hidden = f.ops.rms_norm(&before, &self.hidden_norm.weight, self.hidden_norm.eps)?;
        let qkv = self.projected(f, &self.embedded(f, (model, ids))?, &hidden)?;
        let mut x = Residual::new(if self.shape.normed_residual { hidden } else { before });
        self.heads.behind_the_first(f, &mut x, &qkv)?;
        self.mlp.forward(f, &mut x, &self.mlp_norm)?;
        let hidden = x.normed(f, &self.norm)?;
        let carried = (!self.shape.carries_normed).then(|| x.into_stream());
        Ok(Drafted { hidden, carried })
    }

    /// Of the same keeps what later drafts attend to, and computes no more. What it is given at position 0 is never seen.
    pub fn keep(
        &self,
        f: &Forward<'_>,
        (model, ids): (&dyn Model, &Tensor),
        before: &Tensor,
    ) -> Result<(), ForwardError> {
        let hidden = f.ops.rms_norm(before, &self.hidden_norm.weight, self.hidden_norm.eps)?;
        let qkv = self.projected(f, &self.embedded(f, (model, ids))?, &hidden)?;
        self.heads.keep(f, &qkv).map(drop)
    }

    /// Logits of its own ids, f32 `[n, V]`, of `hidden [n, H]`: every rank gets those of all.
    pub fn logits(&self, f: &Forward<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.whole(f, hidden)
    }

    /// Of these logits those of this rank's part of its ids.
    pub fn own_logits(&self, f: &Forward<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.own(f, hidden)
    }

    /// That part.
    #[must_use]
    pub fn part(&self) -> &VocabPart {
        &self.part
    }

    /// What the model calls each of its ids, i32 `[1, V]`; `None` = the same.
    #[must_use]
    pub fn names(&self) -> Option<&Tensor> {
        self.names.as_ref()
    }

    /// Normed embeddings `[R, H]`.
    fn embedded(
        &self,
        f: &Forward<'_>,
        (model, ids): (&dyn Model, &Tensor),
    ) -> Result<Tensor, ForwardError> {
        let embedding = match &self.embed {
            Some(own) => own.forward(f, ids)?,
            None => model.embed(f, ids)?,
        };
        Ok(f.ops.rms_norm(&embedding, &self.embedding_norm.weight, self.embedding_norm.eps)?)
    }

    /// Queries, keys and values `[R, (N + 2 K) D]` of both.
    fn projected(
        &self,
        f: &Forward<'_>,
        embedding: &Tensor,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let of_embedding = f.ops.linear(embedding, &self.qkv[0])?;
        Ok(f.ops.add(&of_embedding, &f.ops.linear(hidden, &self.qkv[1])?)?)
    }
}

impl Taps<'_> {
    /// The states of all tokens, `[T, H]`, once the model has been computed.
    #[must_use]
    pub fn states(self) -> Option<Tensor> {
        self.joined.into_inner()
    }

    /// Whether what enters layer `layer` is wanted.
    pub(crate) fn wants(&self, layer: usize) -> bool {
        self.eagle.inputs.contains(&layer)
    }

    /// Takes in what enters such a layer, `x [T, H of the model]`.
    pub(crate) fn take_in(
        &self,
        f: &Forward<'_>,
        layer: usize,
        x: &Tensor,
    ) -> Result<(), ForwardError> {
        let Eagle3 { inputs, input_norms, join, .. } = self.eagle;
        for (which, _) in inputs.iter().enumerate().filter(|(_, input)| **input == layer) {
            let part = match input_norms.get(which) {
                Some(norm) => {
                    f.ops.linear(&f.ops.rms_norm(x, &norm.weight, norm.eps)?, &join[which])?
                }
                None => f.ops.linear(x, &join[which])?,
            };
            let mut joined = self.joined.borrow_mut();
            *joined = Some(match joined.take() {
                Some(sum) => f.ops.add(&sum, &part)?,
                None => part,
            });
        }
        Ok(())
    }
}
