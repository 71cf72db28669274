//! Gated delta net and output gate on the CPU.
//!
//! The convolution is parallel over rows, the delta rule over pairs of a row and a value head. Each state is updated
//! token by token, so that the results do not depend on how a prompt was divided into chunks.

use device::{CpuIsa, DeviceError, FloatElement, MatMut, MatRef};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::maths::{exp, silu, sum_by};
use super::norm::inverse_rms;
use super::row_kernel::{RowConversion, RowKernel, dispatch};
use super::shared_rows::{SendPtr, SharedRows};
use crate::cpu::CpuBackend;
use crate::{
    CausalConvolution, CpuKernel, GatedDeltaRule, GatedRmsNorm, RecurrentStateLayout,
    SigmoidGating, StateSlotRows,
};

/// Tokens and state slots of one row on the host.
struct RowStates {
    tokens: std::ops::Range<usize>,
    read: Option<usize>,
    write: Option<usize>,
}

/// Returns the tokens and state slots of each row that has tokens.
///
/// Errors: a token or a slot is out of range.
fn rows_of(
    kernel: &'static str,
    rows: StateSlotRows<'_>,
    tokens: usize,
    slots: usize,
) -> Result<Vec<RowStates>, DeviceError> {
    let index = |what, index: i32, limit: usize| {
        let valid = usize::try_from(index).ok().filter(|index| *index <= limit);
        valid.ok_or(DeviceError::Index { kernel, what, index: index.into(), limit })
    };
    let cu_q = rows.cu_q.row::<i32>(0);
    let states = rows.read.row::<i32>(0).iter().zip(rows.write.row::<i32>(0)).enumerate();
    let row = |(r, (&read, &write)): (usize, (&i32, &i32))| {
        Ok(RowStates {
            tokens: index("token", cu_q[r], tokens)?..index("token", cu_q[r + 1], tokens)?,
            read: index("state slot", read, slots)?.checked_sub(1),
            write: index("state slot", write, slots)?.checked_sub(1),
        })
    };
    let rows: Result<Vec<_>, DeviceError> = states.map(row).collect();
    Ok(rows?.into_iter().filter(|row| !row.tokens.is_empty()).collect())
}

/// Row kernel: one output token of the causal convolution.
struct ConvolutionRow<'a, T> {
    y: &'a mut [T],
    /// Inputs of earlier tokens that the output depends on, from the convolution state, oldest first.
    state: &'a [&'a [f32]],
    /// Further inputs that the output depends on, up to the current token.
    inputs: &'a [&'a [T]],
    /// Weights `[width, channels]`.
    weight: MatRef<'a>,
    /// Scratch memory of one element per channel.
    sums: &'a mut [f32],
}

impl<T: FloatElement> RowKernel for ConvolutionRow<'_, T> {
    #[inline(always)]
    fn run(self) {
        self.sums.fill(0.0);
        for (j, input) in self.state.iter().enumerate() {
            add_products(self.sums, self.weight.row(j), input);
        }
        for (j, input) in (self.state.len()..).zip(self.inputs) {
            add_products(self.sums, self.weight.row(j), input);
        }
        for (y, sum) in self.y.iter_mut().zip(&*self.sums) {
            *y = T::store(silu(*sum));
        }
    }
}

/// Adds the products of weights and inputs to the sums of the channels.
#[inline(always)]
fn add_products<T: FloatElement>(sums: &mut [f32], weight: &[f32], input: &[T]) {
    for ((sum, x), w) in sums.iter_mut().zip(input).zip(weight) {
        *sum += w * x.load();
    }
}

/// Arguments of the convolution that all its rows share.
struct ConvolutionCall<'a, T> {
    x: MatRef<'a>,
    weight: MatRef<'a>,
    out: SharedRows<T>,
    layout: &'a RecurrentStateLayout,
    pool: SendPtr<u8>,
    layer: usize,
    isa: CpuIsa,
}

