//! Times of the row-wise kernels inside a captured graph, and the memory bandwidth that they achieve. The
//! results are printed, not checked.

use std::time::Instant;

use device::{DeviceDriver, bf16};
use kernels::gpu::GpuBackend;
use kernels::step::{
    DraftVerification, PreparedStep, SamplerOutputArrays, SequenceSamplingParams,
    SequenceSlotArrays, StagedLogitsRow, StagingBuffer, StagingBufferView,
};
use kernels::{
    AddRmsNorm, GateActivation, GatedActivation, KvCacheScales, KvLayout, KvTileOrder,
    QkNormRopeArgs, QkNormRopeKvWrite, RmsNorm, RopeCosSin, RowSampling, SoftmaxRouterArgs,
    SoftmaxRouting, TokenEmbedding,
};

use crate::support::{DeviceArray, GpuTestElement, RandomNumbers, S, devices};

const HIDDEN: usize = 1024;
const INNER: usize = 3072;
const VOCABULARY: usize = 151_936;
/// Number of launches in a graph.
const CHAIN: usize = 50;

/// Returns the microseconds per launch, in a graph of `CHAIN` dependent launches.
fn microseconds(device: &GpuBackend, mut launch: impl FnMut()) -> f64 {
    launch();
    device.begin_capture(&S).unwrap();
    (0..CHAIN).for_each(|_| launch());
    let graph = device.end_capture(&S).unwrap();
    let replays = 20;
    device.replay(&S, &graph).unwrap();
    device.synchronize(&S).unwrap();
    let start = Instant::now();
    (0..replays).for_each(|_| device.replay(&S, &graph).unwrap());
    device.synchronize(&S).unwrap();
    start.elapsed().as_secs_f64() * 1e6 / (replays * CHAIN) as f64
}

fn report(name: &str, rows: usize, time: f64, bytes: usize) {
    println!("{name:28} {rows:5} rows {time:8.2} us {:8.0} GB/s", bytes as f64 / time / 1e3);
}

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn row_speed() {
    for device in &devices() {
        for rows in [1, 8, 64, 256, 4096] {
            norms(device, rows);
            activations(device, rows);
            rotations(device, rows);
            routes(device, rows);
        }
        for logits_rows in [1, 8, 64, 256] {
            sampling_times(device, logits_rows);
        }
    }
}

fn norms(device: &GpuBackend, rows: usize) {
    let mut numbers = RandomNumbers::new(1);
    let w = DeviceArray::row(device, &numbers.reals::<bf16>(HIDDEN));
    let mut x = DeviceArray::of(device, &numbers.reals::<bf16>(rows * HIDDEN), rows, HIDDEN);
    let delta = DeviceArray::of(device, &vec![bf16::ZERO; rows * HIDDEN], rows, HIDDEN);
    let mut y = DeviceArray::<bf16>::poisoned(device, rows, HIDDEN);
    let time = microseconds(device, || {
        device
            .launch(&S, RmsNorm { y: y.mat_mut(), x: x.mat(), weight: w.mat(), eps: 1e-6 })
            .unwrap();
    });
    report("rms_norm 1024", rows, time, rows * HIDDEN * 4);
    let time = microseconds(device, || {
        device
            .launch(
                &S,
                AddRmsNorm {
                    y: y.mat_mut(),
                    x: x.mat_mut(),
                    delta: delta.mat(),
                    weight: w.mat(),
                    eps: 1e-6,
                },
            )
            .unwrap();
    });
    report("add_rms_norm 1024", rows, time, rows * HIDDEN * 8);
    let ids = DeviceArray::row(device, &(0..rows as i32).collect::<Vec<_>>());
    let time = microseconds(device, || {
        device
            .launch(&S, TokenEmbedding { y: y.mat_mut(), ids: ids.mat(), table: x.mat(), first: 0 })
            .unwrap();
    });
    report("embed 1024", rows, time, rows * HIDDEN * 4);
}

