//! Q/K norm, RoPE and KV write of the GPU match the CPU, whose KV pool has another layout.

use device::{DeviceDriver, MatMut, MatRef, bf16};
use kernels::{
    KvCacheScales, KvLayout, KvTileOrder, QkNormRopeArgs, QkNormRopeKvWrite, RopeCosSin,
};

use crate::support::{
    DeviceArray, GpuTestElement, GpuTestFloat, RandomNumbers, S, devices, error, oracle, tolerance,
};

/// Head counts, dimensions and norms of a test of the fused Q/K norm, RoPE and KV write kernel.
struct QkRopeCase {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotary: usize,
    block_tokens: usize,
    norms: (bool, bool),
}

const POSITIONS: usize = 50;
const LAYERS: usize = 2;
const BLOCKS: usize = 5;
const TOKENS: usize = 7;

/// Random inputs of the fused Q/K norm, RoPE and KV write kernel.
struct QkRopeInputs<T, W> {
    qkv: Vec<T>,
    norm: Vec<W>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    positions: Vec<i32>,
    slots: Vec<i64>,
}

fn data<T: GpuTestFloat, W: GpuTestFloat>(case: &QkRopeCase) -> QkRopeInputs<T, W> {
    let mut numbers = RandomNumbers::fresh((case.head_dim + case.rotary) as u64);
    let half = case.rotary / 2;
    let angle = |i: usize| ((i / half.max(1)) as f32) * 0.37 / ((i % half.max(1)) as f32 + 1.0);
    // The slots are distinct, because the order of writes to one slot is unspecified.
    let slots = (0..TOKENS)
        .map(|t| if t == 3 { -1 } else { ((t * 7 + 1) % (BLOCKS * case.block_tokens)) as i64 });
    QkRopeInputs {
        qkv: numbers.reals(TOKENS * (case.heads + 2 * case.kv_heads) * case.head_dim),
        norm: numbers.reals(case.head_dim),
        cos: (0..POSITIONS * half).map(|i| angle(i).cos()).collect(),
        sin: (0..POSITIONS * half).map(|i| angle(i).sin()).collect(),
        positions: (0..TOKENS).map(|_| numbers.below(POSITIONS) as i32).collect(),
        slots: slots.collect(),
    }
}

fn layout<T: GpuTestFloat>(case: &QkRopeCase, order: KvTileOrder) -> KvLayout {
    let &QkRopeCase { kv_heads, head_dim, block_tokens, .. } = case;
    let (layers, blocks, dtype) = (LAYERS, BLOCKS, T::DTYPE);
    KvLayout { layers, blocks, block_tokens, kv_heads, head_dim, dtype, order }
}

/// Returns the keys and values of a pool in an order that does not depend on its layout, which differs
/// between GPU and CPU.
fn in_order<T: Copy>(pool: &[T], layout: &KvLayout) -> Vec<T> {
    let mut out = Vec::new();
    for (layer, block) in (0..LAYERS).flat_map(|l| (0..BLOCKS).map(move |b| (l, b))) {
        for head in 0..layout.kv_heads {
            for (t, d) in
                (0..layout.block_tokens).flat_map(|t| (0..layout.head_dim).map(move |d| (t, d)))
            {
                out.push(pool[layout.key_tile(layer, block, head) + layout.key(t, d)]);
                out.push(pool[layout.value_tile(layer, block, head) + layout.value(t, d)]);
            }
        }
    }
    out
}

