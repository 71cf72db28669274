//! Gated delta net and output gate of the GPU match the CPU.

use device::gpu::HalfDtype;
use device::{Buffer, DeviceDriver, DeviceStream, MatMut, MatRef, bf16, f16};
use kernels::gpu::GpuBackend;
use kernels::{
    CausalConvolution, GatedDeltaRule, GatedRmsNorm, KernelBackend, RecurrentStateLayout,
    SigmoidGating, StateSlotRows,
};
use std::sync::Arc;

use crate::support::{
    DeviceArray, GpuTestFloat, RandomNumbers, S, devices, devices_of, error, oracle, tolerance,
};

const LAYER: usize = 1;

/// Layouts whose value heads are no multiple of the columns of a block.
fn layouts() -> [RecurrentStateLayout; 2] {
    let small = RecurrentStateLayout {
        layers: 2,
        slots: 5,
        key_heads: 2,
        value_heads: 6,
        key_dim: 64,
        value_dim: 24,
        conv_width: 4,
    };
    [small, RecurrentStateLayout { key_dim: 128, value_dim: 128, value_heads: 4, ..small }]
}

/// Rows of a step: token counts, and slots plus 1 that the rows read and write.
fn batches() -> Vec<Vec<[i32; 3]>> {
    let chunks = vec![[1, 4, 4], [1, 0, 5], [19, 0, 2], [2, 1, 3]];
    let decode = vec![[1, 0, 2], [1, 3, 3], [1, 1, 4], [0, 0, 0]];
    vec![chunks, decode, vec![[1, 1, 1]], vec![[33, 2, 2]]]
}

/// A batch on the host: weights, inputs of all tokens, and the state pool before the step.
struct DeltaNetCase<T> {
    layout: RecurrentStateLayout,
    rows: Vec<[i32; 3]>,
    x: Vec<T>,
    gates: Vec<T>,
    weight: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    pool: Vec<u8>,
}

/// Results of a step.
struct DeltaNetOutputs<T> {
    qkv: Vec<T>,
    o: Vec<T>,
    pool: Vec<u8>,
}

impl<T: GpuTestFloat> DeltaNetCase<T> {
    fn new(layout: RecurrentStateLayout, rows: Vec<[i32; 3]>) -> Self {
        let mut numbers = RandomNumbers::fresh(rows.len() as u64);
        let tokens = rows.iter().map(|row| row[0] as usize).sum::<usize>() + 2;
        let (channels, heads) = (layout.conv_channels(), layout.value_heads);
        let mut pool = Vec::new();
        for _ in 0..layout.layers * layout.slots {
            let end = pool.len() + layout.bytes_per_layer();
            for _ in 0..layout.delta_elements() {
                pool.extend(numbers.float().to_le_bytes());
            }
            pool.resize(end - layout.bytes_per_layer() + layout.conv_offset(), 0);
            for x in numbers.reals::<T>(layout.conv_elements()) {
                pool.extend(x.value().to_le_bytes());
            }
            pool.resize(end, 0);
        }
        Self {
            layout,
            rows,
            x: numbers.reals(tokens * (channels + 8)),
            gates: numbers.reals(tokens * 2 * heads),
            weight: numbers.reals(layout.conv_width * channels),
            a_log: numbers.reals(heads),
            dt_bias: numbers.reals(heads),
            pool,
        }
    }

    fn tokens(&self) -> usize {
        self.x.len() / (self.layout.conv_channels() + 8)
    }

    /// The row `r` alone, without padding.
    fn alone(&self, r: usize) -> Self {
        let first: usize = self.rows[..r].iter().map(|row| row[0] as usize).sum();
        let len = self.rows[r][0] as usize;
        let part = |x: &[T]| {
            let width = x.len() / self.tokens();
            x[first * width..(first + len) * width].to_vec()
        };
        Self {
            layout: self.layout,
            rows: vec![self.rows[r]],
            x: part(&self.x),
            gates: part(&self.gates),
            weight: self.weight.clone(),
            a_log: self.a_log.clone(),
            dt_bias: self.dt_bias.clone(),
            pool: self.pool.clone(),
        }
    }

