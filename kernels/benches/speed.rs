//! Benchmark of the CPU kernels. Their speed is compared with two upper bounds that are measured in the same
//! run: FMA throughput in registers, and memory read bandwidth. Command:
//! `cargo bench -p kernels -- [linear|step|attention|small|pool] [threads]`.
//!
//! Shapes are those of Qwen3-0.6B. Benchmarks alternate between weights of 300 MB in total, so that the
//! weights are read from memory, as in a forward pass.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first error")]

use std::hint::black_box;
use std::time::Instant;

use device::{
    CpuConfig, CpuIsa, DType, DeviceDriver, DeviceElement, DeviceStream, MatMut, MatRef, bf16, f16,
};
use kernels::cpu::CpuBackend;
use kernels::{
    AddRmsNorm, AttentionKeyRange, AttentionMetadata, BatchUpperBounds, GateActivation,
    GatedActivation, HostMat, KvCacheScales, KvLayout, KvTileOrder, Linear, PackedEmbedding,
    PackedMatrix, PagedAttention, PagedAttentionArgs, QkNormRopeArgs, QkNormRopeKvWrite,
    RopeCosSin,
};

const S: DeviceStream = DeviceStream(0);
const HIDDEN: usize = 1024;

/// Returns the time in seconds of the fastest of `runs` runs of `f`.
fn best(runs: usize, mut f: impl FnMut()) -> f64 {
    f();
    let times = (0..runs).map(|_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

fn numbers(n: usize) -> Vec<bf16> {
    let mut s = 12345u64;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            bf16::from_f32((s >> 40) as f32 / (1u64 << 24) as f32 - 0.5)
        })
        .collect()
}

fn packed(device: &CpuBackend, dtype: DType, n: usize, k: usize) -> PackedMatrix {
    let bytes: Vec<u8> = numbers(n * k).iter().flat_map(|x| x.to_le_bytes()).collect();
    device.pack(&[HostMat::new(&bytes, DType::BF16, n, k).unwrap()], dtype).unwrap()
}

/// Measures the arithmetic upper bound: GFLOP/s of bf16 dot products in registers on all threads; 0 without
/// AVX-512-BF16.
fn arithmetic_ceiling(device: &CpuBackend) -> f64 {
    const STEPS: usize = 1_000_000;
    #[cfg(target_arch = "x86_64")]
    if device.isa() == CpuIsa::Avx512Bf16 {
        let job = |_: usize| {
            // SAFETY: the device has checked that the processor supports the instruction set.
            black_box(unsafe { products_in_registers(STEPS) });
        };
        let seconds = best(9, || device.threads().run(&job));
        return (device.threads().threads() * STEPS * 12 * 64) as f64 / seconds / 1e9;
    }
    let _ = (device, STEPS);
    0.0
}

/// Loop that [`arithmetic_ceiling`] times: each step executes one dot-product instruction (32 bf16
/// multiply-adds) on each of 12 independent accumulators, so that no instruction waits for the preceding one.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn products_in_registers(steps: usize) -> f32 {
    use std::arch::x86_64::{
        __m512bh, _mm512_dpbf16_ps, _mm512_reduce_add_ps, _mm512_set1_epi16, _mm512_setzero_ps,
    };
    // SAFETY: both vector types have 64 bytes, and every bit pattern is valid.
    let ones: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi16(0x3f80)) };
    let mut sums = [_mm512_setzero_ps(); 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, ones, black_box_register(ones));
        }
    }
    sums.map(|s| _mm512_reduce_add_ps(s)).iter().sum()
}

/// Returns `x` through an empty assembly block, so that the compiler cannot treat the operand as a constant.
/// No instruction is emitted.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn black_box_register(x: std::arch::x86_64::__m512bh) -> std::arch::x86_64::__m512bh {
    let mut x: std::arch::x86_64::__m512i =
        // SAFETY: both vector types have 64 bytes, and every bit pattern is valid.
        unsafe { std::mem::transmute(x) };
    // SAFETY: the assembly block contains only a comment, so it executes no instruction.
    unsafe { std::arch::asm!("/* {0} */", inout(zmm_reg) x, options(pure, nomem, nostack)) };
    // SAFETY: both vector types have 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute(x) }
}

