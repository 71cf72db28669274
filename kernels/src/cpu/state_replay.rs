//! State updates after the verification of draft tokens, on the CPU. The arithmetic is that of the delta rule, so that the
//! states have the bits of a run without draft tokens.

use device::{CpuIsa, DeviceError, FloatElement, MatRef};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::recurrent::{DeltaRuleStep, UnitVector, decay_factor, write_strength};
use super::row_kernel::{RowConversion, dispatch};
use super::shared_rows::SendPtr;
use super::step::index;
use crate::cpu::CpuBackend;
use crate::step::RowMetadataField;
use crate::{
    CpuKernel, RecurrentStateLayout, ReplayInputArrays, ReplayInputWrite, ReplayRowPreparation,
    StateReplay,
};

impl CpuKernel for ReplayRowPreparation<'_, '_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let Self { arrays, cu_q, facts, rows } = self;
        let fact = |fact: RowMetadataField| facts.row::<i32>(fact as usize);
        let (later, replay) = (fact(RowMetadataField::LaterTokens), fact(RowMetadataField::Replay));
        let written = fact(RowMetadataField::StateWrite);
        let replays = arrays.first_rows.cols();
        arrays.cu.row_mut::<i32>(0)[0] = 0;
        for r in 0..rows {
            arrays.cu.row_mut::<i32>(0)[r + 1] = cu_q.row::<i32>(0)[r + 1] + later[r];
            arrays.write.row_mut::<i32>(0)[r] = if replay[r] == 0 { written[r] } else { 0 };
            if replay[r] > 0 {
                let i = index("replay", replay[r] - 1, replays)?;
                arrays.first_rows.row_mut::<i32>(0)[i] = r as i32;
            }
        }
        Ok(())
    }
}

impl CpuKernel for ReplayInputWrite<'_, '_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!(Self::KERNEL, self.x.dtype(), T => cpu.write_replay_inputs::<T>(self));
        Ok(())
    }
}

impl CpuKernel for StateReplay<'_, '_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let rows = replay_rows(&self)?;
        let dtype = self.inputs.conv_inputs.dtype();
        for_float!(Self::KERNEL, dtype, T => cpu.replay_states::<T>(self, &rows));
        Ok(())
    }
}

/// Tokens and state slots of one replay.
struct ReplayRow {
    /// Index of the first token in the step.
    first: usize,
    /// Number of tokens to apply; at least 1.
    tokens: usize,
    read: Option<usize>,
    write: usize,
}

/// Returns the replays that change states.
///
/// Errors: a row, sequence slot, token or state slot is out of range.
fn replay_rows(op: &StateReplay<'_, '_>) -> Result<Vec<ReplayRow>, DeviceError> {
    let fact = |fact: RowMetadataField, r: usize| op.facts.row::<i32>(fact as usize)[r];
    let cu = op.arrays.cu.as_ref().row::<i32>(0);
    let mut rows = Vec::new();
    for (i, &r) in op.arrays.first_rows.as_ref().row::<i32>(0)[..op.replays].iter().enumerate() {
        let r = r as usize;
        if r >= op.rows || fact(RowMetadataField::Replay, r) != i as i32 + 1 {
            continue;
        }
        let seq_slot = fact(RowMetadataField::SequenceSlot, r);
        let seq_slot = index("sequence slot", seq_slot, op.latest.rows())?;
        let first = index("token", cu[r], op.inputs.tokens(op.layout))?;
        let len = cu[r + 1] - cu[r];
        index("token", cu[r + 1] - 1, op.inputs.tokens(op.layout))?;
        let ahead = op.latest.row::<i32>(seq_slot)[1] - op.positions.row::<i32>(0)[first];
        let tokens = ahead.clamp(0, len) as usize;
        let slots = op.layout.slots;
        let read = fact(RowMetadataField::StateRead, r).checked_sub(1).filter(|read| *read >= 0);
        let read = read.map(|read| index("state slot", read, slots)).transpose()?;
        let write = index("state slot", fact(RowMetadataField::StateWrite, r) - 1, slots)?;
        if tokens > 0 {
            rows.push(ReplayRow { first, tokens, read, write });
        }
    }
    Ok(rows)
}

/// Arguments of the state updates that all rows, layers and heads share.
struct ReplayCall<'a> {
    inputs: &'a ReplayInputArrays<'a>,
    layout: &'a RecurrentStateLayout,
    pool: SendPtr<u8>,
    isa: CpuIsa,
}