    fn cu_q(&self) -> Vec<i32> {
        let mut cu_q = vec![0];
        for row in &self.rows {
            cu_q.push(cu_q[cu_q.len() - 1] + row[0]);
        }
        cu_q
    }

    fn column(&self, i: usize) -> Vec<i32> {
        self.rows.iter().map(|row| row[i]).collect()
    }

    fn longest(&self) -> usize {
        self.rows.iter().map(|row| row[0] as usize).max().unwrap()
    }

    fn chunked_rows(&self) -> usize {
        let is_chunked = |row: &&[i32; 3]| row[0] as usize > GatedDeltaRule::RECURRENT_TOKENS;
        self.rows.iter().filter(is_chunked).count()
    }

    /// Runs the step on a GPU.
    fn run(&self, device: &Arc<GpuBackend>) -> DeltaNetOutputs<T> {
        let (layout, tokens) = (self.layout, self.tokens());
        let (channels, heads) = (layout.conv_channels(), layout.value_heads);
        let vector = |x: &[f32]| DeviceArray::row(device, x);
        let words = |x: Vec<i32>| DeviceArray::row(device, &x);
        let x = DeviceArray::of(device, &self.x, tokens, channels + 8);
        let gates = DeviceArray::of(device, &self.gates, tokens, 2 * heads);
        let weight = DeviceArray::of(device, &self.weight, layout.conv_width, channels);
        let (a_log, dt_bias) = (vector(&self.a_log), vector(&self.dt_bias));
        let (cu_q, read, write) =
            (words(self.cu_q()), words(self.column(1)), words(self.column(2)));
        let rows = StateSlotRows {
            cu_q: cu_q.mat(),
            read: read.mat(),
            write: write.mat(),
            max_row_len: self.longest(),
            chunked_rows: self.chunked_rows(),
        };
        let mut pool = device.alloc(layout.bytes()).unwrap();
        device.upload(&mut pool, 0, &self.pool).unwrap();
        let mut qkv = DeviceArray::<T>::poisoned(device, tokens, channels);
        let mut o = DeviceArray::<T>::poisoned(device, tokens, layout.value_channels());
        let backend = KernelBackend::from(Arc::clone(device));
        let call = StepCall { layout: &layout, rows, weight: weight.mat() };
        call.convolve(&backend, qkv.mat_mut(), x.mat(), &mut pool);
        let [beta, decay] = [0, heads].map(|from| gates.mat().columns(from, heads));
        let rule = RuleInputs { beta, decay, a_log: a_log.mat(), dt_bias: dt_bias.mat() };
        call.apply_rule(&backend, o.mat_mut(), qkv.mat(), &rule, &mut pool);
        let mut bytes = vec![0; layout.bytes()];
        device.download(&S, &pool, 0, &mut bytes).unwrap();
        DeltaNetOutputs { qkv: qkv.read(device), o: o.read(device), pool: bytes }
    }

