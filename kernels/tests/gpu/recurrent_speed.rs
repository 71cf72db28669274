//! Times of the gated delta rule inside a captured graph, next to two floors: the time in which a copy moves the states and
//! the activations, and the time of the matrix products of chunks. The results are printed, not checked.

use device::{DeviceDriver, bf16};
use kernels::gpu::GpuBackend;
use kernels::{GatedDeltaRule, RecurrentStateLayout, StateSlotRows};

use crate::device_pair::{CpuGpuPair, pairs};
use crate::matrix_speed::microseconds;
use crate::support::{DeviceArray, S};

/// Number of launches in a graph.
const CHAIN: usize = 16;
/// Bytes of the states that successive launches use, which exceed every GPU's caches.
const MIN_POOL_BYTES: usize = 512 << 20;
/// Bandwidth of a copy on an H200, in bytes per microsecond.
const COPY_RATE: f64 = 4.29e6;
/// Rate of 16-bit matrix products on an H200, in operations per microsecond.
const MATRIX_RATE: f64 = 793e6;
/// Operations per token and value head of the products of a chunk of 64 tokens: two products of a key or query with the state
/// and one of keys with deltas, two triangles of 64 tokens times 128 columns, and two triangles of scores.
const TOKEN_OPERATIONS: usize = 2 * (3 * 128 * 128 + 2 * 32 * 128 + 2 * 32 * 128);

/// A layer of Qwen3-Next, with a state slot for each row.
fn layout_of(rows: usize) -> RecurrentStateLayout {
    let layer = RecurrentStateLayout {
        layers: 1,
        slots: rows,
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_width: 4,
    };
    RecurrentStateLayout { layers: MIN_POOL_BYTES.div_ceil(layer.bytes()).min(64), ..layer }
}

/// Arrays of a step on the GPU.
struct RecurrentStepArrays {
    o: DeviceArray<bf16>,
    qkv: DeviceArray<bf16>,
    gates: DeviceArray<bf16>,
    heads: DeviceArray<f32>,
    cu_q: DeviceArray<i32>,
    slots: DeviceArray<i32>,
}

impl RecurrentStepArrays {
    fn new(pair: &CpuGpuPair, layout: &RecurrentStateLayout, rows: usize, len: usize) -> Self {
        let (gpu, tokens) = (&pair.gpu, rows * len);
        let (channels, heads) = (layout.conv_channels(), layout.value_heads);
        // Random numbers are repeated, because generating all of them takes seconds.
        let numbers = pair.numbers(7).reals::<bf16>(65_536);
        let inputs = |count: usize| {
            let mut all = numbers.repeat(count.div_ceil(numbers.len()));
            all.truncate(count);
            all
        };
        let cu_q: Vec<i32> = (0..=rows).map(|row| (row * len) as i32).collect();
        let slots: Vec<i32> = (1..=rows as i32).collect();
        Self {
            o: DeviceArray::poisoned(gpu, tokens, layout.value_channels()),
            qkv: DeviceArray::of(gpu, &inputs(tokens * channels), tokens, channels),
            gates: DeviceArray::of(gpu, &inputs(tokens * 2 * heads), tokens, 2 * heads),
            heads: DeviceArray::row(gpu, &vec![0f32; heads]),
            cu_q: DeviceArray::row(gpu, &cu_q),
            slots: DeviceArray::row(gpu, &slots),
        }
    }
}

fn measure(pair: &CpuGpuPair, rows: usize, len: usize) {
    let layout = layout_of(rows);
    let gpu: &GpuBackend = &pair.gpu;
    let mut pool = gpu.alloc(layout.bytes()).unwrap();
    gpu.upload(&mut pool, 0, &vec![0; layout.bytes()]).unwrap();
    let mut arrays = RecurrentStepArrays::new(pair, &layout, rows, len);
    let heads = layout.value_heads;
    let time = microseconds(pair, CHAIN, |i| {
        let [beta, decay] = [0, heads].map(|from| arrays.gates.mat().columns(from, heads));
        let op = GatedDeltaRule {
            o: arrays.o.mat_mut(),
            qkv: arrays.qkv.mat(),
            beta,
            decay,
            a_log: arrays.heads.mat(),
            dt_bias: arrays.heads.mat(),
            pool: &mut pool,
            layout: &layout,
            layer: i % layout.layers,
            rows: StateSlotRows {
                cu_q: arrays.cu_q.mat(),
                read: arrays.slots.mat(),
                write: arrays.slots.mat(),
                max_row_len: len,
                chunked_rows: if len > GatedDeltaRule::RECURRENT_TOKENS { rows } else { 0 },
            },
        };
        gpu.launch(&S, op).unwrap();
    });
    let tokens = rows * len;
    let states = 2 * rows * layout.delta_elements() * size_of::<f32>();
    let activations = tokens * (layout.conv_channels() + layout.value_channels() + 2 * heads) * 2;
    let copied = (states + activations) as f64 / COPY_RATE;
    let multiplied = (tokens * heads * TOKEN_OPERATIONS) as f64 / MATRIX_RATE;
    println!(
        "gated delta rule {rows:4} x {len:5} tokens {time:9.2} us, copy {copied:7.2} us ({:5.2}x), products {multiplied:7.2} us",
        time / copied
    );
}

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn recurrent_speed() {
    for pair in &pairs() {
        for (rows, len) in [(1, 128), (1, 1024), (1, 8192), (4, 2048)] {
            measure(pair, rows, len);
        }
        for rows in [1, 64, 256] {
            measure(pair, rows, 1);
        }
    }
}
