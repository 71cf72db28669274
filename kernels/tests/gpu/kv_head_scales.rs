//! fp8 KV cache with a scale per head: queries, keys and values that the GPU stores match the CPU's, and the
//! attention over them matches attention over an unquantised KV cache.

use device::{Buffer, DType, DeviceDriver, MatMut, MatRef};
use kernels::{
    AttentionKeyRange, AttentionMetadata, BatchRowLengths, BatchUpperBounds, KernelBackend,
    KvCacheScales, KvLayout, KvTileOrder, PagedAttention, PagedAttentionArgs, QkNormRopeArgs,
    QkNormRopeKvWrite, RopeCosSin,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, pairs, tolerance};
use crate::support::S;

const TOKENS: usize = 40;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const BLOCK_TOKENS: usize = 16;
const BLOCKS: usize = TOKENS.div_ceil(BLOCK_TOKENS);
const WIDTH: usize = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
/// Scales of the keys and of the values of the two KV heads.
const KEY_SCALES: [f32; KV_HEADS] = [0.5, 1.0 / 64.0];
const VALUE_SCALES: [f32; KV_HEADS] = [1.0 / 128.0, 0.25]; // Values stay below 240, the maximum of FNUZ.

/// Inputs of one sequence of `TOKENS` tokens, on both devices.
struct HeadScaleInputs {
    qkv: CpuGpuMatrix,
    cos: CpuGpuMatrix,
    sin: CpuGpuMatrix,
    positions: CpuGpuMatrix,
    slots: CpuGpuMatrix,
    factors: CpuGpuMatrix,
    query_ends: CpuGpuMatrix,
    contexts: CpuGpuMatrix,
    table: CpuGpuMatrix,
}

/// One of the devices, and how matrices are viewed there.
struct TestSide<'a> {
    backend: &'a KernelBackend,
    view: fn(&CpuGpuMatrix) -> MatRef<'_>,
    layout: KvLayout,
    pool: Buffer,
}

impl HeadScaleInputs {
    /// `value_scales`: scales of the values of the two KV heads.
    fn new(pair: &CpuGpuPair, dtype: DType, value_scales: [f32; KV_HEADS]) -> Self {
        let mut numbers = pair.numbers(5);
        let mut random = |dtype, cols| pair.random(&mut numbers, dtype, TOKENS, cols);
        let (qkv, cos) = (random(dtype, WIDTH), random(DType::F32, HEAD_DIM / 2));
        let sin = random(DType::F32, HEAD_DIM / 2);
        let positions: Vec<i32> = (0..TOKENS as i32).collect();
        let slots: Vec<i64> = (0..TOKENS as i64).collect();
        let table: Vec<i32> = (0..BLOCKS as i32).collect();
        let queries = (0..HEADS).map(|h| KEY_SCALES[h * KV_HEADS / HEADS] / KEY_SCALES[0]);
        let (keys, values) = (KEY_SCALES.map(f32::recip), value_scales.map(f32::recip));
        let factors: Vec<f32> = queries.chain(keys).chain(values).collect();
        Self {
            qkv,
            cos,
            sin,
            positions: pair.put(&positions, 1, TOKENS),
            slots: pair.put(&slots, 1, TOKENS),
            factors: pair.put(&factors, 1, factors.len()),
            query_ends: pair.put(&[0, TOKENS as i32], 1, 2),
            contexts: pair.put(&[TOKENS as i32], 1, 1),
            table: pair.put(&table, 1, BLOCKS),
        }
    }
}

impl TestSide<'_> {
    /// Stores the keys and values of all tokens and writes the queries to `q`.
    fn store(&mut self, inputs: &HeadScaleInputs, q: MatMut<'_>, kv_scales: KvCacheScales<'_>) {
        let view = self.view;
        let args = QkNormRopeArgs {
            qkv: view(&inputs.qkv),
            q_norm: None,
            k_norm: None,
            eps: 0.0,
            rope: RopeCosSin { cos: view(&inputs.cos), sin: view(&inputs.sin) },
            positions: view(&inputs.positions),
            slots: view(&inputs.slots),
            heads: HEADS,
            layer: 0,
            kv_scales,
        };
        let (layout, pool) = (&self.layout, &mut self.pool);
        self.backend.launch(&S, QkNormRopeKvWrite { q, pool, layout, args: &args }).unwrap();
    }

    /// Writes the attention of the queries `q` to `o`; `scale` is the key scale that the softmax scale includes.
    fn attend(&self, inputs: &HeadScaleInputs, q: MatRef<'_>, o: MatMut<'_>, scale: f32) {
        let view = self.view;
        let rows = AttentionMetadata {
            cu_q: view(&inputs.query_ends),
            context_lens: view(&inputs.contexts),
            block_tables: view(&inputs.table),
            table_rows: None,
            bounds: BatchUpperBounds::of([BatchRowLengths { tokens: TOKENS, context: TOKENS }], 0),
        };
        let scale = scale * (HEAD_DIM as f32).powf(-0.5);
        let keys = AttentionKeyRange::default();
        let args = PagedAttentionArgs { q, rows, heads: HEADS, layer: 0, scale, keys, sinks: None };
        let (layout, pool) = (&self.layout, &self.pool);
        self.backend.launch(&S, PagedAttention { o, pool, layout, args: &args }).unwrap();
    }
}