/// Measures the bandwidth upper bound: GB/s of all threads summing 512 MB.
fn memory_ceiling(device: &CpuBackend) -> f64 {
    let mut buffer = device.alloc(512 << 20).unwrap();
    // The buffer is written first: all unwritten pages are mapped to one page of zeros, which would be read
    // from cache.
    device.upload(&mut buffer, 0, &vec![1; 512 << 20]).unwrap();
    let words = buffer.bytes() / 4;
    let all = buffer.mat(DType::F32, 1, words).unwrap();
    let seconds = best(7, || {
        device.threads().split(words, 1 << 20, 0, &|range| {
            let mut lanes = [0.0f32; 64];
            for chunk in all.row::<f32>(0)[range].as_chunks::<64>().0 {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *lane += x;
                }
            }
            black_box(lanes);
        });
    });
    buffer.bytes() as f64 / seconds / 1e9
}

fn linear<T: DeviceElement>(device: &CpuBackend, of: fn(f32) -> T) {
    println!("linear, {:?}: rows x K x N", T::DTYPE);
    for (k, n) in
        [(HIDDEN, 4096), (2048, HIDDEN), (HIDDEN, 6144), (3072, HIDDEN), (HIDDEN, 151_936)]
    {
        let copies = (300_000_000 / (k * n * 2)).max(1);
        let weights: Vec<PackedMatrix> =
            (0..copies).map(|_| packed(device, T::DTYPE, n, k)).collect();
        for rows in [1, 2, 4, 8, 12, 16, 32, 64, 128, 512] {
            let used = if rows > 32 { copies.min(8) } else { copies };
            if rows > 32 && n > 10_000 {
                continue;
            }
            let x: Vec<T> = numbers(rows * k).iter().map(|x| of(x.to_f32())).collect();
            let mut y = vec![of(0.0); rows * n];
            let seconds = best(7, || {
                for w in &weights[..used] {
                    let out = MatMut::of(&mut y, rows, n).unwrap();
                    device
                        .launch(
                            &S,
                            Linear {
                                y: out,
                                x: MatRef::of(&x, rows, k).unwrap(),
                                weight: w,
                                bias: None,
                            },
                        )
                        .unwrap();
                }
            });
            let flops = 2.0 * (rows * k * n * used) as f64 / seconds / 1e9;
            let bytes = (k * n * 2 * used) as f64 / seconds / 1e9;
            println!("{rows:4} x {k} x {n:6}: {flops:6.1} GFLOP/s, weights {bytes:5.1} GB/s");
        }
    }
}

/// Measures a forward pass of 28 layers without attention, with every weight read from memory, and prints the
/// milliseconds of each kind of operation.
fn step(device: &CpuBackend, rows: usize) {
    const KINDS: [&str; 7] = ["qkv", "o", "gate_up", "down", "head", "norm", "silu"];
    let shapes = [(HIDDEN, 4096), (2048, HIDDEN), (HIDDEN, 6144), (3072, HIDDEN)];
    let layers: Vec<[PackedMatrix; 4]> =
        (0..28).map(|_| shapes.map(|(k, n)| packed(device, DType::BF16, n, k))).collect();
    let head = packed(device, DType::BF16, 151_936, HIDDEN);
    let wanted = if rows > 64 { 1 } else { rows };
    let x = numbers(rows * 6144);
    let mut out = vec![bf16::ZERO; rows * 6144];
    let mut logits = vec![0.0f32; wanted * 151_936];
    let mut residual = numbers(rows * HIDDEN);
    let mut fastest = [f64::INFINITY; KINDS.len()];
    for _ in 0..5 {
        let mut seconds = [0.0; KINDS.len()];
        let mut time = |kind: usize, f: &mut dyn FnMut()| {
            let start = Instant::now();
            f();
            seconds[kind] += start.elapsed().as_secs_f64();
        };
        for layer in &layers {
            for (kind, w) in layer.iter().enumerate() {
                time(kind, &mut || {
                    let y = MatMut::of(&mut out[..rows * w.n()], rows, w.n()).unwrap();
                    let x = MatRef::of(&x[..rows * w.k()], rows, w.k()).unwrap();
                    device.launch(&S, Linear { y, x, weight: w, bias: None }).unwrap();
                });
            }
            for _ in 0..2 {
                time(5, &mut || {
                    let y = MatMut::of(&mut out[..rows * HIDDEN], rows, HIDDEN).unwrap();
                    let stream = MatMut::of(&mut residual, rows, HIDDEN).unwrap();
                    let delta = MatRef::of(&x[..rows * HIDDEN], rows, HIDDEN).unwrap();
                    let w = MatRef::of(&x[..HIDDEN], 1, HIDDEN).unwrap();
                    device
                        .launch(&S, AddRmsNorm { y, x: stream, delta, weight: w, eps: 1e-6 })
                        .unwrap();
                });
            }
            time(6, &mut || {
                let y = MatMut::of(&mut out[..rows * 3072], rows, 3072).unwrap();
                let x = MatRef::of(&x, rows, 6144).unwrap();
                let activation = GateActivation::Silu;
                device.launch(&S, GatedActivation { y, x, activation }).unwrap();
            });
        }
        time(4, &mut || {
            let y = MatMut::of(&mut logits, wanted, head.n()).unwrap();
            let x = MatRef::of(&x[..wanted * HIDDEN], wanted, HIDDEN).unwrap();
            device.launch(&S, Linear { y, x, weight: &head, bias: None }).unwrap();
        });
        for (fastest, seconds) in fastest.iter_mut().zip(seconds) {
            *fastest = fastest.min(seconds);
        }
    }
    let parts: Vec<String> =
        KINDS.iter().zip(fastest).map(|(kind, s)| format!("{kind} {:.1}", s * 1e3)).collect();
    let total: f64 = fastest.iter().sum();
    println!("{rows:4} rows, without attention: {:.1} ms = {}", total * 1e3, parts.join(" + "));
}

