//! Ops that update recurrent states after draft tokens have been verified. The forward pass of a row with draft tokens
//! leaves its states unchanged and stores small inputs of all its tokens; after sampling, one launch applies the tokens
//! that remain, in all layers. A state slot therefore never contains a rejected token.

use device::{Buffer, DType, DeviceError, MatMut, MatRef, check_at_least, check_dtype, check_size};

use crate::RecurrentStateLayout;
use crate::step::{LatestToken, RowMetadataField};

/// Rows of a step with draft tokens, as the ops of recurrent layers read them. A batch row may be staged as several rows
/// of one token each, of which the first has all tokens here, and the others none.
#[derive(Debug)]
pub struct ReplayRowArrays<'a> {
    /// Prefix sums of the row lengths; i32 `[1, at least rows + 1]`.
    pub cu: MatMut<'a>,
    /// Slot to which the forward pass writes the state after each row, plus 1; 0 for rows with draft tokens; i32 `[1, at
    /// least rows]`.
    pub write: MatMut<'a>,
    /// Index of the row of each replay; i32 `[1, replays]`. An entry is valid if [`RowMetadataField::Replay`] of the row is
    /// the index of the entry plus 1.
    pub first_rows: MatMut<'a>,
}

/// Stored inputs of state updates. Layer `l` stores those of token `t` of a step in row `l · tokens + t`.
#[derive(Debug)]
pub struct ReplayInputArrays<'a> {
    /// Inputs of the convolution, `[layers · tokens, channels of the convolution]`.
    pub conv_inputs: MatMut<'a>,
    /// Keys and values after the convolution, `[layers · tokens, key channels + value channels]`.
    pub keys_values: MatMut<'a>,
    /// Decay factors `exp(g)` of the value heads, then their write strengths; f32 `[layers · tokens, 2 · value heads]`.
    pub gates: MatMut<'a>,
}

/// Computes the rows of a step for the recurrent layers from its staged rows and their row facts.
#[derive(Debug)]
pub struct ReplayRowPreparation<'a, 'b> {
    /// Outputs.
    pub arrays: &'a mut ReplayRowArrays<'b>,
    /// Prefix sums of the lengths of the staged rows; i32 `[1, at least rows + 1]`.
    pub cu_q: MatRef<'a>,
    /// [`RowMetadataField`]s of each row; i32 `[fields, at least rows]`.
    pub facts: MatRef<'a>,
    /// Number of staged rows.
    pub rows: usize,
}

/// Stores the inputs of the state updates of one layer, for the first `tokens` tokens of a step.
#[derive(Debug)]
pub struct ReplayInputWrite<'a, 'b> {
    /// Outputs.
    pub arrays: &'a mut ReplayInputArrays<'b>,
    /// Number of tokens to store.
    pub tokens: usize,
    /// Input of the convolution, `[at least tokens, at least channels]`.
    pub x: MatRef<'a>,
    /// Queries, keys and values after the convolution, `[at least tokens, channels]`.
    pub qkv: MatRef<'a>,
    /// Inputs `b` of the write strength of each value head, `[at least tokens, value_heads]`.
    pub beta: MatRef<'a>,
    /// Inputs `a` of the decay of each value head, `[at least tokens, value_heads]`.
    pub decay: MatRef<'a>,
    /// Logarithm of the decay rate of each value head; f32 `[value_heads]`.
    pub a_log: MatRef<'a>,
    /// Bias of the decay input of each value head; f32 `[value_heads]`.
    pub dt_bias: MatRef<'a>,
    /// Layout of the state pool.
    pub layout: &'a RecurrentStateLayout,
    /// Layer of the pool.
    pub layer: usize,
}

/// Applies the newest token and the accepted draft tokens of each row with draft tokens to its states in all layers, after
/// the sampler has verified the draft tokens. The number of tokens is the position of the latest token of the sequence
/// slot minus the position of the first token of the row; without a sampled token it is 0, and no state is written.
#[derive(Debug)]
pub struct StateReplay<'a, 'b> {
    /// State pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a RecurrentStateLayout,
    /// Stored inputs of the tokens of the step.
    pub inputs: &'a ReplayInputArrays<'b>,
    /// Rows of the step.
    pub arrays: &'a ReplayRowArrays<'b>,
    /// [`RowMetadataField`]s of each row; i32 `[fields, at least rows]`.
    pub facts: MatRef<'a>,
    /// Number of staged rows.
    pub rows: usize,
    /// Maximum number of rows with draft tokens.
    pub replays: usize,
    /// Position of each token of the step; i32 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// [`LatestToken`] records as 32-bit words; i32 `[sequence_slots, 3]`.
    pub latest: MatRef<'a>,
}