impl<T: FloatElement> ConvolutionCall<'_, T> {
    /// Address of the convolution state in slot `slot`.
    fn state(&self, slot: usize) -> *mut f32 {
        let offset = self.layout.state_offset(self.layer, slot) + self.layout.conv_offset();
        // SAFETY: the layer and the slot are inside the pool, whose size was checked.
        unsafe { self.pool.get().add(offset).cast() }
    }

    fn run(&self, row: &RowStates) {
        let (channels, history) = (self.layout.conv_channels(), self.layout.conv_width - 1);
        let mut before = vec![0f32; history * channels];
        if let Some(slot) = row.read {
            // SAFETY: the state has these elements, and no other row writes the slot.
            before.copy_from_slice(unsafe {
                std::slice::from_raw_parts(self.state(slot), history * channels)
            });
        }
        let mut sums = vec![0f32; channels];
        let before: Vec<&[f32]> = before.chunks(channels).collect();
        let input = |t: usize| &self.x.row::<T>(t)[..channels];
        for (i, t) in row.tokens.clone().enumerate() {
            let state = &before[i.min(history)..];
            let inputs: Vec<&[T]> = (t - i.min(history)..=t).map(input).collect();
            // SAFETY: each token belongs to one row, and each row to one thread.
            let y = unsafe { self.out.row(t) };
            let (inputs, weight, sums) = (&inputs[..], self.weight, &mut sums[..]);
            dispatch(self.isa, ConvolutionRow { y, state, inputs, weight, sums });
        }
        let Some(slot) = row.write else { return };
        // SAFETY: the state has these elements, and no other row reads or writes the slot.
        let after = unsafe { std::slice::from_raw_parts_mut(self.state(slot), history * channels) };
        let len = row.tokens.len();
        for (i, after) in after.chunks_mut(channels).enumerate() {
            match (len + i).checked_sub(history) {
                Some(t) => {
                    let to = after;
                    dispatch(self.isa, RowConversion { to, from: input(row.tokens.start + t) });
                }
                None => after.copy_from_slice(before[len + i]),
            }
        }
    }
}

/// Row kernel: one token of the gated delta rule in one value head.
pub(super) struct DeltaRuleStep<'a> {
    /// State `[key_dim, value_dim]`.
    pub(super) state: &'a mut [f32],
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    /// On entry the value; on exit the output.
    pub(super) v: &'a mut [f32],
    /// Scratch memory of `value_dim` elements.
    pub(super) delta: &'a mut [f32],
    pub(super) decay: f32,
    pub(super) beta: f32,
}

impl RowKernel for DeltaRuleStep<'_> {
    #[inline(always)]
    fn run(self) {
        let dim = self.v.len();
        self.delta.fill(0.0);
        for (state, k) in self.state.chunks_exact_mut(dim).zip(self.k) {
            for (s, delta) in state.iter_mut().zip(&mut *self.delta) {
                *s *= self.decay;
                *delta += *s * k;
            }
        }
        for (delta, v) in self.delta.iter_mut().zip(&mut *self.v) {
            *delta = self.beta * (*v - *delta);
            *v = 0.0;
        }
        for ((state, k), q) in self.state.chunks_exact_mut(dim).zip(self.k).zip(self.q) {
            for ((s, delta), o) in state.iter_mut().zip(&*self.delta).zip(&mut *self.v) {
                *s += k * delta;
                *o += *s * q;
            }
        }
    }
}

/// Row kernel: converts a query or key to f32 and divides it by its L2 norm.
pub(super) struct UnitVector<'a, T> {
    pub(super) y: &'a mut [f32],
    pub(super) x: &'a [T],
    pub(super) factor: f32,
}

impl<T: FloatElement> RowKernel for UnitVector<'_, T> {
    #[inline(always)]
    fn run(self) {
        let squares = sum_by(self.x, |x| x.load() * x.load());
        let scale = self.factor / (squares + GatedDeltaRule::NORM_EPS).sqrt();
        for (y, x) in self.y.iter_mut().zip(self.x) {
            *y = x.load() * scale;
        }
    }
}

/// Arguments of the delta rule that all rows and heads share.
struct DeltaRuleCall<'a, T> {
    out: SharedRows<T>,
    qkv: MatRef<'a>,
    beta: MatRef<'a>,
    decay: MatRef<'a>,
    a_log: &'a [f32],
    dt_bias: &'a [f32],
    layout: &'a RecurrentStateLayout,
    pool: SendPtr<u8>,
    layer: usize,
    isa: CpuIsa,
}