/// Measures one attention layer over `rows` requests, each with `len` new tokens at the end of a context of
/// `context` tokens.
fn attention(device: &CpuBackend, rows: usize, len: usize, context: usize) {
    let (heads, kv_heads, dim, block_tokens) = (16, 8, 128, 16);
    let per_row = context.div_ceil(block_tokens);
    let layout = KvLayout {
        layers: 1,
        blocks: rows * per_row,
        block_tokens,
        kv_heads,
        head_dim: dim,
        dtype: DType::BF16,
        order: KvTileOrder::LaneInterleaved,
    };
    let mut pool = device.alloc(layout.bytes()).unwrap();
    let tokens = rows * len;
    let qkv = numbers(tokens * (heads + 2 * kv_heads) * dim);
    let norm = vec![bf16::ONE; dim];
    let (cos, sin) = (vec![0.6f32; context * dim / 2], vec![0.8f32; context * dim / 2]);
    let start = (context - len) as i32;
    let positions: Vec<i32> = (0..rows).flat_map(|_| start..context as i32).collect();
    let table: Vec<i32> = (0..layout.blocks as i32).collect();
    let slots: Vec<i64> = (0..rows)
        .flat_map(|r| {
            (start as usize..context).map(move |p| (r * per_row * block_tokens + p) as i64)
        })
        .collect();
    let cu_q: Vec<i32> = (0..=rows).map(|r| (r * len) as i32).collect();
    let context_lens = vec![context as i32; rows];
    let mut q = vec![bf16::ZERO; tokens * heads * dim];
    let mut o = q.clone();
    let rope = RopeCosSin {
        cos: MatRef::of(&cos, context, dim / 2).unwrap(),
        sin: MatRef::of(&sin, context, dim / 2).unwrap(),
    };
    let args = QkNormRopeArgs {
        qkv: MatRef::of(&qkv, tokens, (heads + 2 * kv_heads) * dim).unwrap(),
        q_norm: Some(MatRef::of(&norm, 1, dim).unwrap()),
        k_norm: Some(MatRef::of(&norm, 1, dim).unwrap()),
        eps: 1e-6,
        rope,
        positions: MatRef::of(&positions, 1, tokens).unwrap(),
        slots: MatRef::of(&slots, 1, tokens).unwrap(),
        heads,
        layer: 0,
        kv_scales: KvCacheScales::UNIT,
    };
    let write = best(20, || {
        let out = MatMut::of(&mut q, tokens, heads * dim).unwrap();
        device
            .launch(&S, QkNormRopeKvWrite { q: out, pool: &mut pool, layout: &layout, args: &args })
            .unwrap();
    });
    let args = PagedAttentionArgs {
        q: MatRef::of(&q, tokens, heads * dim).unwrap(),
        rows: AttentionMetadata {
            cu_q: MatRef::of(&cu_q, 1, rows + 1).unwrap(),
            context_lens: MatRef::of(&context_lens, 1, rows).unwrap(),
            block_tables: MatRef::of(&table, rows, per_row).unwrap(),
            table_rows: None,
            bounds: BatchUpperBounds::of_any(tokens, rows, layout.slots()),
        },
        heads,
        layer: 0,
        scale: (dim as f32).powf(-0.5),
        keys: AttentionKeyRange::default(),
        sinks: None,
    };
    let attend = best(20, || {
        let out = MatMut::of(&mut o, tokens, heads * dim).unwrap();
        device
            .launch(&S, PagedAttention { o: out, pool: &pool, layout: &layout, args: &args })
            .unwrap();
    });
    let pairs: usize = (0..len).map(|i| context - len + i + 1).sum::<usize>() * rows;
    let flops = 4.0 * (pairs * heads * dim) as f64 / attend / 1e9;
    let bytes = (rows * context * kv_heads * dim * 4) as f64 / attend / 1e9;
    println!(
        "{rows:3} rows of {len:3} at {context:5}: attention {:8.1} us ({flops:6.1} GFLOP/s, keys and \
         values {bytes:5.1} GB/s), norm + rope + write {:7.1} us",
        attend * 1e6,
        write * 1e6,
    );
}