impl ReplayRowArrays<'_> {
    fn check(
        &self,
        kernel: &'static str,
        facts: MatRef<'_>,
        rows: usize,
    ) -> Result<(), DeviceError> {
        check_at_least(kernel, "row boundaries", self.cu.cols(), rows + 1)?;
        check_at_least(kernel, "written slots", self.write.cols(), rows)?;
        check_at_least(kernel, "row facts", facts.rows(), RowMetadataField::COUNT)?;
        check_at_least(kernel, "columns of row facts", facts.cols(), rows)?;
        check_dtype(kernel, "row facts", facts.dtype(), DType::I32)?;
        for array in [&self.cu, &self.write, &self.first_rows] {
            check_dtype(kernel, "rows", array.dtype(), DType::I32)?;
        }
        Ok(())
    }
}

impl ReplayInputArrays<'_> {
    /// Number of tokens of a step whose inputs are stored.
    #[must_use]
    pub fn tokens(&self, layout: &RecurrentStateLayout) -> usize {
        self.gates.rows() / layout.layers.max(1)
    }

    fn check(
        &self,
        kernel: &'static str,
        layout: &RecurrentStateLayout,
    ) -> Result<(), DeviceError> {
        layout.check()?;
        let rows = self.tokens(layout) * layout.layers;
        for (what, array, cols) in [
            ("convolution inputs", &self.conv_inputs, layout.conv_channels()),
            ("keys and values", &self.keys_values, layout.key_channels() + layout.value_channels()),
            ("gates", &self.gates, 2 * layout.value_heads),
        ] {
            check_size(kernel, what, array.rows(), rows)?;
            check_size(kernel, what, array.cols(), cols)?;
            check_size(kernel, what, array.stride(), cols)?;
        }
        check_dtype(kernel, "gates", self.gates.dtype(), DType::F32)?;
        check_dtype(kernel, "keys and values", self.keys_values.dtype(), self.conv_inputs.dtype())
    }
}

impl ReplayRowPreparation<'_, '_> {
    pub(crate) const KERNEL: &'static str = "gdn_replay_rows";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        check_at_least(Self::KERNEL, "cu_q", self.cu_q.cols(), self.rows + 1)?;
        check_dtype(Self::KERNEL, "cu_q", self.cu_q.dtype(), DType::I32)?;
        self.arrays.check(Self::KERNEL, self.facts, self.rows)
    }
}

impl ReplayInputWrite<'_, '_> {
    pub(crate) const KERNEL: &'static str = "gdn_replay_inputs";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, layout, heads) = (Self::KERNEL, self.layout, self.layout.value_heads);
        self.arrays.check(kernel, layout)?;
        check_at_least(kernel, "layers", layout.layers, self.layer + 1)?;
        check_at_least(kernel, "stored tokens", self.arrays.tokens(layout), self.tokens)?;
        check_at_least(kernel, "columns of x", self.x.cols(), layout.conv_channels())?;
        check_size(kernel, "columns of qkv", self.qkv.cols(), layout.conv_channels())?;
        for (what, input) in
            [("x", self.x), ("qkv", self.qkv), ("beta", self.beta), ("decay", self.decay)]
        {
            check_at_least(kernel, what, input.rows(), self.tokens)?;
            check_dtype(kernel, what, input.dtype(), self.arrays.conv_inputs.dtype())?;
        }
        for (what, head) in [("a_log", self.a_log), ("dt_bias", self.dt_bias)] {
            check_size(kernel, what, head.cols(), heads)?;
            check_dtype(kernel, what, head.dtype(), DType::F32)?;
        }
        check_size(kernel, "beta", self.beta.cols(), heads)?;
        check_size(kernel, "decay", self.decay.cols(), heads)
    }
}

impl StateReplay<'_, '_> {
    pub(crate) const KERNEL: &'static str = "gdn_replay";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, layout) = (Self::KERNEL, self.layout);
        check_at_least(kernel, "pool bytes", self.pool.bytes(), layout.bytes())?;
        self.inputs.check(kernel, layout)?;
        self.arrays.check(kernel, self.facts, self.rows)?;
        check_at_least(kernel, "replays", self.arrays.first_rows.cols(), self.replays)?;
        check_size(kernel, "words of the latest token", self.latest.cols(), LatestToken::WORDS)?;
        check_size(kernel, "stride of the latest token", self.latest.stride(), LatestToken::WORDS)?;
        check_dtype(kernel, "latest token", self.latest.dtype(), DType::I32)?;
        check_dtype(kernel, "positions", self.positions.dtype(), DType::I32)
    }
}