fn activations(device: &GpuBackend, rows: usize) {
    let x = RandomNumbers::new(2).reals::<bf16>(rows * 2 * INNER);
    let x = DeviceArray::of(device, &x, rows, 2 * INNER);
    let mut y = DeviceArray::<bf16>::poisoned(device, rows, INNER);
    let time = microseconds(device, || {
        let activation = GateActivation::Silu;
        device.launch(&S, GatedActivation { y: y.mat_mut(), x: x.mat(), activation }).unwrap();
    });
    report("silu_mul 3072", rows, time, rows * INNER * 6);
}

/// Measures the RoPE kernel of one layer of Qwen3-0.6B: 16 query heads and 8 KV heads of 128 channels.
fn rotations(device: &GpuBackend, rows: usize) {
    let (heads, kv_heads, head_dim, block_tokens) = (16, 8, 128, 16);
    let columns = (heads + 2 * kv_heads) * head_dim;
    let blocks = rows.div_ceil(block_tokens);
    let (layers, dtype, order) = (1, device::DType::BF16, KvTileOrder::RowMajor);
    let layout = KvLayout { layers, blocks, block_tokens, kv_heads, head_dim, dtype, order };
    let mut pool = device.alloc(layout.bytes()).unwrap();
    let mut numbers = RandomNumbers::new(3);
    let qkv = DeviceArray::of(device, &numbers.reals::<bf16>(rows * columns), rows, columns);
    let norm = DeviceArray::row(device, &numbers.reals::<bf16>(head_dim));
    let table = DeviceArray::of(device, &numbers.reals::<f32>(rows * 64), rows, 64);
    let positions = DeviceArray::row(device, &(0..rows as i32).collect::<Vec<_>>());
    let slots = DeviceArray::row(device, &(0..rows as i64).collect::<Vec<_>>());
    let args = QkNormRopeArgs {
        qkv: qkv.mat(),
        q_norm: Some(norm.mat()),
        k_norm: Some(norm.mat()),
        eps: 1e-6,
        rope: RopeCosSin { cos: table.mat(), sin: table.mat() },
        positions: positions.mat(),
        slots: slots.mat(),
        heads,
        layer: 0,
        kv_scales: KvCacheScales::UNIT,
    };
    let mut q = DeviceArray::<bf16>::poisoned(device, rows, heads * head_dim);
    let time = microseconds(device, || {
        device
            .launch(
                &S,
                QkNormRopeKvWrite { q: q.mat_mut(), pool: &mut pool, layout: &layout, args: &args },
            )
            .unwrap();
    });
    report("qk_norm_rope_kv_write", rows, time, rows * columns * 4);
}

fn routes(device: &GpuBackend, rows: usize) {
    let (count, k) = (128, 8);
    let scores =
        DeviceArray::of(device, &RandomNumbers::new(4).reals::<f32>(rows * count), rows, count);
    let mut chosen = DeviceArray::<i32>::poisoned(device, rows, k);
    let mut shares = DeviceArray::<f32>::poisoned(device, rows, k);
    let time = microseconds(device, || {
        let out = (chosen.mat_mut(), shares.mat_mut());
        let scores =
            SoftmaxRouterArgs { logits: scores.mat(), top_k: k, renormalise: true, shared: 0 };
        device
            .launch(
                &S,
                SoftmaxRouting { experts: out.0, weights: out.1, router: &scores, load: None },
            )
            .unwrap();
    });
    report("moe_route_softmax 128, 8", rows, time, rows * count * 4);
}