impl<T: FloatElement> DeltaRuleCall<'_, T> {
    /// Address of the state of value head `head` in slot `slot`.
    fn state(&self, slot: usize, head: usize) -> *mut f32 {
        let elements = head * self.layout.key_dim * self.layout.value_dim;
        let offset = self.layout.state_offset(self.layer, slot) + elements * size_of::<f32>();
        // SAFETY: layer, slot and head are inside the pool, whose size was checked.
        unsafe { self.pool.get().add(offset).cast() }
    }

    fn run(&self, row: &RowStates, head: usize) {
        let RecurrentStateLayout { key_dim, value_dim, .. } = *self.layout;
        let mut state = vec![0f32; key_dim * value_dim];
        if let Some(slot) = row.read {
            // SAFETY: the state has these elements, and no other row writes the slot.
            state.copy_from_slice(unsafe {
                std::slice::from_raw_parts(self.state(slot, head), key_dim * value_dim)
            });
        }
        for t in row.tokens.clone() {
            self.step(&mut state, t, head);
        }
        if let Some(slot) = row.write {
            // SAFETY: the state has these elements, and no other row or head accesses them.
            let stored = unsafe {
                std::slice::from_raw_parts_mut(self.state(slot, head), key_dim * value_dim)
            };
            stored.copy_from_slice(&state);
        }
    }

    /// Updates the state by token `t`, and writes its output.
    fn step(&self, state: &mut [f32], t: usize, head: usize) {
        let layout = self.layout;
        let RecurrentStateLayout { key_dim, value_dim, .. } = *layout;
        let key_head = head / (layout.value_heads / layout.key_heads);
        let qkv = self.qkv.row::<T>(t);
        let (queries, rest) = qkv.split_at(layout.key_channels());
        let (keys, values) = rest.split_at(layout.key_channels());
        let (mut q, mut k) = (vec![0f32; key_dim], vec![0f32; key_dim]);
        let channels = key_head * key_dim..(key_head + 1) * key_dim;
        let factor = 1.0 / (key_dim as f32).sqrt();
        dispatch(self.isa, UnitVector { y: &mut q, x: &queries[channels.clone()], factor });
        dispatch(self.isa, UnitVector { y: &mut k, x: &keys[channels], factor: 1.0 });
        let value = &values[head * value_dim..(head + 1) * value_dim];
        let mut v: Vec<f32> = value.iter().map(|v| v.load()).collect();
        let input = self.decay.row::<T>(t)[head].load() + self.dt_bias[head];
        let decay = decay_factor(self.a_log[head], input);
        let beta = write_strength(self.beta.row::<T>(t)[head].load());
        let mut delta = vec![0f32; value_dim];
        let (q, k) = (&q[..], &k[..]);
        let delta = &mut delta[..];
        dispatch(self.isa, DeltaRuleStep { state, q, k, v: &mut v, delta, decay, beta });
        // SAFETY: each pair of a row and a head belongs to one thread.
        let o = unsafe { self.out.part(t, head * value_dim, value_dim) };
        for (o, v) in o.iter_mut().zip(&v) {
            *o = T::store(*v);
        }
    }
}

/// Factor by which the state of a head decays: `exp(−exp(a_log) softplus(input))`.
pub(super) fn decay_factor(a_log: f32, input: f32) -> f32 {
    (-a_log.exp() * softplus(input)).exp()
}

/// Strength with which a token is written to the state of a head: `sigmoid(input)`.
pub(super) fn write_strength(input: f32) -> f32 {
    1.0 / (1.0 + exp(-input))
}

/// `ln(1 + e^x)`, which is `x` for large `x`.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Row kernel: gated RMS norm of one head.
struct GatedRmsNormHead<'a, T> {
    y: &'a mut [T],
    x: &'a [T],
    z: &'a [T],
    weight: &'a [f32],
    eps: f32,
}

impl<T: FloatElement> RowKernel for GatedRmsNormHead<'_, T> {
    #[inline(always)]
    fn run(self) {
        let scale = inverse_rms(self.x, self.eps);
        for (((y, x), z), w) in self.y.iter_mut().zip(self.x).zip(self.z).zip(self.weight) {
            let unit = T::store(x.load() * scale).load();
            *y = T::store(w * unit * silu(z.load()));
        }
    }
}

/// Row kernel: multiplies a row by the sigmoid of its gate, in place.
struct SigmoidGatingRow<'a, T> {
    x: &'a mut [T],
    gate: &'a [T],
}

impl<T: FloatElement> RowKernel for SigmoidGatingRow<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (x, gate) in self.x.iter_mut().zip(self.gate) {
            *x = T::store(x.load() / (1.0 + exp(-gate.load())));
        }
    }
}