fn side<'a>(
    pair: &CpuGpuPair,
    backends: &'a [KernelBackend; 2],
    at: usize,
    dtype: DType,
) -> TestSide<'a> {
    let order = [KvTileOrder::RowMajor, KvTileOrder::LaneInterleaved][at];
    let (blocks, block_tokens, kv_heads, head_dim) = (BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_DIM);
    let layout = KvLayout { layers: 1, blocks, block_tokens, kv_heads, head_dim, dtype, order };
    let backend = &backends[at];
    let mut pool = backend.alloc(layout.bytes()).unwrap();
    // Previous requests may leave NaN.
    let stale = vec![0x7f; layout.bytes()];
    match at {
        0 => pair.gpu.upload(&mut pool, 0, &stale).unwrap(),
        _ => pair.cpu.upload(&mut pool, 0, &stale).unwrap(),
    }
    TestSide { backend, view: [CpuGpuMatrix::gpu, CpuGpuMatrix::cpu][at], layout, pool }
}

/// Checks that `o`, divided by the value scales, differs from `expected` by at most the error of fp8, for each
/// head.
fn check_heads(o: &[f32], expected: &[f32], value_scales: [f32; KV_HEADS]) {
    for (i, (o, expected)) in o.iter().zip(expected).enumerate() {
        let head = i % (HEADS * HEAD_DIM) / HEAD_DIM;
        let found = o * value_scales[head * KV_HEADS / HEADS];
        assert!((found - expected).abs() <= 0.1, "head {head}: {found}, expected {expected}");
    }
}

fn check(pair: &CpuGpuPair, dtype: DType) {
    let (inputs, backends) = (HeadScaleInputs::new(pair, dtype, VALUE_SCALES), pair.backends());
    let outputs = || pair.poisoned(dtype, TOKENS, HEADS * HEAD_DIM);
    let [mut q, mut o] = [outputs(), outputs()];
    for at in 0..2 {
        let mut side = side(pair, &backends, at, DType::F8E4M3);
        let (view, gpu) = (side.view, at == 0);
        let scales = KvCacheScales::Heads(view(&inputs.factors));
        side.store(&inputs, if gpu { q.gpu_mut() } else { q.cpu_mut() }, scales);
        side.attend(&inputs, view(&q), if gpu { o.gpu_mut() } else { o.cpu_mut() }, KEY_SCALES[0]);
    }
    pair.check("queries with factors", &q, tolerance(dtype));
    // A key halfway between two fp8 numbers may be rounded to either.
    pair.check("attention with scales of heads", &o, 2.0 * tolerance(DType::BF16));

    let expected = unquantised(pair, dtype, &inputs);
    pair.read_floats(&o).iter().for_each(|o| check_heads(o, &expected, VALUE_SCALES));
}

/// Returns the attention over keys and values that are not quantised.
fn unquantised(pair: &CpuGpuPair, dtype: DType, inputs: &HeadScaleInputs) -> Vec<f32> {
    let (backends, outputs) = (pair.backends(), || pair.poisoned(dtype, TOKENS, HEADS * HEAD_DIM));
    let [mut q, mut o] = [outputs(), outputs()];
    let mut side = side(pair, &backends, 1, dtype);
    side.store(inputs, q.cpu_mut(), KvCacheScales::UNIT);
    side.attend(inputs, q.cpu(), o.cpu_mut(), 1.0);
    let [_, expected] = pair.read_floats(&o);
    expected
}

/// With scales for OCP numbers up to 448, times the range factor of the device, no value is cut off, also in FNUZ,
/// which ends at 240.
#[test]
fn values_up_to_the_maximum_of_ocp_are_kept() {
    for pair in &pairs() {
        let backends = pair.backends();
        let scales = [1.0 / 440.0; KV_HEADS].map(|scale| scale * backends[0].fp8_range_factor());
        let inputs = HeadScaleInputs::new(pair, DType::BF16, scales);
        let outputs = || pair.poisoned(DType::BF16, TOKENS, HEADS * HEAD_DIM);
        let [mut q, mut o] = [outputs(), outputs()];
        let mut side = side(pair, &backends, 0, DType::F8E4M3);
        let scales_of_heads = KvCacheScales::Heads((side.view)(&inputs.factors));
        side.store(&inputs, q.gpu_mut(), scales_of_heads);
        side.attend(&inputs, q.gpu(), o.gpu_mut(), KEY_SCALES[0]);
        let [found, _] = pair.read_floats(&o);
        check_heads(&found, &unquantised(pair, DType::BF16, &inputs), scales);
    }
}

#[test]
fn scales_of_heads_agree_with_the_cpu() {
    for pair in &pairs() {
        check(pair, DType::BF16);
        check(pair, DType::F32);
    }
}
