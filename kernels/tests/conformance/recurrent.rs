//! Gated delta net and output gate on the CPU, compared with f64.

use device::{Buffer, DeviceDriver, DeviceStream, MatMut, MatRef, bf16, f16};
use kernels::cpu::CpuBackend;
use kernels::{
    CausalConvolution, GatedDeltaRule, GatedRmsNorm, RecurrentStateLayout, SigmoidGating,
    StateSlotRows,
};

use crate::support::{CpuTestFloat, SeededNumbers, cast, devices, error, tolerance};

const S: DeviceStream = DeviceStream(0);
const LAYER: usize = 1;

const fn layout() -> RecurrentStateLayout {
    RecurrentStateLayout {
        layers: 2,
        slots: 4,
        key_heads: 2,
        value_heads: 6,
        key_dim: 20,
        value_dim: 24,
        conv_width: 4,
    }
}

/// StateTestRows of a step: token counts, and slots plus 1 that the rows read and write.
#[derive(Clone)]
struct StateTestRows {
    /// Index of the first token of the step in the inputs.
    first_token: usize,
    cu_q: Vec<i32>,
    read: Vec<i32>,
    write: Vec<i32>,
}

impl StateTestRows {
    fn new(rows: &[[i32; 3]]) -> Self {
        let mut cu_q = vec![0];
        for [len, _, _] in rows {
            cu_q.push(cu_q[cu_q.len() - 1] + len);
        }
        let column = |i: usize| rows.iter().map(|row| row[i]).collect();
        Self { first_token: 0, cu_q, read: column(1), write: column(2) }
    }

    fn starting_at(self, first_token: usize) -> Self {
        Self { first_token, ..self }
    }

    fn tokens(&self) -> usize {
        self.cu_q[self.cu_q.len() - 1] as usize
    }

    fn states(&self) -> StateSlotRows<'_> {
        let row = |x| MatRef::of(x, 1, <[i32]>::len(x)).unwrap();
        StateSlotRows {
            cu_q: row(&self.cu_q),
            read: row(&self.read),
            write: row(&self.write),
            max_row_len: self.tokens(),
            chunked_rows: self.read.len(),
        }
    }
}

/// DeltaNetInputs of all tokens of a batch, and the weights.
struct DeltaNetInputs<T> {
    x: Vec<T>,
    gates: Vec<T>,
    weight: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
}

impl<T: CpuTestFloat> DeltaNetInputs<T> {
    fn new(layout: &RecurrentStateLayout, tokens: usize) -> Self {
        let mut numbers = SeededNumbers::new(7);
        let (channels, heads) = (layout.conv_channels(), layout.value_heads);
        Self {
            x: cast(&numbers.floats(tokens * (channels + 3))),
            gates: cast(&numbers.floats(tokens * 2 * heads)),
            weight: numbers.floats(layout.conv_width * channels),
            a_log: numbers.floats(heads),
            dt_bias: numbers.floats(heads),
        }
    }
}

/// Values of a state slot in one layer, in f64.
#[derive(Clone)]
struct ExpectedState {
    delta: Vec<f64>,
    conv: Vec<f64>,
}

/// ExpectedState pool on the CPU.
struct TestStatePool {
    layout: RecurrentStateLayout,
    buffer: Buffer,
}

impl TestStatePool {
    /// Fills every state with random values.
    fn new(device: &CpuBackend) -> Self {
        let layout = layout();
        let mut buffer = device.alloc(layout.bytes()).unwrap();
        let mut numbers = SeededNumbers::new(3);
        for at in 0..layout.layers * layout.slots {
            let at = layout.state_offset(0, at);
            let delta = numbers.floats(layout.delta_elements());
            let delta: Vec<u8> = delta.iter().flat_map(|x| x.to_le_bytes()).collect();
            device.upload(&mut buffer, at, &delta).unwrap();
            let conv = numbers.floats(layout.conv_elements());
            let conv: Vec<u8> = conv.iter().flat_map(|x| x.to_le_bytes()).collect();
            device.upload(&mut buffer, at + layout.conv_offset(), &conv).unwrap();
        }
        Self { layout, buffer }
    }