impl CpuBackend {
    fn convolution_of<T: FloatElement>(&self, op: CausalConvolution<'_>, rows: &[RowStates]) {
        let CausalConvolution { mut y, x, weight, pool, layout, layer, .. } = op;
        let first_padding = rows.iter().map(|row| row.tokens.end).max().unwrap_or(0);
        clear_rows::<T>(&mut y, first_padding);
        let call = ConvolutionCall {
            x,
            weight,
            out: SharedRows::<T>::new(&mut y),
            layout,
            pool: SendPtr(pool.as_mut_ptr()),
            layer,
            isa: self.isa(),
        };
        self.threads().split(rows.len(), 1, min_rows(layout.conv_channels()), &|range| {
            for row in &rows[range] {
                call.run(row);
            }
        });
    }

    fn delta_rule_of<T: FloatElement>(&self, op: GatedDeltaRule<'_>, rows: &[RowStates]) {
        let GatedDeltaRule { mut o, qkv, beta, decay, a_log, dt_bias, pool, layout, layer, .. } =
            op;
        let first_padding = rows.iter().map(|row| row.tokens.end).max().unwrap_or(0);
        clear_rows::<T>(&mut o, first_padding);
        let call = DeltaRuleCall {
            out: SharedRows::<T>::new(&mut o),
            qkv,
            beta,
            decay,
            a_log: a_log.row(0),
            dt_bias: dt_bias.row(0),
            layout,
            pool: SendPtr(pool.as_mut_ptr()),
            layer,
            isa: self.isa(),
        };
        let heads = layout.value_heads;
        let min = min_rows(layout.key_dim * layout.value_dim);
        self.threads().split(rows.len() * heads, 1, min, &|range| {
            for i in range {
                call.run(&rows[i / heads], i % heads);
            }
        });
    }

    fn gated_norm_of<T: FloatElement>(&self, op: GatedRmsNorm<'_>) {
        let GatedRmsNorm { mut y, x, z, weight, eps } = op;
        let (weight, isa) = (weight.row::<f32>(0), self.isa());
        let dim = weight.len();
        let out = SharedRows::<T>::new(&mut y);
        self.threads().split(x.rows(), 1, min_rows(x.cols()), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                let heads = unsafe { out.row(r) }.chunks_mut(dim);
                let inputs = x.row::<T>(r).chunks(dim).zip(z.row::<T>(r).chunks(dim));
                for (y, (x, z)) in heads.zip(inputs) {
                    dispatch(isa, GatedRmsNormHead { y, x, z, weight, eps });
                }
            }
        });
    }

    fn sigmoid_gating_of<T: FloatElement>(&self, x: &mut MatMut<'_>, gate: MatRef<'_>) {
        let isa = self.isa();
        let out = SharedRows::<T>::new(x);
        self.threads().split(gate.rows(), 1, min_rows(gate.cols()), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                let x = unsafe { out.row(r) };
                dispatch(isa, SigmoidGatingRow { x, gate: gate.row(r) });
            }
        });
    }
}

/// Sets the rows from `first` on to 0.
fn clear_rows<T: FloatElement>(y: &mut MatMut<'_>, first: usize) {
    for r in first..y.rows() {
        y.row_mut::<T>(r).fill(T::store(0.0));
    }
}

impl CpuKernel for CausalConvolution<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let rows = rows_of(Self::KERNEL, self.rows, self.y.rows(), self.layout.slots)?;
        for_float!(Self::KERNEL, self.y.dtype(), T => cpu.convolution_of::<T>(self, &rows));
        Ok(())
    }
}

impl CpuKernel for GatedDeltaRule<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let rows = rows_of(Self::KERNEL, self.rows, self.o.rows(), self.layout.slots)?;
        for_float!(Self::KERNEL, self.o.dtype(), T => cpu.delta_rule_of::<T>(self, &rows));
        Ok(())
    }
}

impl CpuKernel for GatedRmsNorm<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!(Self::KERNEL, self.y.dtype(), T => cpu.gated_norm_of::<T>(self));
        Ok(())
    }
}

impl CpuKernel for SigmoidGating<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut x, gate } = self;
        for_float!(Self::KERNEL, x.dtype(), T => cpu.sigmoid_gating_of::<T>(&mut x, gate));
        Ok(())
    }
}