fn small(device: &CpuBackend) {
    println!("row-wise kernels, H 1024, I 3072");
    let head = packed(device, DType::BF16, 30_000, HIDDEN);
    for rows in [1, 8, 32, 512] {
        let (x, gate_up) = (numbers(rows * HIDDEN), numbers(rows * 6144));
        let w = numbers(HIDDEN);
        let (mut residual, mut y) = (x.clone(), x.clone());
        let mut act = vec![bf16::ZERO; rows * 3072];
        let norm = best(50, || {
            let out = MatMut::of(&mut y, rows, HIDDEN).unwrap();
            let stream = MatMut::of(&mut residual, rows, HIDDEN).unwrap();
            let delta = MatRef::of(&x, rows, HIDDEN).unwrap();
            let w = MatRef::of(&w, 1, HIDDEN).unwrap();
            device
                .launch(&S, AddRmsNorm { y: out, x: stream, delta, weight: w, eps: 1e-6 })
                .unwrap();
        });
        let silu = best(50, || {
            let y = MatMut::of(&mut act, rows, 3072).unwrap();
            let x = MatRef::of(&gate_up, rows, 6144).unwrap();
            let activation = GateActivation::Silu;
            device.launch(&S, GatedActivation { y, x, activation }).unwrap();
        });
        let ids: Vec<i32> = (0..rows).map(|i| (i * 7919 % 30_000) as i32).collect();
        let embed = best(20, || {
            let out = MatMut::of(&mut y, rows, HIDDEN).unwrap();
            device
                .launch(
                    &S,
                    PackedEmbedding {
                        y: out,
                        ids: MatRef::of(&ids, 1, rows).unwrap(),
                        table: &head,
                        first: 0,
                    },
                )
                .unwrap();
        });
        println!(
            "{rows:4} rows: add_rms_norm {:7.1} us, silu_mul {:7.1} us, embed_packed {:7.1} us",
            norm * 1e6,
            silu * 1e6,
            embed * 1e6
        );
    }
}

fn pool(device: &CpuBackend) {
    let regions = 10_000;
    let seconds = best(5, || {
        for _ in 0..regions {
            device.threads().run(&|t| {
                black_box(t);
            });
        }
    });
    println!("empty parallel region: {:.2} us", seconds / f64::from(regions) * 1e6);
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let threads = words.iter().find_map(|w| w.parse().ok()).unwrap_or(0);
    let wanted = |name: &str| {
        let named = words.iter().any(|w| w.parse::<usize>().is_err());
        !named || words.iter().any(|w| w == name)
    };
    let device = CpuBackend::new(CpuConfig { threads, isa: CpuIsa::detect() }).unwrap();
    println!("{}", device.name());
    let ceiling = || {
        let (flops, bytes) = (arithmetic_ceiling(&device), memory_ceiling(&device));
        println!("ceilings now: {flops:.0} GFLOP/s bf16 in registers, {bytes:.1} GB/s read");
    };
    ceiling();
    if wanted("pool") {
        pool(&device);
    }
    if wanted("small") {
        small(&device);
    }
    if wanted("step") {
        for rows in [1, 8, 16, 32, 512] {
            step(&device, rows);
        }
    }
    if wanted("attention") {
        for (rows, len, context) in
            [(1, 512, 512), (1, 512, 4096), (4, 128, 128), (1, 1, 48), (1, 1, 4096), (32, 1, 48)]
        {
            attention(&device, rows, len, context);
        }
    }
    if wanted("linear") {
        linear(&device, bf16::from_f32);
        linear(&device, f16::from_f32);
        ceiling();
    }
}
