//! Expert load: number of tokens per expert, counted by the routers.

use crate::ModelConfig;
use ops::{ExpertLoadCounters, ExpertLoadDownload, LayerLoadCounter, OpError, Ops, Tensor};

/// Number of tokens by layer and expert since the last `take`, in device memory.
#[derive(Debug)]
pub struct ExpertLoad(ExpertLoadCounters);

impl ExpertLoad {
    /// Creates counters for the experts of a model; `None` if it has none.
    pub fn new(ops: &Ops, config: &ModelConfig) -> Result<Option<Self>, OpError> {
        let Some(moe) = &config.moe else { return Ok(None) };
        Ok(Some(Self(ExpertLoadCounters::new(ops, config.layers, moe.experts)?)))
    }

    /// Starts a copy of the counts to the host and resets them: see [`ExpertLoadCounters::take`].
    pub fn take(&self, ops: &Ops) -> Result<Option<ExpertLoadDownload>, OpError> {
        self.0.take(ops)
    }

    /// Counter for the router of a layer. Tokens with a KV slot of −1 in `slots`, i64 `[T]`, are padding.
    pub(crate) fn layer_counter<'a>(
        &'a self,
        layer: usize,
        slots: Option<&'a Tensor>,
    ) -> LayerLoadCounter<'a> {
        LayerLoadCounter { counts: &self.0, layer, slots }
    }
}
