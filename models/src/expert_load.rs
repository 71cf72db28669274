//! Expert load: counters in device memory of the tokens that the routers send to each expert.

use crate::ModelConfig;
use ops::{
    ExpertLoadCounters, ExpertLoadStatsDownload, LayerExpertLoadCounter, OpError, Ops, Tensor,
};

/// Number of tokens routed to each expert, by layer; counted in device memory and reset by `take`.
#[derive(Debug)]
pub struct ExpertLoadStats(ExpertLoadCounters);

impl ExpertLoadStats {
    /// Creates the counters for a model; returns `None` if the model has no experts.
    pub fn new(ops: &Ops, config: &ModelConfig) -> Result<Option<Self>, OpError> {
        let Some(moe) = &config.moe else { return Ok(None) };
        Ok(Some(Self(ExpertLoadCounters::new(ops, config.layers, moe.experts)?)))
    }

    /// Starts a copy of the counts to the host, and resets the counters: see [`ExpertLoadCounters::take`].
    pub fn take(&self, ops: &Ops) -> Result<Option<ExpertLoadStatsDownload>, OpError> {
        self.0.take(ops)
    }

    /// Returns the counter for the router of layer `layer`. `slots` are the KV slots of the tokens, i64
    /// `[tokens]`; a slot of −1 denotes padding, which is not counted.
    pub(crate) fn layer_counter<'a>(
        &'a self,
        layer: usize,
        slots: Option<&'a Tensor>,
    ) -> LayerExpertLoadCounter<'a> {
        LayerExpertLoadCounter { counts: &self.0, layer, slots }
    }
}
