//! How many tokens each expert gets, counted where routers choose.

use crate::Config;
use ops::{Counting, CountsInFlight, ExpertCounts, OpError, Ops, Tensor};

/// Tokens by layer and expert since they were last taken. They lie on the device.
#[derive(Debug)]
pub struct ExpertLoad(ExpertCounts);

impl ExpertLoad {
    /// For the experts of a model; `None` = it has none.
    pub fn new(ops: &Ops, config: &Config) -> Result<Option<Self>, OpError> {
        let Some(moe) = &config.moe else { return Ok(None) };
        Ok(Some(Self(ExpertCounts::new(ops, config.layers, moe.experts)?)))
    }

    /// Begins to bring the numbers to the host, and counts anew: see [`ExpertCounts::take`].
    pub fn take(&self, ops: &Ops) -> Result<Option<CountsInFlight>, OpError> {
        self.0.take(ops)
    }

    /// Where the router of a layer counts; tokens without a slot, i64 `[T]`, are padding.
    pub(crate) fn counting<'a>(&'a self, layer: usize, slots: Option<&'a Tensor>) -> Counting<'a> {
        Counting { counts: &self.0, layer, slots }
    }
}
