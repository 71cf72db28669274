//! What all decoders share: embedding, layers, final norm, head.

use super::{DraftLayer, LmHead, Residual, RmsNorm, Rope, VocabParallelEmbedding};
use crate::{Config, Forward, ForwardError, LoadError, Model, Weights};
use ops::Tensor;

/// A stack of layers of one architecture.
#[derive(Debug)]
pub(crate) struct Decoder<L> {
    embed: VocabParallelEmbedding,
    layers: Vec<L>,
    norm: RmsNorm,
    lm_head: LmHead,
    /// If it is wanted.
    draft: Option<DraftLayer<L>>,
}

/// One layer: what an architecture file defines.
pub(crate) trait DecoderLayer: Sized {
    /// Layer `i`, whose weights are under `w`.
    fn load(config: &Config, w: &Weights<'_>, rope: &Rope, i: usize) -> Result<Self, LoadError>;

    /// Tells that `next` is the layer behind this one: what reads its weights when.
    fn precede(&mut self, next: &Self);

    /// Updates the residual stream `[T, H]`. With `asked`, i32 `[n]`, it is of those tokens alone behind the layer's attention.
    fn forward(
        &self,
        f: &Forward<'_>,
        x: &mut Residual,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError>;

    /// Keeps of the stream `[T, H]` what later tokens attend to; behind this it is of no meaning.
    fn keep(&self, f: &Forward<'_>, x: &mut Residual) -> Result<(), ForwardError> {
        self.forward(f, x, None)
    }
}

impl<L: DecoderLayer + Send> Model for Decoder<L> {
    fn load(config: &Config, w: &Weights<'_>) -> Result<Self, LoadError> {
        let rope = Rope::load(config, w)?;
        let body = w.at("model");
        let (embed, lm_head) = LmHead::load_with_embedding(config, w)?;
        let layer = |i| L::load(config, &body.at(format_args!("layers.{i}")), &rope, i);
        let mut layers = (0..config.layers).map(layer).collect::<Result<Vec<L>, _>>()?;
        for i in 1..layers.len() {
            let (before, behind) = layers.split_at_mut(i);
            before[i - 1].precede(&behind[0]);
        }
        let norm = RmsNorm::load(&body.at("norm"), config.rms_eps)?;
        let behind = config.layers;
        let draft = |w: &Weights<'_>| DraftLayer::load(config, w, &rope, behind);
        let w = body.at(format_args!("layers.{behind}"));
        let draft = config.drafting.then(|| draft(&w)).transpose()?;
        Ok(Self { embed, layers, norm, lm_head, draft })
    }

    fn forward(&self, f: &Forward<'_>, ids: &Tensor) -> Result<Tensor, ForwardError> {
        let mut x = Residual::new(self.embed.forward(f, ids)?); // [T, H]
        for (i, layer) in self.layers.iter().enumerate() {
            x.tap(f, i)?;
            let last = i + 1 == self.layers.len();
            layer.forward(f, &mut x, f.asked.filter(|_| last))?;
            x.show(f, i)?;
        }
        x.tap(f, self.layers.len())?;
        x.normed(f, &self.norm)
    }

    fn embed(&self, f: &Forward<'_>, ids: &Tensor) -> Result<Tensor, ForwardError> {
        self.embed.forward(f, ids)
    }

    fn draft(
        &self,
        f: &Forward<'_>,
        ids: &Tensor,
        before: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let draft = self.draft.as_ref().ok_or(ForwardError::NoDraftLayer)?;
        draft.forward(f, &self.embed.forward(f, ids)?, before)
    }

    fn keep_for_drafts(
        &self,
        f: &Forward<'_>,
        ids: &Tensor,
        before: &Tensor,
    ) -> Result<(), ForwardError> {
        let draft = self.draft.as_ref().ok_or(ForwardError::NoDraftLayer)?;
        draft.keep(f, &self.embed.forward(f, ids)?, before)
    }

    fn logits(&self, f: &Forward<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.whole(f, hidden)
    }

    fn own_logits(&self, f: &Forward<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.own(f, hidden)
    }
}
