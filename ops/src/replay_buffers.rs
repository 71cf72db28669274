//! Device memory of the updates of recurrent states after draft tokens have been verified. The forward pass stores the
//! inputs of the updates; after sampling, one launch applies the tokens that remain to the states of all layers.

use device::DType;
use kernels::step::{ReplayShape, RowMetadataField};
use kernels::{
    RecurrentStateLayout, ReplayInputArrays, ReplayInputWrite, ReplayRowArrays,
    ReplayRowPreparation, StateReplay, StateSlotRows,
};

use crate::{
    DeltaRuleParams, DeviceBatchMetadata, DeviceSequenceSlots, KvPool, OpError, Ops, Tensor,
};

/// Maximum sizes of all steps with draft tokens, for which the replay buffers are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayBufferLimits {
    /// Maximum number of staged rows of a step.
    pub rows: usize,
    /// Maximum number of rows with draft tokens, and of leading tokens that include all tokens of these rows.
    pub replay: ReplayShape,
}

/// Replay buffers, allocated at start-up with full size and fixed addresses.
#[derive(Debug)]
pub(crate) struct ReplayBuffers {
    cu: Tensor,          // i32 [1, rows + 1]
    write: Tensor,       // i32 [1, rows]
    first_rows: Tensor,  // i32 [1, replays]
    conv_inputs: Tensor, // [layers · tokens, convolution channels]
    keys_values: Tensor, // [layers · tokens, key + value channels]
    gates: Tensor,       // f32 [layers · tokens, 2 · value heads]
}

impl ReplayBufferLimits {
    /// Bytes of the replay buffers of a model with recurrent states of this layout and activations of type `dtype`.
    #[must_use]
    pub fn bytes(&self, layout: &RecurrentStateLayout, dtype: DType) -> usize {
        let activations = layout.conv_channels() + layout.key_channels() + layout.value_channels();
        let token = activations * dtype.bytes() + 2 * layout.value_heads * DType::F32.bytes();
        let words = 2 * self.rows + 1 + self.replay.rows;
        layout.layers * self.replay.tokens * token + words * DType::I32.bytes()
    }
}

impl ReplayBuffers {
    /// Allocates memory for steps up to `limits`.
    pub(crate) fn new(
        ops: &Ops,
        layout: &RecurrentStateLayout,
        limits: ReplayBufferLimits,
    ) -> Result<Self, OpError> {
        let words = |n: usize| ops.zeros(DType::I32, &[1, n]);
        let tokens = layout.layers * limits.replay.tokens;
        let keys_values = layout.key_channels() + layout.value_channels();
        Ok(Self {
            cu: words(limits.rows + 1)?,
            write: words(limits.rows)?,
            first_rows: words(limits.replay.rows)?,
            conv_inputs: ops.zeros(ops.dtype(), &[tokens, layout.conv_channels()])?,
            keys_values: ops.zeros(ops.dtype(), &[tokens, keys_values])?,
            gates: ops.zeros(DType::F32, &[tokens, 2 * layout.value_heads])?,
        })
    }

    /// Returns the rows of a prepared step with draft tokens, of which `rows` reads all other fields.
    pub(crate) fn state_rows<'a>(
        &'a self,
        rows: StateSlotRows<'a>,
    ) -> Result<StateSlotRows<'a>, OpError> {
        let count = rows.rows();
        let cu_q = self.cu.mat()?.columns(0, count + 1);
        let write = self.write.mat()?.columns(0, count);
        Ok(StateSlotRows { cu_q, write, ..rows })
    }

    fn row_arrays(&mut self) -> Result<ReplayRowArrays<'_>, OpError> {
        Ok(ReplayRowArrays {
            cu: self.cu.mat_mut()?,
            write: self.write.mat_mut()?,
            first_rows: self.first_rows.mat_mut()?,
        })
    }

    fn input_arrays(&mut self) -> Result<ReplayInputArrays<'_>, OpError> {
        Ok(ReplayInputArrays {
            conv_inputs: self.conv_inputs.mat_mut()?,
            keys_values: self.keys_values.mat_mut()?,
            gates: self.gates.mat_mut()?,
        })
    }

    /// Applies the remaining tokens of a step to the states in `pool`.
    fn replay(
        &mut self,
        ops: &Ops,
        pool: &mut device::Buffer,
        layout: &RecurrentStateLayout,
        batch: &DeviceBatchMetadata,
        latest: &Tensor,
    ) -> Result<(), OpError> {
        let arrays = ReplayRowArrays {
            cu: self.cu.mat_mut()?,
            write: self.write.mat_mut()?,
            first_rows: self.first_rows.mat_mut()?,
        };
        let inputs = ReplayInputArrays {
            conv_inputs: self.conv_inputs.mat_mut()?,
            keys_values: self.keys_values.mat_mut()?,
            gates: self.gates.mat_mut()?,
        };
        let op = StateReplay {
            pool,
            layout,
            inputs: &inputs,
            arrays: &arrays,
            facts: batch.all_row_facts()?,
            rows: batch.rows(),
            replays: batch.replay.rows,
            positions: batch.positions.mat()?,
            latest: latest.mat()?,
        };
        Ok(ops.device.launch(&ops.stream, op)?)
    }
}