    fn bytes(&self, device: &CpuBackend) -> Vec<u8> {
        let mut bytes = vec![0; self.layout.bytes()];
        device.download(&S, &self.buffer, 0, &mut bytes).unwrap();
        bytes
    }

    fn state(&self, device: &CpuBackend, slot: usize) -> ExpectedState {
        let (bytes, layout) = (self.bytes(device), &self.layout);
        let at = layout.state_offset(LAYER, slot);
        let floats = |at: usize, n: usize| -> Vec<f64> {
            let words = bytes[at..][..4 * n].as_chunks::<4>().0;
            words.iter().map(|x| f32::from_le_bytes(*x).into()).collect()
        };
        ExpectedState {
            delta: floats(at, layout.delta_elements()),
            conv: floats(at + layout.conv_offset(), layout.conv_elements()),
        }
    }
}

fn convolve<T: CpuTestFloat>(
    device: &CpuBackend,
    pool: &mut TestStatePool,
    x: &[T],
    inputs: &DeltaNetInputs<T>,
    rows: &StateTestRows,
) -> Vec<T> {
    let (layout, channels) = (pool.layout, pool.layout.conv_channels());
    let tokens = x.len() / (channels + 3);
    let mut y = vec![T::of(9.0); tokens * channels];
    let op = CausalConvolution {
        y: MatMut::of(&mut y, tokens, channels).unwrap(),
        x: MatRef::of(x, tokens, channels + 3).unwrap(),
        weight: MatRef::of(&inputs.weight, layout.conv_width, channels).unwrap(),
        pool: &mut pool.buffer,
        layout: &layout,
        layer: LAYER,
        rows: rows.states(),
    };
    device.launch(&S, op).unwrap();
    y
}

fn apply_rule<T: CpuTestFloat>(
    device: &CpuBackend,
    pool: &mut TestStatePool,
    qkv: &[T],
    gates: &[T],
    inputs: &DeltaNetInputs<T>,
    rows: &StateTestRows,
) -> Vec<T> {
    let layout = pool.layout;
    let (channels, heads) = (layout.conv_channels(), layout.value_heads);
    let tokens = qkv.len() / channels;
    let mut o = vec![T::of(9.0); tokens * layout.value_channels()];
    let gates = MatRef::of(gates, tokens, 2 * heads).unwrap();
    let op = GatedDeltaRule {
        o: MatMut::of(&mut o, tokens, layout.value_channels()).unwrap(),
        qkv: MatRef::of(qkv, tokens, channels).unwrap(),
        beta: gates.columns(0, heads),
        decay: gates.columns(heads, heads),
        a_log: MatRef::of(&inputs.a_log, 1, heads).unwrap(),
        dt_bias: MatRef::of(&inputs.dt_bias, 1, heads).unwrap(),
        pool: &mut pool.buffer,
        layout: &layout,
        layer: LAYER,
        rows: rows.states(),
    };
    device.launch(&S, op).unwrap();
    o
}

/// Convolution of the tokens of one row, in f64; updates `state`.
fn expected_convolution<T: CpuTestFloat>(
    layout: &RecurrentStateLayout,
    state: &mut ExpectedState,
    x: &[T],
    weight: &[f32],
) -> Vec<f64> {
    let (channels, width) = (layout.conv_channels(), layout.conv_width);
    let mut all = state.conv.clone();
    for token in x.chunks(channels + 3) {
        all.extend(token[..channels].iter().map(|x| f64::from(x.value())));
    }
    let tokens = x.len() / (channels + 3);
    let output = |i: usize| {
        let (t, c) = (i / channels, i % channels);
        let term = |j| f64::from(weight[j * channels + c]) * all[(t + j) * channels + c];
        let sum: f64 = (0..width).map(term).sum();
        sum / (1.0 + (-sum).exp())
    };
    let y = (0..tokens * channels).map(output).collect();
    state.conv = all[tokens * channels..].to_vec();
    y
}

