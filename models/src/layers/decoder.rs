//! What all decoders share: embedding, layers, final norm, head.

use super::{LmHead, MtpModule, ResidualStream, RmsNorm, RotaryEmbedding, VocabParallelEmbedding};
use crate::{ForwardContext, ForwardError, Model, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// A stack of layers of one architecture.
#[derive(Debug)]
pub(crate) struct DecoderModel<L> {
    embed: VocabParallelEmbedding,
    layers: Vec<L>,
    norm: RmsNorm,
    lm_head: LmHead,
    /// If it is wanted.
    mtp: Option<MtpModule<L>>,
}

/// One layer: what an architecture file defines.
pub(crate) trait DecoderLayer: Sized {
    /// Layer `i`, whose weights are under `w`.
    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError>;

    /// Tells that `next` is the layer behind this one: what reads its weights when.
    fn prefetch_next(&mut self, next: &Self);

    /// Updates the residual stream `[T, H]`. With `asked`, i32 `[n]`, it is of those tokens alone behind the layer's attention.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError>;

    /// Keeps of the stream `[T, H]` what later tokens attend to; behind this it is of no meaning.
    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
    ) -> Result<(), ForwardError> {
        self.forward(f, x, None)
    }
}

impl<L: DecoderLayer + Send> Model for DecoderModel<L> {
    fn load(config: &ModelConfig, w: &Weights<'_>) -> Result<Self, ModelLoadError> {
        let rope = RotaryEmbedding::load(config, w)?;
        let body = w.at("model");
        let (embed, lm_head) = LmHead::load_with_embedding(config, w)?;
        let layer = |i| L::load(config, &body.at(format_args!("layers.{i}")), &rope, i);
        let mut layers = (0..config.layers).map(layer).collect::<Result<Vec<L>, _>>()?;
        for i in 1..layers.len() {
            let (before, behind) = layers.split_at_mut(i);
            before[i - 1].prefetch_next(&behind[0]);
        }
        let norm = RmsNorm::load(&body.at("norm"), config.rms_eps)?;
        let behind = config.layers;
        let draft = |w: &Weights<'_>| MtpModule::load(config, w, &rope, behind);
        let w = body.at(format_args!("layers.{behind}"));
        let draft = config.load_mtp.then(|| draft(&w)).transpose()?;
        Ok(Self { embed, layers, norm, lm_head, mtp: draft })
    }

    fn forward(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError> {
        let mut x = ResidualStream::new(self.embed.forward(f, ids)?); // [T, H]
        for (i, layer) in self.layers.iter().enumerate() {
            x.collect_aux_state(f, i)?;
            let last = i + 1 == self.layers.len();
            layer.forward(f, &mut x, f.logits_indices.filter(|_| last))?;
            x.probe_layer(f, i)?;
        }
        x.collect_aux_state(f, self.layers.len())?;
        x.normed(f, &self.norm)
    }

    fn embed(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError> {
        self.embed.forward(f, ids)
    }

    fn mtp_forward(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let draft = self.mtp.as_ref().ok_or(ForwardError::NoMtpModule)?;
        draft.forward(f, &self.embed.forward(f, ids)?, before)
    }

    fn mtp_write_kv(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: &Tensor,
    ) -> Result<(), ForwardError> {
        let draft = self.mtp.as_ref().ok_or(ForwardError::NoMtpModule)?;
        draft.write_kv_only(f, &self.embed.forward(f, ids)?, before)
    }

    fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.full_logits(f, hidden)
    }

    fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.lm_head.shard_logits(f, hidden)
    }
}
