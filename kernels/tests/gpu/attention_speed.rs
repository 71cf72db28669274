//! Times of attention with sliding windows, sinks and heads of 256 and 512 channels inside a captured graph, next to the
//! floors: the time in which a copy moves the keys and values that the rows attend to, and the time of the matrix
//! products. The results are printed, not checked.

use device::{DType, DeviceDriver, bf16};
use kernels::gpu::GpuBackend;
use kernels::{
    AttentionKeyRange, AttentionMetadata, BatchRowLengths, BatchUpperBounds, KvLayout, KvTileOrder,
    PagedAttention, PagedAttentionArgs,
};

use crate::device_pair::{CpuGpuPair, pairs};
use crate::matrix_speed::microseconds;
use crate::support::{DeviceArray, S};

/// Attention of a layer.
struct AttentionLayerSpec {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    has_sinks: bool,
}

/// Rows of a step: number of rows, tokens of each row, and context length of each row.
#[derive(Clone, Copy)]
struct StepRowSpec {
    rows: usize,
    tokens: usize,
    context: usize,
}

const BLOCK_TOKENS: usize = 16;
/// Size in bytes of the KV pool, which exceeds every GPU's caches. Launches of a graph use successive parts of the
/// pool.
const MIN_POOL_BYTES: usize = 512 << 20;
const MAX_LAYERS: usize = 64;
/// Number of launches in a graph.
const CHAIN: usize = 16;
/// Bandwidth of a copy on an H200, in bytes per microsecond.
const COPY_RATE: f64 = 4.29e6;
/// Rate of 16-bit matrix products on an H200, in operations per microsecond.
const MATRIX_RATE: f64 = 793e6;

const fn layer(
    name: &'static str,
    [heads, kv_heads, head_dim]: [usize; 3],
    window: Option<usize>,
    has_sinks: bool,
) -> AttentionLayerSpec {
    AttentionLayerSpec { name, heads, kv_heads, head_dim, window, has_sinks }
}

const LAYERS: [AttentionLayerSpec; 4] = [
    layer("gpt-oss, window 128", [64, 8, 64], Some(128), true),
    layer("gpt-oss, whole context", [64, 8, 64], None, true),
    layer("Gemma 3 27B, window 1024", [32, 16, 128], Some(1024), false),
    layer("Gemma 3 27B, whole context", [32, 16, 128], None, false),
];
const LARGE_HEAD_LAYERS: [AttentionLayerSpec; 4] = [
    layer("Gemma 3 4B, window 1024", [8, 4, 256], Some(1024), false),
    layer("Gemma 3 4B, whole context", [8, 4, 256], None, false),
    layer("Qwen3.5, whole context", [16, 2, 256], None, false),
    layer("Gemma 4 31B, whole context", [32, 4, 512], None, false),
];

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn attention_speed() {
    measure_layers(&LAYERS);
}

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn large_head_speed() {
    measure_layers(&LARGE_HEAD_LAYERS);
}

fn measure_layers(layers: &[AttentionLayerSpec]) {
    for pair in &pairs() {
        for layer in layers {
            for context in [1024, 8192] {
                for rows in [1, 64, 256] {
                    measure(pair, layer, StepRowSpec { rows, tokens: 1, context });
                }
                measure(pair, layer, StepRowSpec { rows: 1, tokens: 1024, context });
            }
            measure(pair, layer, StepRowSpec { rows: 1, tokens: 8192, context: 8192 });
        }
    }
}

/// Matrices of a step on the GPU.
struct StepArrays {
    q: DeviceArray<bf16>,
    o: DeviceArray<bf16>,
    cu_q: DeviceArray<i32>,
    contexts: DeviceArray<i32>,
    tables: DeviceArray<i32>,
    sinks: DeviceArray<f32>,
}