    /// Runs the step on the CPU. The delta rule reads `qkv`, so that its error is compared alone.
    fn expected(&self, qkv: &[T]) -> DeltaNetOutputs<T> {
        let (layout, tokens) = (self.layout, self.tokens());
        let (channels, heads) = (layout.conv_channels(), layout.value_heads);
        let (cu_q, read, write) = (self.cu_q(), self.column(1), self.column(2));
        let words = |x| MatRef::of(x, 1, <[i32]>::len(x)).unwrap();
        let vector = |x| MatRef::of(x, 1, heads).unwrap();
        let rows = StateSlotRows {
            cu_q: words(&cu_q),
            read: words(&read),
            write: words(&write),
            max_row_len: self.longest(),
            chunked_rows: self.chunked_rows(),
        };
        let cpu = KernelBackend::from(oracle());
        let mut pool = cpu.alloc(layout.bytes()).unwrap();
        cpu.upload(&mut pool, 0, &self.pool).unwrap();
        let weight = MatRef::of(&self.weight, layout.conv_width, channels).unwrap();
        let call = StepCall { layout: &layout, rows, weight };
        let mut y = self.x[..tokens * channels].to_vec();
        let x = MatRef::of(&self.x, tokens, channels + 8).unwrap();
        call.convolve(&cpu, MatMut::of(&mut y, tokens, channels).unwrap(), x, &mut pool);
        let mut o = self.x[..tokens * layout.value_channels()].to_vec();
        let gates = MatRef::of(&self.gates, tokens, 2 * heads).unwrap();
        let rule = RuleInputs {
            beta: gates.columns(0, heads),
            decay: gates.columns(heads, heads),
            a_log: vector(&self.a_log),
            dt_bias: vector(&self.dt_bias),
        };
        let out = MatMut::of(&mut o, tokens, layout.value_channels()).unwrap();
        let qkv = MatRef::of(qkv, tokens, channels).unwrap();
        call.apply_rule(&cpu, out, qkv, &rule, &mut pool);
        let mut bytes = vec![0; layout.bytes()];
        cpu.download(&DeviceStream(0), &pool, 0, &mut bytes).unwrap();
        DeltaNetOutputs { qkv: y, o, pool: bytes }
    }
}

/// Arguments that both ops of a step share, and the weight of the convolution.
struct StepCall<'a> {
    layout: &'a RecurrentStateLayout,
    rows: StateSlotRows<'a>,
    weight: MatRef<'a>,
}

/// Inputs of the delta rule besides queries, keys and values.
struct RuleInputs<'a> {
    beta: MatRef<'a>,
    decay: MatRef<'a>,
    a_log: MatRef<'a>,
    dt_bias: MatRef<'a>,
}

impl StepCall<'_> {
    fn convolve(&self, backend: &KernelBackend, y: MatMut<'_>, x: MatRef<'_>, pool: &mut Buffer) {
        let Self { layout, rows, weight } = *self;
        let op = CausalConvolution { y, x, weight, pool, layout, layer: LAYER, rows };
        backend.launch(&S, op).unwrap();
    }

    fn apply_rule(
        &self,
        backend: &KernelBackend,
        o: MatMut<'_>,
        qkv: MatRef<'_>,
        rule: &RuleInputs<'_>,
        pool: &mut Buffer,
    ) {
        let Self { layout, rows, .. } = *self;
        let RuleInputs { beta, decay, a_log, dt_bias } = *rule;
        let layer = LAYER;
        let op = GatedDeltaRule { o, qkv, beta, decay, a_log, dt_bias, pool, layout, layer, rows };
        backend.launch(&S, op).unwrap();
    }
}

/// Delta states of a pool, in all layers and slots.
fn deltas(pool: &[u8], layout: &RecurrentStateLayout) -> Vec<f32> {
    let states = pool.chunks(layout.bytes_per_layer());
    let words = |state| <[u8]>::as_chunks::<4>(state).0[..layout.delta_elements()].to_vec();
    states.flat_map(words).map(f32::from_le_bytes).collect()
}

/// Bytes of the convolution states of a pool, in all layers and slots.
fn conv_states(pool: &[u8], layout: &RecurrentStateLayout) -> Vec<u8> {
    let states = pool.chunks(layout.bytes_per_layer());
    states.flat_map(|state| state[layout.conv_offset()..].to_vec()).collect()
}