/// Gated delta rule over the tokens of one row, in f64; updates `state`.
fn expected_rule<T: CpuTestFloat>(
    layout: &RecurrentStateLayout,
    state: &mut ExpectedState,
    qkv: &[T],
    gates: &[T],
    inputs: &DeltaNetInputs<T>,
) -> Vec<f64> {
    let RecurrentStateLayout { key_dim, value_dim, value_heads, key_heads, .. } = *layout;
    let mut o = Vec::new();
    let unit = |x: &[T]| -> Vec<f64> {
        let x: Vec<f64> = x.iter().map(|x| x.value().into()).collect();
        let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|x| x / norm).collect()
    };
    for (token, gates) in qkv.chunks(layout.conv_channels()).zip(gates.chunks(2 * value_heads)) {
        let (queries, rest) = token.split_at(layout.key_channels());
        let (keys, values) = rest.split_at(layout.key_channels());
        for head in 0..value_heads {
            let key_head = head / (value_heads / key_heads);
            let of_key = key_head * key_dim..(key_head + 1) * key_dim;
            let (q, k) = (unit(&queries[of_key.clone()]), unit(&keys[of_key]));
            let v = &values[head * value_dim..(head + 1) * value_dim];
            let beta = 1.0 / (1.0 + (-f64::from(gates[head].value())).exp());
            let step = f64::from(gates[value_heads + head].value() + inputs.dt_bias[head]);
            let decay = (-f64::from(inputs.a_log[head]).exp() * step.exp().ln_1p()).exp();
            let size = key_dim * value_dim;
            let s = &mut state.delta[head * size..(head + 1) * size];
            for s in s.iter_mut() {
                *s *= decay;
            }
            for (j, v) in v.iter().enumerate() {
                let column = |i: usize| i * value_dim + j;
                let known: f64 = (0..key_dim).map(|i| s[column(i)] * k[i]).sum();
                let delta = beta * (f64::from(v.value()) - known);
                for (i, k) in k.iter().enumerate() {
                    s[column(i)] += k * delta;
                }
                let sum: f64 = (0..key_dim).map(|i| s[column(i)] * q[i]).sum();
                o.push(sum / (key_dim as f64).sqrt());
            }
        }
    }
    o
}

/// A row that starts with the zero state, a row that updates a slot, and a row that forks a slot.
fn step_rows() -> StateTestRows {
    StateTestRows::new(&[[5, 0, 2], [1, 3, 3], [3, 1, 4]])
}

fn state_before(
    pool: &TestStatePool,
    device: &CpuBackend,
    rows: &StateTestRows,
    r: usize,
) -> ExpectedState {
    let layout = &pool.layout;
    match rows.read[r] {
        0 => ExpectedState {
            delta: vec![0.0; layout.delta_elements()],
            conv: vec![0.0; layout.conv_elements()],
        },
        slot => pool.state(device, slot as usize - 1),
    }
}

/// Rows of many tokens, of draft tokens and of one token.
fn long_rows() -> StateTestRows {
    StateTestRows::new(&[[65, 0, 2], [1, 3, 3], [5, 1, 4], [128, 0, 0]])
}