impl Ops {
    /// Computes the rows of a prepared step for layers with recurrent state, if the step has rows with draft tokens. Their
    /// forward pass leaves the states unchanged.
    pub fn prepare_replay(&self, kv: &KvPool, batch: &DeviceBatchMetadata) -> Result<(), OpError> {
        if batch.replay.rows == 0 {
            return Ok(());
        }
        let mut buffers = kv.states("prepare_replay")?.replay("prepare_replay")?.borrow_mut();
        let mut arrays = buffers.row_arrays()?;
        let op = ReplayRowPreparation {
            arrays: &mut arrays,
            cu_q: batch.cu_q.mat()?,
            facts: batch.all_row_facts()?,
            rows: batch.rows(),
        };
        Ok(self.device.launch(&self.stream, op)?)
    }

    /// Stores the inputs from which the states of layer `params.layer` are updated after sampling, if the step has rows
    /// with draft tokens: `x [tokens, at least channels]` is the input and `qkv [tokens, channels]` the output of
    /// [`Ops::causal_convolution`], `gates [tokens, 2 · value heads]` are those of [`Ops::gated_delta_rule`].
    pub fn store_replay_inputs(
        &self,
        x: &Tensor,
        qkv: &Tensor,
        gates: &Tensor,
        params: &DeltaRuleParams<'_>,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<(), OpError> {
        if batch.replay.rows == 0 {
            return Ok(());
        }
        self.launch_order.interrupt();
        let states = kv.states("store_replay_inputs")?;
        let mut buffers = states.replay("store_replay_inputs")?.borrow_mut();
        let (mut arrays, heads) = (buffers.input_arrays()?, gates.cols() / 2);
        let op = ReplayInputWrite {
            arrays: &mut arrays,
            tokens: batch.replay.tokens,
            x: x.mat()?,
            qkv: qkv.mat()?,
            beta: gates.mat()?.columns(0, heads),
            decay: gates.mat()?.columns(heads, heads),
            a_log: params.a_log.mat()?,
            dt_bias: params.dt_bias.mat()?,
            layout: &states.layout,
            layer: params.layer,
        };
        Ok(self.device.launch(&self.stream, op)?)
    }

    /// Applies the newest token and the accepted draft tokens of the rows with draft tokens to their states in all layers,
    /// after all logits rows of the step have been sampled.
    pub fn replay_states(
        &self,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
        seq_slots: &DeviceSequenceSlots,
    ) -> Result<(), OpError> {
        if batch.replay.rows == 0 {
            return Ok(());
        }
        let states = kv.states("replay_states")?;
        let mut buffers = states.replay("replay_states")?.borrow_mut();
        let pool = &mut states.bytes.borrow_mut();
        buffers.replay(self, pool, &states.layout, batch, &seq_slots.latest)
    }
}

impl DeviceBatchMetadata {
    /// Metadata of each row, i32 `[fields, at least rows]`.
    fn all_row_facts(&self) -> Result<device::MatRef<'_>, OpError> {
        let missing = OpError::Pool { op: "replay", stores: "no state slots of its rows" };
        let facts = self.row_facts.as_ref().ok_or(missing)?;
        debug_assert!(facts.rows() >= RowMetadataField::COUNT);
        facts.mat()
    }
}