/// Compares a step with the CPU; `state_error`: permitted relative error of the states.
fn compare<T: GpuTestFloat>(device: &Arc<GpuBackend>, case: &DeltaNetCase<T>, state_error: f32) {
    let layout = case.layout;
    let name = format!("{} {:?} {}", device.name(), case.rows, layout.key_dim);
    let got = case.run(device);
    let expected = case.expected(&got.qkv);
    assert!(error(&got.qkv, &expected.qkv) < tolerance::<T>(), "{name}");
    let of_outputs = error(&got.o, &expected.o);
    let [states, of_cpu] = [&got, &expected].map(|out| deltas(&out.pool, &layout));
    let of_states = error(&states, &of_cpu);
    assert!(of_outputs < 2.0 * tolerance::<T>(), "{name}: {of_outputs}");
    assert!(of_states < state_error, "{name}: {of_states}");
    let [states, of_cpu] = [&got, &expected].map(|out| conv_states(&out.pool, &layout));
    assert!(states == of_cpu, "{name}");
    let last = case.rows.iter().rposition(|row| row[0] > 0).unwrap();
    let alone = case.alone(last).run(device);
    let end = case.cu_q()[last + 1] as usize * layout.value_channels();
    assert_eq!(alone.o, got.o[end - alone.o.len()..end], "{name}: batch");
}

fn steps<T: GpuTestFloat>(devices: &[Arc<GpuBackend>]) {
    for layout in layouts() {
        for rows in batches() {
            let case = DeltaNetCase::<T>::new(layout, rows);
            for device in devices {
                // The row of 33 tokens is computed in a chunk of products of 16 bits.
                let in_chunks = layout.key_dim == 128 && case.longest() > 17;
                let state_error = if in_chunks { chunk_error::<T>() } else { 1e-5 };
                compare(device, &case, state_error);
            }
        }
    }
}

/// Permitted relative error of states after chunks: products of 16-bit values; f32 activations have the recurrent form.
fn chunk_error<T: GpuTestFloat>() -> f32 {
    if T::DTYPE.bytes() == 4 { 1e-5 } else { 2.0 * tolerance::<T>() }
}

/// Rows of more than a chunk, of part of a chunk, of draft tokens and of one token; a row without a state, a fork, and a row
/// whose state is not stored.
fn long_batches() -> [Vec<[i32; 3]>; 3] {
    let mixed = vec![[1, 4, 4], [65, 0, 5], [128, 1, 2], [5, 3, 3], [18, 0, 0], [0, 0, 0]];
    [mixed, vec![[200, 2, 2]], vec![[64, 1, 3], [17, 2, 2], [130, 0, 4]]]
}

/// Decay of all tokens of a case.
#[derive(Debug, Clone, Copy)]
enum TokenDecay {
    /// Of random inputs.
    Random,
    /// By a factor of about e⁻²⁰.
    Strong,
    None,
}

impl<T: GpuTestFloat> DeltaNetCase<T> {
    fn decaying(mut self, decay: TokenDecay) -> Self {
        let bias = match decay {
            TokenDecay::Random => return self,
            TokenDecay::Strong => 20.0,
            TokenDecay::None => -40.0,
        };
        self.dt_bias.fill(bias);
        self.a_log.fill(0.0);
        self
    }
}

fn long_rows<T: GpuTestFloat>(devices: &[Arc<GpuBackend>]) {
    let [_, layout] = layouts();
    let narrow = RecurrentStateLayout { key_dim: 64, value_dim: 32, ..layout };
    let [mixed, alone, prompts] = long_batches();
    for (layout, rows, decay) in [
        (layout, &mixed, TokenDecay::Random),
        (layout, &mixed, TokenDecay::Strong),
        (layout, &mixed, TokenDecay::None),
        (layout, &alone, TokenDecay::Random),
        (layout, &prompts, TokenDecay::None),
        (narrow, &mixed, TokenDecay::Random),
    ] {
        let case = DeltaNetCase::<T>::new(layout, rows.clone()).decaying(decay);
        for device in devices {
            compare(device, &case, chunk_error::<T>());
        }
    }
}

#[test]
fn rows_of_many_tokens_agree_with_the_cpu() {
    long_rows::<f32>(&devices());
    long_rows::<bf16>(&devices());
    long_rows::<f16>(&devices_of(HalfDtype::F16));
}

#[test]
fn gated_delta_net_agrees_with_the_cpu() {
    steps::<f32>(&devices());
    steps::<bf16>(&devices());
    steps::<f16>(&devices_of(HalfDtype::F16));
}