fn steps<T: CpuTestFloat>(rows: &StateTestRows) {
    let layout = layout();
    let (tokens, padding) = (rows.tokens(), 2);
    let inputs = DeltaNetInputs::<T>::new(&layout, tokens + padding);
    let (channels, values) = (layout.conv_channels(), layout.value_channels());
    for device in devices(2) {
        let mut pool = TestStatePool::new(&device);
        let before: Vec<ExpectedState> =
            (0..rows.read.len()).map(|r| state_before(&pool, &device, rows, r)).collect();
        let other_layer = pool.bytes(&device)[..layout.state_offset(LAYER, 0)].to_vec();
        let unread = pool.state(&device, 0).delta;
        let qkv = convolve(&device, &mut pool, &inputs.x, &inputs, rows);
        let o = apply_rule(&device, &mut pool, &qkv, &inputs.gates, &inputs, rows);
        for (r, mut state) in before.into_iter().enumerate() {
            let of_row = |width: usize| {
                let [first, end] = [rows.cu_q[r], rows.cu_q[r + 1]].map(|t| t as usize * width);
                first..end
            };
            let x = &inputs.x[of_row(channels + 3)];
            let y = expected_convolution(&layout, &mut state, x, &inputs.weight);
            let qkv = &qkv[of_row(channels)];
            assert!(error(qkv, &y) < tolerance::<T>(), "row {r}");
            let gates = &inputs.gates[of_row(2 * layout.value_heads)];
            let expected = expected_rule(&layout, &mut state, qkv, gates, &inputs);
            assert!(error(&o[of_row(values)], &expected) < tolerance::<T>(), "row {r}");
            let Some(slot) = (rows.write[r] as usize).checked_sub(1) else { continue };
            let after = pool.state(&device, slot);
            let delta: Vec<f32> = after.delta.iter().map(|x| *x as f32).collect();
            assert!(error(&delta, &state.delta) < 3e-6, "row {r}");
            assert_eq!(after.conv, state.conv, "row {r}");
        }
        assert!(qkv[tokens * channels..].iter().all(|y| *y == T::of(0.0)), "padding");
        assert!(o[tokens * values..].iter().all(|o| *o == T::of(0.0)), "padding");
        assert_eq!(pool.state(&device, 0).delta, unread, "a slot that is only read");
        assert_eq!(pool.bytes(&device)[..other_layer.len()], other_layer, "other layer");
    }
}

#[test]
fn gated_delta_net_is_correct() {
    for rows in [step_rows(), long_rows()] {
        steps::<f32>(&rows);
        steps::<bf16>(&rows);
        steps::<f16>(&rows);
    }
}

/// Outputs of all tokens of several steps, and the delta state in slot 0 after them.
#[derive(Debug, PartialEq)]
struct DeltaNetRun {
    outputs: Vec<f32>,
    state: Vec<f64>,
}

/// Runs the rows of each step in turn, on the tokens from the given first token on.
fn run_steps(device: &CpuBackend, steps: &[StateTestRows]) -> DeltaNetRun {
    let layout = layout();
    let inputs = DeltaNetInputs::<f32>::new(&layout, 70);
    let mut pool = TestStatePool::new(device);
    let mut outputs = Vec::new();
    for rows in steps {
        let first = rows.first_token;
        let of_step = |width: usize| first * width..(first + rows.tokens()) * width;
        let x = &inputs.x[of_step(layout.conv_channels() + 3)];
        let qkv = convolve(device, &mut pool, x, &inputs, rows);
        let gates = &inputs.gates[of_step(2 * layout.value_heads)];
        outputs.extend(apply_rule(device, &mut pool, &qkv, gates, &inputs, rows));
    }
    DeltaNetRun { outputs, state: pool.state(device, 0).delta }
}

#[test]
fn states_do_not_depend_on_chunks() {
    for device in devices(2) {
        let whole = run_steps(&device, &[StateTestRows::new(&[[70, 0, 1]])]);
        let chunks = [1, 1, 2, 3, 30, 32, 1];
        let (mut steps, mut first) = (Vec::new(), 0);
        for len in chunks {
            // The states alternate between two slots.
            let [read, write] = if steps.len() % 2 == 0 { [2, 1] } else { [1, 2] };
            let read = if first == 0 { 0 } else { read };
            steps.push(StateTestRows::new(&[[len, read, write]]).starting_at(first));
            first += len as usize;
        }
        assert_eq!(run_steps(&device, &steps), whole);
    }
}

#[test]
fn states_do_not_depend_on_other_rows() {
    for device in devices(2) {
        let together = run_steps(&device, &[step_rows()]).outputs;
        let values = layout().value_channels();
        let row = StateTestRows::new(&[[3, 1, 4]]).starting_at(6);
        let alone = run_steps(&device, &[row]).outputs;
        assert_eq!(alone, together[6 * values..]);
    }
}