fn sampling_times(device: &GpuBackend, logits_rows: usize) {
    let mut numbers = RandomNumbers::new(5);
    let peaked =
        |n: &mut RandomNumbers| if n.below(1000) == 0 { 18.0 * n.unit() } else { 4.0 * n.float() };
    let row: Vec<f32> = (0..VOCABULARY).map(|_| peaked(&mut numbers)).collect();
    let logits = DeviceArray::of(device, &row.repeat(logits_rows), logits_rows, VOCABULARY);
    let off =
        SequenceSamplingParams { top_p: 1.0, repetition: 1.0, ..SequenceSamplingParams::default() };
    let drawn = SequenceSamplingParams { temperature: 1.0, ..off };
    for (name, params, top) in [
        ("greedy", off, -1),
        ("greedy, 20 logprobs", off, 20),
        ("temperature", drawn, -1),
        ("top_p 0.95", SequenceSamplingParams { top_p: 0.95, ..drawn }, -1),
        ("top_k 20, top_p 0.95", SequenceSamplingParams { top_k: 20, top_p: 0.95, ..drawn }, -1),
        ("top_k 2000", SequenceSamplingParams { top_k: 2000, ..drawn }, -1),
        ("min_p 0.05", SequenceSamplingParams { min_p: 0.05, ..drawn }, -1),
    ] {
        let time = sampling_time(device, &logits, logits_rows, params, top);
        report(name, logits_rows, time, logits_rows * VOCABULARY * 4);
    }
}

fn sampling_time(
    device: &GpuBackend,
    logits: &DeviceArray<f32>,
    logits_rows: usize,
    params: SequenceSamplingParams,
    top: i32,
) -> f64 {
    let mut stage = StagingBuffer::default();
    for q in 0..logits_rows as i32 {
        let logits_row = StagedLogitsRow {
            token: q,
            seq_slot: q,
            known_token: -1,
            top,
            ..StagedLogitsRow::default()
        };
        stage.logits_rows.push(logits_row);
    }
    let mut bytes = vec![0; stage.bytes()];
    stage.write(&mut bytes);
    let words: Vec<i32> = bytes.chunks_exact(4).map(<i32 as GpuTestElement>::of_bytes).collect();
    let words = DeviceArray::row(device, &words);
    let view = StagingBufferView { bytes: words.mat(), rows: 0, tokens: 0, logits_rows };
    let record: Vec<i32> = (0..logits_rows as u32)
        .flat_map(|key| {
            let [t, p, m] = [params.temperature, params.top_p, params.min_p].map(f32::to_bits);
            let one = 1f32.to_bits();
            [t, p, m, params.top_k as u32, one, 0, 0, 0, key, 7, 0, 0].map(u32::cast_signed)
        })
        .collect();
    let mut records = DeviceArray::of(device, &record, logits_rows, 12);
    let mut newest = DeviceArray::<i32>::poisoned(device, logits_rows, 3);
    let ids: Vec<i32> = (0..logits_rows as i32).collect();
    let ids = DeviceArray::row(device, &ids);
    let mut tables = DeviceArray::<i32>::poisoned(device, logits_rows, 1);
    let mut history = DeviceArray::<i32>::poisoned(device, logits_rows, 1);
    let mut masks = DeviceArray::<i32>::poisoned(device, logits_rows, VOCABULARY.div_ceil(32));
    let mut sampled = DeviceArray::<i32>::poisoned(device, logits_rows, 4);
    let mut top_ids = DeviceArray::<i32>::poisoned(device, logits_rows, 20);
    let mut top_logprobs = DeviceArray::<f32>::poisoned(device, logits_rows, 20);
    microseconds(device, || {
        let mut slot_arrays = SequenceSlotArrays {
            latest: newest.mat_mut(),
            tables: tables.mat_mut(),
            history: history.mat_mut(),
            masks: masks.mat_mut(),
            params: records.mat_mut(),
        };
        let mut out = SamplerOutputArrays {
            sampled: sampled.mat_mut(),
            top_ids: top_ids.mat_mut(),
            top_logprobs: top_logprobs.mat_mut(),
        };
        let prepared = PreparedStep {
            ids: ids.mat(),
            positions: ids.mat(),
            verification: DraftVerification::NoDrafts,
        };
        device
            .launch(
                &S,
                RowSampling {
                    logits: logits.mat(),
                    stage: &view,
                    prepared: &prepared,
                    slots: &mut slot_arrays,
                    outputs: &mut out,
                },
            )
            .unwrap();
    })
}
