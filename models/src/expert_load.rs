//! How many tokens each expert gets, counted where routers choose.

use crate::ModelConfig;
use ops::{ExpertLoadCounters, ExpertLoadDownload, LayerLoadCounter, OpError, Ops, Tensor};

/// Tokens by layer and expert since they were last taken. They lie on the device.
#[derive(Debug)]
pub struct ExpertLoad(ExpertLoadCounters);

impl ExpertLoad {
    /// For the experts of a model; `None` = it has none.
    pub fn new(ops: &Ops, config: &ModelConfig) -> Result<Option<Self>, OpError> {
        let Some(moe) = &config.moe else { return Ok(None) };
        Ok(Some(Self(ExpertLoadCounters::new(ops, config.layers, moe.experts)?)))
    }

    /// Begins to bring the numbers to the host, and counts anew: see [`ExpertLoadCounters::take`].
    pub fn take(&self, ops: &Ops) -> Result<Option<ExpertLoadDownload>, OpError> {
        self.0.take(ops)
    }

    /// Where the router of a layer counts; tokens without a slot, i64 `[T]`, are padding.
    pub(crate) fn layer_counter<'a>(
        &'a self,
        layer: usize,
        slots: Option<&'a Tensor>,
    ) -> LayerLoadCounter<'a> {
        LayerLoadCounter { counts: &self.0, layer, slots }
    }
}