fn gates<T: CpuTestFloat>() {
    let (rows, heads, dim) = (3, 5, 24);
    let mut numbers = SeededNumbers::new(5);
    let x = cast::<T>(&numbers.floats(rows * heads * dim));
    let z = cast::<T>(&numbers.floats(rows * heads * dim));
    let w = numbers.floats(dim);
    let sigmoid = |z: &T| 1.0 / (1.0 + (-f64::from(z.value())).exp());
    let mut normed = Vec::new();
    for (x, z) in x.chunks(dim).zip(z.chunks(dim)) {
        let squares: f64 = x.iter().map(|x| f64::from(x.value()).powi(2)).sum();
        let scale = 1.0 / (squares / dim as f64 + 1e-6).sqrt();
        for ((x, z), w) in x.iter().zip(z).zip(&w) {
            let unit = T::of((f64::from(x.value()) * scale) as f32).value();
            normed.push(f64::from(unit * w) * f64::from(z.value()) * sigmoid(z));
        }
    }
    let gated: Vec<f64> =
        x.iter().zip(&z).map(|(x, z)| f64::from(x.value()) * sigmoid(z)).collect();
    for device in devices(2) {
        let (mut y, mut x_gated) = (x.clone(), x.clone());
        let mat = |x| MatRef::of(x, rows, heads * dim).unwrap();
        let op = GatedRmsNorm {
            y: MatMut::of(&mut y, rows, heads * dim).unwrap(),
            x: mat(&x),
            z: mat(&z),
            weight: MatRef::of(&w, 1, dim).unwrap(),
            eps: 1e-6,
        };
        device.launch(&S, op).unwrap();
        assert!(error(&y, &normed) < tolerance::<T>());
        let x = MatMut::of(&mut x_gated, rows, heads * dim).unwrap();
        device.launch(&S, SigmoidGating { x, gate: mat(&z) }).unwrap();
        assert!(error(&x_gated, &gated) < tolerance::<T>());
    }
}

#[test]
fn gated_norm_and_output_gate_are_correct() {
    gates::<f32>();
    gates::<bf16>();
    gates::<f16>();
}

#[test]
fn state_ops_reject_wrong_arguments() {
    let device = &devices(1)[0];
    let layout = layout();
    let inputs = DeltaNetInputs::<f32>::new(&layout, 1);
    let (channels, width) = (layout.conv_channels(), layout.conv_width);
    let run = |rows: StateTestRows, layer: usize, weights: usize| {
        let mut pool = TestStatePool::new(device);
        let mut y = vec![0f32; channels];
        let op = CausalConvolution {
            y: MatMut::of(&mut y, 1, channels).unwrap(),
            x: MatRef::of(&inputs.x[..channels], 1, channels).unwrap(),
            weight: MatRef::of(&inputs.weight[..weights * channels], weights, channels).unwrap(),
            pool: &mut pool.buffer,
            layout: &layout,
            layer,
            rows: rows.states(),
        };
        device.launch(&S, op)
    };
    assert!(run(StateTestRows::new(&[[1, 0, 4]]), 1, width).is_ok());
    assert!(run(StateTestRows::new(&[[1, 5, 1]]), 1, width).is_err(), "slot 4 of 4");
    assert!(run(StateTestRows::new(&[[1, 0, -1]]), 1, width).is_err());
    assert!(run(StateTestRows::new(&[[2, 0, 1]]), 1, width).is_err(), "2 tokens of 1");
    assert!(run(StateTestRows::new(&[[1, 0, 4]]), 2, width).is_err(), "layer 2 of 2");
    assert!(run(StateTestRows::new(&[[1, 0, 4]]), 1, width - 1).is_err());
    let odd = RecurrentStateLayout { value_heads: 5, ..layout };
    assert!(odd.check().is_err(), "5 value heads, 2 key heads");
}
