//! Layers with recurrent state: gated delta nets, and the output gate of the attention layers between them.

use std::cell::{Ref, RefCell};

use kernels::{CausalConvolution, GatedDeltaRule, GatedRmsNorm, SigmoidGating, StateSlotRows};

use crate::kv_pool::DeviceStatePool;
use crate::replay_buffers::ReplayBuffers;

use crate::{DeviceBatchMetadata, KvPool, OpError, Ops, Tensor};

/// Parameters of the decay of a gated delta net layer, one per value head of this rank, and its layer in the state pool.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleParams<'a> {
    /// Logarithm of the decay rate; f32 `[value heads]`.
    pub a_log: &'a Tensor,
    /// Bias of the decay input; f32 `[value heads]`.
    pub dt_bias: &'a Tensor,
    /// Index of the layer in the state pool.
    pub layer: usize,
}

impl Ops {
    /// Causal depthwise convolution over the tokens of each row, then SiLU: `x [tokens, at least channels]`, of which the
    /// first `channels` columns are queries, keys and values; `weight` f32 `[width, channels]`. Returns `[tokens,
    /// channels]`. Inputs before a row are in the state of layer `layer`, which is updated.
    pub fn causal_convolution(
        &self,
        x: &Tensor,
        weight: &Tensor,
        layer: usize,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let states = kv.states("causal_convolution")?;
        let replay = replay_of(states, batch, "causal_convolution")?;
        let mut y = self.scratch(x.dtype(), &[x.rows(), states.layout.conv_channels()])?;
        let op = CausalConvolution {
            y: y.mat_mut()?,
            x: x.mat()?,
            weight: weight.mat()?,
            pool: &mut states.bytes.borrow_mut(),
            layout: &states.layout,
            layer,
            rows: state_rows(batch, replay.as_deref())?,
        };
        self.device.launch(&self.stream, op)?;
        Ok(y)
    }

    /// Gated delta rule over the tokens of each row: `qkv` is the output of [`Ops::causal_convolution`], `gates [tokens,
    /// 2 · value heads]` has the inputs of the write strength, then the inputs of the decay. Returns `[tokens, value
    /// channels]`, and updates the states.
    pub fn gated_delta_rule(
        &self,
        qkv: &Tensor,
        gates: &Tensor,
        params: &DeltaRuleParams<'_>,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let states = kv.states("gated_delta_rule")?;
        let replay = replay_of(states, batch, "gated_delta_rule")?;
        let heads = gates.cols() / 2;
        let mut o = self.scratch(qkv.dtype(), &[qkv.rows(), states.layout.value_channels()])?;
        let op = GatedDeltaRule {
            o: o.mat_mut()?,
            qkv: qkv.mat()?,
            beta: gates.mat()?.columns(0, heads),
            decay: gates.mat()?.columns(heads, heads),
            a_log: params.a_log.mat()?,
            dt_bias: params.dt_bias.mat()?,
            pool: &mut states.bytes.borrow_mut(),
            layout: &states.layout,
            layer: params.layer,
            rows: state_rows(batch, replay.as_deref())?,
        };
        self.device.launch(&self.stream, op)?;
        Ok(o)
    }

    /// RMS norm of each head, multiplied by `silu(z)`: `x [tokens, heads · head_dim]`, `weight` f32 `[head_dim]`. The gates
    /// `z` are the last columns of `gates`.
    pub fn gated_rms_norm(
        &self,
        x: &Tensor,
        gates: &Tensor,
        weight: &Tensor,
        eps: f32,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let mut y = self.scratch(x.dtype(), x.shape())?;
        let z = last_columns(gates, x.cols())?;
        let op = GatedRmsNorm { y: y.mat_mut()?, x: x.mat()?, z, weight: weight.mat()?, eps };
        self.device.launch(&self.stream, op)?;
        Ok(y)
    }

    /// Multiplies `x [tokens, columns]` by the sigmoid of its gates, in place. The gates are the last columns of `gates`.
    pub fn sigmoid_gating(&self, x: &mut Tensor, gates: &Tensor) -> Result<(), OpError> {
        self.launch_order.interrupt();
        let gate = last_columns(gates, x.cols())?;
        Ok(self.device.launch(&self.stream, SigmoidGating { x: x.mat_mut()?, gate })?)
    }
}

/// Returns the buffers for rows with draft tokens, if the step has such rows.
fn replay_of<'a>(
    states: &'a DeviceStatePool,
    batch: &DeviceBatchMetadata,
    op: &'static str,
) -> Result<Option<Ref<'a, ReplayBuffers>>, OpError> {
    (batch.replay.rows > 0).then(|| states.replay(op).map(RefCell::borrow)).transpose()
}

/// Returns the rows of the batch with the state slots that they read and write.
fn state_rows<'a>(
    batch: &'a DeviceBatchMetadata,
    replay: Option<&'a ReplayBuffers>,
) -> Result<StateSlotRows<'a>, OpError> {
    let rows = batch.state_rows()?;
    replay.map_or(Ok(rows), |replay| replay.state_rows(rows))
}

/// Returns a view of the last `cols` columns of `x`.
fn last_columns(x: &Tensor, cols: usize) -> Result<device::MatRef<'_>, OpError> {
    let Some(first) = x.cols().checked_sub(cols) else {
        let (got, expected) = (vec![x.cols()], vec![cols]);
        return Err(OpError::Shape { op: "output gate", what: "gates", got, expected });
    };
    Ok(x.mat()?.columns(first, cols))
}