impl ReplayCall<'_> {
    /// Address of the state of layer `layer` in slot `slot`, `offset` bytes after its beginning.
    fn state(&self, layer: usize, slot: usize, offset: usize) -> *mut f32 {
        let at = self.layout.state_offset(layer, slot) + offset;
        // SAFETY: the layer, the slot and the offset are inside the pool, whose size was checked.
        unsafe { self.pool.get().add(at).cast() }
    }

    /// Returns a copy of `elements` elements of the state before a row; zeros without a slot to read.
    fn state_before(
        &self,
        row: &ReplayRow,
        layer: usize,
        offset: usize,
        elements: usize,
    ) -> Vec<f32> {
        row.read.map_or_else(
            || vec![0f32; elements],
            // SAFETY: the state has these elements, and no other row writes the slot.
            |slot| unsafe {
                std::slice::from_raw_parts(self.state(layer, slot, offset), elements).to_vec()
            },
        )
    }

    fn input<'a, T: FloatElement>(&self, array: MatRef<'a>, layer: usize, token: usize) -> &'a [T] {
        array.row::<T>(layer * self.inputs.tokens(self.layout) + token)
    }

    /// Updates the state of value head `head`.
    fn run_head<T: FloatElement>(&self, row: &ReplayRow, layer: usize, head: usize) {
        let RecurrentStateLayout { key_dim, value_dim, key_heads, value_heads, .. } = *self.layout;
        let key_head = head / (value_heads / key_heads);
        let elements = key_dim * value_dim;
        let offset = head * elements * size_of::<f32>();
        let mut state = self.state_before(row, layer, offset, elements);
        let (mut k, q) = (vec![0f32; key_dim], vec![0f32; key_dim]);
        let mut delta = vec![0f32; value_dim];
        for t in row.first..row.first + row.tokens {
            let keys_values = self.input::<T>(self.inputs.keys_values.as_ref(), layer, t);
            let gates = self.input::<f32>(self.inputs.gates.as_ref(), layer, t);
            let (keys, values) = keys_values.split_at(self.layout.key_channels());
            let x = &keys[key_head * key_dim..(key_head + 1) * key_dim];
            dispatch(self.isa, UnitVector { y: &mut k, x, factor: 1.0 });
            let value = &values[head * value_dim..(head + 1) * value_dim];
            let mut v: Vec<f32> = value.iter().map(|v| v.load()).collect();
            let (decay, beta) = (gates[head], gates[value_heads + head]);
            let (state, k, q, v) = (&mut state[..], &k[..], &q[..], &mut v[..]);
            let delta = &mut delta[..];
            dispatch(self.isa, DeltaRuleStep { state, q, k, v, delta, decay, beta });
        }
        // SAFETY: the state has these elements, and each pair of a row and a head belongs to one thread.
        let after = unsafe {
            std::slice::from_raw_parts_mut(self.state(layer, row.write, offset), elements)
        };
        after.copy_from_slice(&state);
    }

    /// Updates the last inputs of the convolution.
    fn run_convolution<T: FloatElement>(&self, row: &ReplayRow, layer: usize) {
        let (channels, history) = (self.layout.conv_channels(), self.layout.conv_width - 1);
        let (offset, elements) = (self.layout.conv_offset(), self.layout.conv_elements());
        let before = self.state_before(row, layer, offset, elements);
        // SAFETY: the state has these elements, and no other row reads or writes the slot.
        let after = unsafe {
            std::slice::from_raw_parts_mut(self.state(layer, row.write, offset), elements)
        };
        for (i, to) in after.chunks_mut(channels).enumerate() {
            match (row.tokens + i).checked_sub(history) {
                Some(t) => {
                    let inputs = self.inputs.conv_inputs.as_ref();
                    let from = self.input::<T>(inputs, layer, row.first + t);
                    dispatch(self.isa, RowConversion { to, from });
                }
                None => to.copy_from_slice(&before[(row.tokens + i) * channels..][..channels]),
            }
        }
    }
}

impl CpuBackend {
    fn write_replay_inputs<T: FloatElement>(&self, op: ReplayInputWrite<'_, '_>) {
        let ReplayInputWrite { arrays, tokens, x, qkv, beta, decay, layout, layer, .. } = op;
        let (a_log, dt_bias) = (op.a_log.row::<f32>(0), op.dt_bias.row::<f32>(0));
        let first = layer * arrays.tokens(layout);
        for t in 0..tokens {
            let inputs = &x.row::<T>(t)[..layout.conv_channels()];
            arrays.conv_inputs.row_mut::<T>(first + t).copy_from_slice(inputs);
            let keys_values = &qkv.row::<T>(t)[layout.key_channels()..];
            arrays.keys_values.row_mut::<T>(first + t).copy_from_slice(keys_values);
            let gates = arrays.gates.row_mut::<f32>(first + t);
            for head in 0..layout.value_heads {
                let input = decay.row::<T>(t)[head].load() + dt_bias[head];
                gates[head] = decay_factor(a_log[head], input);
                gates[layout.value_heads + head] = write_strength(beta.row::<T>(t)[head].load());
            }
        }
    }

    fn replay_states<T: FloatElement>(&self, op: StateReplay<'_, '_>, rows: &[ReplayRow]) {
        let StateReplay { pool, layout, inputs, .. } = op;
        let pool = SendPtr(pool.as_mut_ptr());
        let call = ReplayCall { inputs, layout, pool, isa: self.isa() };
        // The last unit of a row and layer is its convolution state.
        let units = layout.value_heads + 1;
        let min = min_rows(layout.key_dim * layout.value_dim);
        self.threads().split(rows.len() * layout.layers * units, 1, min, &|range| {
            for i in range {
                let (row, unit) = (i / units, i % units);
                let (row, layer) = (&rows[row / layout.layers], row % layout.layers);
                if unit < layout.value_heads {
                    call.run_head::<T>(row, layer, unit);
                } else {
                    call.run_convolution::<T>(row, layer);
                }
            }
        });
    }
}