/// Compares activations of `T` with norm weights of `W`.
fn rotations<T: GpuTestFloat, W: GpuTestFloat>(case: &QkRopeCase) {
    let cpu = oracle();
    let data = data::<T, W>(case);
    let (width, half) = (case.heads * case.head_dim, case.rotary / 2);
    let columns = (case.heads + 2 * case.kv_heads) * case.head_dim;
    let lanes = layout::<T>(case, KvTileOrder::LaneInterleaved);
    let mut pool = cpu.alloc(lanes.bytes()).unwrap();
    let mut q = vec![T::of(0.0); TOKENS * width];
    let args = QkNormRopeArgs {
        qkv: MatRef::of(&data.qkv, TOKENS, columns).unwrap(),
        q_norm: case.norms.0.then(|| MatRef::of(&data.norm, 1, case.head_dim).unwrap()),
        k_norm: case.norms.1.then(|| MatRef::of(&data.norm, 1, case.head_dim).unwrap()),
        eps: 1e-6,
        rope: RopeCosSin {
            cos: MatRef::of(&data.cos, POSITIONS, half).unwrap(),
            sin: MatRef::of(&data.sin, POSITIONS, half).unwrap(),
        },
        positions: MatRef::of(&data.positions, 1, TOKENS).unwrap(),
        slots: MatRef::of(&data.slots, 1, TOKENS).unwrap(),
        heads: case.heads,
        layer: 1,
        kv_scales: KvCacheScales::UNIT,
    };
    let out = MatMut::of(&mut q, TOKENS, width).unwrap();
    cpu.launch(&S, QkNormRopeKvWrite { q: out, pool: &mut pool, layout: &lanes, args: &args })
        .unwrap();
    let mut bytes = vec![0; lanes.bytes()];
    cpu.download(&S, &pool, 0, &mut bytes).unwrap();
    let stored: Vec<T> =
        bytes.chunks_exact(T::DTYPE.bytes()).map(<T as GpuTestElement>::of_bytes).collect();
    let stored = in_order(&stored, &lanes);

    for device in devices() {
        let rows = layout::<T>(case, KvTileOrder::RowMajor);
        let elements = rows.bytes() / T::DTYPE.bytes();
        let mut pool = DeviceArray::<T>::of(&device, &vec![T::of(0.0); elements], 1, elements);
        let qkv = DeviceArray::of(&device, &data.qkv, TOKENS, columns);
        let norm = DeviceArray::row(&device, &data.norm);
        let cos = DeviceArray::of(&device, &data.cos, POSITIONS, half);
        let sin = DeviceArray::of(&device, &data.sin, POSITIONS, half);
        let positions = DeviceArray::row(&device, &data.positions);
        let slots = DeviceArray::row(&device, &data.slots);
        let args = QkNormRopeArgs {
            qkv: qkv.mat(),
            q_norm: case.norms.0.then(|| norm.mat()),
            k_norm: case.norms.1.then(|| norm.mat()),
            rope: RopeCosSin { cos: cos.mat(), sin: sin.mat() },
            positions: positions.mat(),
            slots: slots.mat(),
            ..args
        };
        let mut rotated = DeviceArray::<T>::poisoned(&device, TOKENS, width);
        let kv = (&mut pool.buffer, &rows);
        device
            .launch(
                &S,
                QkNormRopeKvWrite { q: rotated.mat_mut(), pool: kv.0, layout: kv.1, args: &args },
            )
            .unwrap();
        let name = format!("{} D {} rotary {}", device.name(), case.head_dim, case.rotary);
        assert!(error(&rotated.read(&device), &q) < tolerance::<T>(), "{name}");
        let got = in_order(&pool.read(&device), &rows);
        assert!(error(&got, &stored) < tolerance::<T>(), "{name}");
        let untouched = |x: &[T]| x.iter().map(|x| x.value() == 0.0).collect::<Vec<_>>();
        assert_eq!(untouched(&got), untouched(&stored), "{name}: what no slot names stays");
    }
}

#[test]
fn rotations_and_stores_agree_with_the_cpu() {
    let case = |heads, kv_heads, head_dim, rotary, block_tokens, norms| QkRopeCase {
        heads,
        kv_heads,
        head_dim,
        rotary,
        block_tokens,
        norms,
    };
    for case in [
        case(4, 2, 128, 128, 16, (true, true)),
        case(3, 1, 64, 64, 8, (false, false)),
        case(2, 2, 96, 48, 6, (true, false)),
        case(5, 3, 16, 6, 2, (false, true)),
        case(1, 1, 256, 64, 16, (true, true)),
    ] {
        rotations::<f32, f32>(&case);
        rotations::<bf16, bf16>(&case);
        if case.norms == (true, true) {
            rotations::<bf16, f32>(&case);
        }
    }
}