/// Compares a row in one step with steps of `lens` tokens, bit for bit.
fn divided<T: GpuTestFloat>(device: &Arc<GpuBackend>, layout: RecurrentStateLayout, lens: &[i32]) {
    let whole = DeltaNetCase::<T>::new(layout, vec![[lens.iter().sum(), 0, 1]]);
    let complete = whole.run(device);
    let (mut pool, mut outputs, mut first) = (whole.pool.clone(), Vec::new(), 0);
    for &len in lens {
        let mut case = DeltaNetCase::<T>::new(layout, vec![[len, i32::from(first > 0), 1]]);
        let part = |x: &[T]| {
            let width = x.len() / whole.tokens();
            x[first * width..(first + len as usize) * width].to_vec()
        };
        (case.x, case.gates) = (part(&whole.x), part(&whole.gates));
        (case.weight, case.pool) = (whole.weight.clone(), pool);
        (case.a_log, case.dt_bias) = (whole.a_log.clone(), whole.dt_bias.clone());
        let got = case.run(device);
        outputs.extend(got.o);
        pool = got.pool;
        first += len as usize;
    }
    assert_eq!(outputs, complete.o[..outputs.len()], "{}", device.name());
    assert!(pool == complete.pool, "{}", device.name());
}

#[test]
fn gated_delta_net_does_not_depend_on_steps() {
    for device in devices() {
        let [small, layout] = layouts();
        divided::<f32>(&device, small, &[1, 2, 7, 1]);
        divided::<bf16>(&device, layout, &[1, 2, 7, 1, 6]);
        // Steps that end with a whole chunk.
        divided::<bf16>(&device, layout, &[64, 128, 20]);
    }
}

fn gates<T: GpuTestFloat>() {
    let cpu = oracle();
    for (rows, heads, dim) in [(1, 3, 128), (5, 2, 24), (2, 1, 7)] {
        let cols = heads * dim;
        let mut numbers = RandomNumbers::fresh(dim as u64);
        let x = numbers.reals::<T>(rows * cols);
        let z = numbers.reals::<T>(rows * cols);
        let w = numbers.reals::<f32>(dim);
        let (mut normed, mut gated) = (x.clone(), x.clone());
        let mat = |x| MatRef::of(x, rows, cols).unwrap();
        let op = GatedRmsNorm {
            y: MatMut::of(&mut normed, rows, cols).unwrap(),
            x: mat(&x),
            z: mat(&z),
            weight: MatRef::of(&w, 1, dim).unwrap(),
            eps: 1e-6,
        };
        cpu.launch(&S, op).unwrap();
        let x_gated = MatMut::of(&mut gated, rows, cols).unwrap();
        cpu.launch(&S, SigmoidGating { x: x_gated, gate: mat(&z) }).unwrap();
        for device in devices() {
            let name = format!("{} {rows} x {heads} x {dim}", device.name());
            let mut on_gpu = DeviceArray::of(&device, &x, rows, cols);
            let gate = DeviceArray::of(&device, &z, rows, cols);
            let weight = DeviceArray::row(&device, &w);
            let mut y = DeviceArray::<T>::poisoned(&device, rows, cols);
            let op = GatedRmsNorm {
                y: y.mat_mut(),
                x: on_gpu.mat(),
                z: gate.mat(),
                weight: weight.mat(),
                eps: 1e-6,
            };
            device.launch(&S, op).unwrap();
            assert!(error(&y.read(&device), &normed) < 2.0 * tolerance::<T>(), "{name}");
            let op = SigmoidGating { x: on_gpu.mat_mut(), gate: gate.mat() };
            device.launch(&S, op).unwrap();
            assert!(error(&on_gpu.read(&device), &gated) < tolerance::<T>(), "{name}");
        }
    }
}

#[test]
fn gated_norm_and_output_gate_agree_with_the_cpu() {
    gates::<f32>();
    gates::<bf16>();
}