impl StepArrays {
    fn new(gpu: &GpuBackend, layer: &AttentionLayerSpec, step: StepRowSpec) -> Self {
        let StepRowSpec { rows, tokens, context } = step;
        let (columns, width) = (layer.heads * layer.head_dim, context.div_ceil(BLOCK_TOKENS));
        let cu_q: Vec<i32> = (0..=rows).map(|row| (row * tokens) as i32).collect();
        let tables: Vec<i32> = (0..(rows * width) as i32).collect();
        let q = vec![bf16::ONE; rows * tokens * columns];
        Self {
            q: DeviceArray::of(gpu, &q, rows * tokens, columns),
            o: DeviceArray::poisoned(gpu, rows * tokens, columns),
            cu_q: DeviceArray::row(gpu, &cu_q),
            contexts: DeviceArray::row(gpu, &vec![context as i32; rows]),
            tables: DeviceArray::of(gpu, &tables, rows, width),
            sinks: DeviceArray::row(gpu, &vec![0f32; layer.heads]),
        }
    }
}

/// Layout of a KV pool with the blocks of all rows, each of which has blocks of its own.
fn layout_of(layer: &AttentionLayerSpec, step: StepRowSpec) -> KvLayout {
    let &AttentionLayerSpec { kv_heads, head_dim, .. } = layer;
    let blocks = step.rows * step.context.div_ceil(BLOCK_TOKENS);
    let layer_bytes = blocks * 2 * BLOCK_TOKENS * kv_heads * head_dim * 2;
    KvLayout {
        layers: MIN_POOL_BYTES.div_ceil(layer_bytes).clamp(1, MAX_LAYERS),
        blocks,
        block_tokens: BLOCK_TOKENS,
        kv_heads,
        head_dim,
        dtype: DType::BF16,
        order: KvTileOrder::RowMajor,
    }
}

fn measure(pair: &CpuGpuPair, layer: &AttentionLayerSpec, step: StepRowSpec) {
    let layout = layout_of(layer, step);
    let pool = pair.gpu.alloc(layout.bytes()).unwrap();
    let mut arrays = StepArrays::new(&pair.gpu, layer, step);
    let rows = std::iter::repeat_n(
        BatchRowLengths { tokens: step.tokens, context: step.context },
        step.rows,
    );
    let bounds = BatchUpperBounds::of(rows, 1);
    let time = microseconds(pair, CHAIN, |i| {
        let args = PagedAttentionArgs {
            q: arrays.q.mat(),
            rows: AttentionMetadata {
                cu_q: arrays.cu_q.mat(),
                context_lens: arrays.contexts.mat(),
                block_tables: arrays.tables.mat(),
                table_rows: None,
                bounds,
            },
            heads: layer.heads,
            layer: i % layout.layers,
            scale: (layer.head_dim as f32).powf(-0.5),
            keys: AttentionKeyRange { first_position: 0, window: layer.window },
            sinks: layer.has_sinks.then(|| arrays.sinks.mat()),
        };
        let o = arrays.o.mat_mut();
        let op = PagedAttention { o, pool: &pool, layout: &layout, args: &args };
        pair.gpu.launch(&S, op).unwrap();
    });
    report(layer, step, time);
}

/// Prints the time in microseconds of a launch and its floor.
fn report(layer: &AttentionLayerSpec, step: StepRowSpec, time: f64) {
    let StepRowSpec { rows, tokens, context } = step;
    let window = layer.window.unwrap_or(context);
    let keys_read = context.min(window + tokens - 1);
    let pairs: usize = (context - tokens + 1..=context).map(|seen| seen.min(window)).sum();
    let bytes = rows * keys_read * layer.kv_heads * layer.head_dim * 4;
    let operations = 4 * rows * pairs * layer.heads * layer.head_dim;
    let floor = (bytes as f64 / COPY_RATE).max(operations as f64 / MATRIX_RATE);
    let what = format!("{}: {rows} rows of {tokens}, context {context}", layer.name);
    println!("{what:60} {time:9.2} us, floor {floor:9.2} us, {:.2} x", time / floor);
}
