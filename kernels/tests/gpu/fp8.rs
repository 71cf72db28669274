//! Linear layers with fp8 weights, with and without fused operations. Results for few rows are compared with
//! the CPU, which dequantises the weights; results for more rows are compared with reference sums over
//! quantised weights and inputs.

use device::{DType, DeviceDriver, Fp8E4m3, bf16};
use kernels::{
    ActivationScaling, AddRmsNorm, FusedLinear, GateActivation, GatedActivation, HostMat, Linear,
    LinearFusion, LinearPrologue, PackedMatrix, PrefetchHint, PrologueLinear, RmsNorm, TensorAdd,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, on_cpu, pairs, tolerance};
use crate::support::{GpuTestFloat, RandomNumbers, S};

/// Part of an fp8 weight matrix `W` that has one scale: a block of 128 x 128 weights, an output channel, or the
/// matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ScaleGranularity {
    Blocks,
    Channels,
    Tensor,
}

/// An fp8 weight matrix with scales, as stored in a checkpoint.
pub(crate) struct Fp8Weights {
    bytes: Vec<u8>,
    scales: Vec<f32>,
    each: [usize; 2],
    n: usize,
    k: usize,
    scaling: ActivationScaling,
}

impl Fp8Weights {
    /// Returns the bytes of the weights, in row-major order, for tests that change weights.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Returns random weights of about (−1, 1) / √k, so that sums of `k` products with inputs near 1 stay
    /// near 1.
    pub(crate) fn new(
        numbers: &mut RandomNumbers,
        n: usize,
        k: usize,
        grid: ScaleGranularity,
    ) -> Self {
        let each = match grid {
            ScaleGranularity::Blocks => [128, 128],
            ScaleGranularity::Channels => [1, k],
            ScaleGranularity::Tensor => [n, k],
        };
        let count = n.div_ceil(each[0]) * k.div_ceil(each[1]);
        // Scales have four significant bits, so that dequantised weights are exact in bf16.
        let size = (k as f32).powf(-0.5).log2().floor().exp2() / 512.0;
        let scales = (0..count).map(|_| size * (8 + numbers.below(8)) as f32 / 8.0).collect();
        let bytes =
            (0..n * k).map(|_| Fp8E4m3::from_f32(numbers.float() * 500.0).to_bits()).collect();
        Self { bytes, scales, each, n, k, scaling: ActivationScaling::default() }
    }

    /// Sets how the scales of activations are computed.
    pub(crate) fn set_scaling(&mut self, scaling: ActivationScaling) {
        self.scaling = scaling;
    }

    fn with_scaling(self, scaling: ActivationScaling) -> Self {
        Self { scaling, ..self }
    }

    pub(crate) fn mat(&self) -> HostMat<'_> {
        let mat = HostMat::new(&self.bytes, DType::F8E4M3, self.n, self.k).unwrap();
        mat.scaled(&self.scales, self.each).unwrap().with_activation_scaling(self.scaling)
    }

    /// Packs the upper and the lower half of the weight rows as two stacked matrices, like gate and up
    /// projections.
    fn pack(&self, pair: &CpuGpuPair) -> [PackedMatrix; 2] {
        let half = self.n / 2;
        let parts = [self.mat().row_range(0, half), self.mat().row_range(half, self.n - half)];
        let half = pair.gpu.half_dtype();
        let packed = pair.gpu.pack(&parts, half).unwrap();
        assert_eq!(packed.dtype(), DType::F8E4M3);
        [packed, pair.cpu.pack(&parts, on_cpu(half)).unwrap()]
    }
}

const SHAPES: [(usize, usize); 4] = [(48, 64), (112, 192), (272, 576), (16, 1024)];

#[test]
fn fp8_fused_linear_matches_separate_kernels() {
    for pair in &pairs() {
        for (i, (n, k)) in SHAPES.into_iter().enumerate() {
            for grid in
                [ScaleGranularity::Blocks, ScaleGranularity::Channels, ScaleGranularity::Tensor]
            {
                let m = [1, 3, 5, 16][i];
                check_small_m(pair, m, n, k, grid);
            }
        }
    }
}

pub(crate) fn check_small_m(
    pair: &CpuGpuPair,
    m: usize,
    n: usize,
    k: usize,
    grid: ScaleGranularity,
) {
    let (eps, half) = (1e-6, pair.gpu.half_dtype());
    let what = |name: &str| format!("{name} of {m} x {n} x {k} {grid:?}");
    let mut numbers = pair.numbers((n * k + m) as u64);
    let [w, w_cpu] = Fp8Weights::new(&mut numbers, n, k, grid).pack(pair);
    let x = pair.random(&mut numbers, half, m, k);
    let norm = pair.random(&mut numbers, half, 1, k);
    let bias = pair.random(&mut numbers, DType::F32, 1, n);
    for (y_type, bias) in [(half, Some(&bias)), (DType::F32, None)] {
        let mut y = pair.poisoned(y_type, m, n);
        pair.gpu
            .launch(
                &S,
                Linear {
                    y: y.gpu_mut(),
                    x: x.gpu(),
                    weight: &w,
                    bias: bias.map(CpuGpuMatrix::gpu),
                },
            )
            .unwrap();
        pair.cpu
            .launch(
                &S,
                Linear {
                    y: y.cpu_mut(),
                    x: x.cpu(),
                    weight: &w_cpu,
                    bias: bias.map(CpuGpuMatrix::cpu),
                },
            )
            .unwrap();
        pair.check(&what("product"), &y, tolerance(half));
    }
    assert!(FusedLinear::supports(&pair.backends()[0], m, half, &w));
    let mut normed = pair.poisoned(half, m, k);
    pair.cpu
        .launch(&S, RmsNorm { y: normed.cpu_mut(), x: x.cpu(), weight: norm.cpu(), eps })
        .unwrap();
    let mut both = pair.poisoned(half, m, n);
    pair.cpu
        .launch(
            &S,
            Linear { y: both.cpu_mut(), x: normed.cpu(), weight: &w_cpu, bias: Some(bias.cpu()) },
        )
        .unwrap();
    let with_norm = LinearFusion { norm: Some((norm.gpu(), eps)), ..LinearFusion::default() };
    let fusion = LinearFusion { bias: Some(bias.gpu()), ..with_norm };
    pair.gpu
        .launch(&S, FusedLinear { y: both.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
        .unwrap();
    pair.check(&what("norm"), &both, tolerance(half));

    let activation = if m == 5 { GateActivation::GeluTanh } else { GateActivation::Silu };
    let mut gated = pair.poisoned(half, m, n / 2);
    let op = GatedActivation { y: gated.cpu_mut(), x: both.cpu(), activation };
    pair.cpu.launch(&S, op).unwrap();
    // A prefetch hint for the next layer's weights must not change results.
    let prefetch = Some(PrefetchHint { weight: &w, gated: m.is_multiple_of(2) });
    let fusion = LinearFusion { gate: Some(activation), prefetch, ..fusion };
    pair.gpu
        .launch(&S, FusedLinear { y: gated.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
        .unwrap();
    pair.check(&what("activation"), &gated, 2.0 * tolerance(half));

    let mut stream = pair.random(&mut numbers, half, m, n);
    let mut sum = pair.poisoned(half, m, n);
    pair.cpu
        .launch(&S, Linear { y: both.cpu_mut(), x: x.cpu(), weight: &w_cpu, bias: None })
        .unwrap();
    pair.cpu.launch(&S, TensorAdd { y: sum.cpu_mut(), a: stream.cpu(), b: both.cpu() }).unwrap();
    let fusion = LinearFusion { add: true, prefetch, ..LinearFusion::default() };
    pair.gpu
        .launch(&S, FusedLinear { y: stream.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
        .unwrap();
    std::mem::swap(&mut stream.gpu, &mut sum.gpu);
    pair.check(&what("add"), &sum, tolerance(half));
}

/// Packs a stacked weight matrix whose matrices end inside scale blocks, as q, k and v projections or
/// tensor-parallel slices may.
#[test]
fn stacks_keep_the_scales_of_their_parts() {
    for pair in &pairs() {
        let mut numbers = pair.numbers(7);
        let k = 320;
        let matrices =
            [136, 72, 200].map(|n| Fp8Weights::new(&mut numbers, n, k, ScaleGranularity::Blocks));
        let parts = [matrices[0].mat(), matrices[1].mat(), matrices[2].mat().row_range(64, 120)];
        let w = pair.gpu.pack(&parts, DType::BF16).unwrap();
        assert_eq!(w.dtype(), DType::F8E4M3);
        let w_cpu = pair.cpu.pack(&parts, DType::BF16).unwrap();
        let x = pair.random(&mut numbers, DType::BF16, 2, k);
        let mut y = pair.poisoned(DType::BF16, 2, 328);
        pair.gpu.launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &w, bias: None }).unwrap();
        pair.cpu
            .launch(&S, Linear { y: y.cpu_mut(), x: x.cpu(), weight: &w_cpu, bias: None })
            .unwrap();
        pair.check("stack", &y, tolerance(DType::BF16));
    }
}

#[test]
fn fp8_gemm_uses_quantized_inputs() {
    for pair in &pairs() {
        for (m, (n, k), grid) in [
            (17, (48, 64), ScaleGranularity::Channels),
            (20, (144, 192), ScaleGranularity::Blocks),
            (70, (80, 320), ScaleGranularity::Blocks),
            (33, (130, 448), ScaleGranularity::Channels),
            (48, (256, 256), ScaleGranularity::Blocks),
        ] {
            check_large_m::<bf16>(pair, m, n, k, grid);
        }
    }
}

/// Tests weights with one scale, power-of-two activation scales, and a static activation scale with which
/// half of the inputs saturate.
#[test]
fn fp8_gemm_applies_the_activation_scaling() {
    use ActivationScaling::{Dynamic, PowerOfTwo, Static};
    use ScaleGranularity::{Blocks, Channels, Tensor};
    let limit = Static(0.5 / Fp8E4m3::MAX);
    for pair in &pairs() {
        for (m, (n, k), grid, scaling) in [
            (17, (130, 192), Tensor, Dynamic),
            (20, (144, 192), Blocks, PowerOfTwo),
            (33, (130, 448), Channels, PowerOfTwo),
            (33, (48, 320), Tensor, limit),
            (18, (144, 320), Blocks, limit),
            // Block scales up to 256 rows, where BLASLt supports them.
            (40, (256, 256), Tensor, limit),
            (260, (256, 128), Tensor, limit),
        ] {
            check_scaled::<bf16>(pair, [m, n, k], grid, scaling);
        }
    }
}

/// Each of the stacked weight matrices has a separate weight scale and a separate static activation scale;
/// the maximum of the static activation scales is used for all.
#[test]
fn stacked_tensors_use_the_largest_static_scale() {
    for pair in &pairs() {
        // The second stack takes the form of block scales.
        for (m, k, outputs) in [(19, 192, [48, 32, 16]), (40, 256, [256, 128, 128])] {
            check_stack_of_tensors(pair, m, k, outputs);
        }
    }
}

fn check_stack_of_tensors(pair: &CpuGpuPair, m: usize, k: usize, outputs: [usize; 3]) {
    let mut numbers = pair.numbers(5);
    let scales = [0.001, 0.002, 0.0015];
    let matrices = [0, 1, 2].map(|i| {
        let weights = Fp8Weights::new(&mut numbers, outputs[i], k, ScaleGranularity::Tensor);
        weights.with_scaling(ActivationScaling::Static(scales[i]))
    });
    let parts = matrices.each_ref().map(Fp8Weights::mat);
    let w = pair.gpu.pack(&parts, pair.gpu.half_dtype()).unwrap();
    assert_eq!(w.dtype(), DType::F8E4M3);
    let rows: Vec<Vec<f32>> = parts.iter().flat_map(read_rows).collect();
    let values: Vec<bf16> = numbers.reals(m * k);
    let bias = pair.random(&mut numbers, DType::F32, 1, rows.len());
    let product = QuantizedLinearCase { w: &w, rows: &rows, bias: &bias, group: k };
    product.check(pair, &values, ActivationScaling::Static(0.002), &format!("{outputs:?}"));
}

pub(crate) fn check_large_m<T: GpuTestFloat>(
    pair: &CpuGpuPair,
    m: usize,
    n: usize,
    k: usize,
    grid: ScaleGranularity,
) {
    check_scaled::<T>(pair, [m, n, k], grid, ActivationScaling::Dynamic);
}

fn check_scaled<T: GpuTestFloat>(
    pair: &CpuGpuPair,
    [m, n, k]: [usize; 3],
    grid: ScaleGranularity,
    scaling: ActivationScaling,
) {
    let mut numbers = pair.numbers((m * n + k) as u64);
    let stored = Fp8Weights::new(&mut numbers, n, k, grid).with_scaling(scaling);
    let [w, _] = stored.pack(pair);
    let values: Vec<T> = numbers.reals(m * k);
    let bias = pair.random(&mut numbers, DType::F32, 1, n);
    let group = if grid == ScaleGranularity::Blocks { 128 } else { k };
    let product =
        QuantizedLinearCase { w: &w, rows: &read_rows(&stored.mat()), bias: &bias, group };
    product.check(pair, &values, scaling, &format!("{m} x {n} x {k} {grid:?} {scaling:?}"));
}

fn read_rows(matrix: &HostMat<'_>) -> Vec<Vec<f32>> {
    let mut rows = vec![vec![0.0; matrix.cols()]; matrix.rows()];
    for (r, row) in rows.iter_mut().enumerate() {
        matrix.read_row(r, row);
    }
    rows
}

/// Weights and bias of a linear layer whose inputs are quantised in groups of `group` columns.
struct QuantizedLinearCase<'a> {
    w: &'a PackedMatrix,
    /// Dequantised weights.
    rows: &'a [Vec<f32>],
    bias: &'a CpuGpuMatrix,
    group: usize,
}

impl QuantizedLinearCase<'_> {
    /// Compares the GPU product for inputs `values` with a reference sum over inputs that are quantised with
    /// `scaling`.
    fn check<T: GpuTestFloat>(
        &self,
        pair: &CpuGpuPair,
        values: &[T],
        scaling: ActivationScaling,
        what: &str,
    ) {
        let Self { w, rows, bias, group } = *self;
        let (n, k) = (w.n(), w.k());
        let m = values.len() / k;
        let x = pair.put(values, m, k);
        let mut y = pair.poisoned(T::DTYPE, m, n);
        pair.gpu
            .launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: w, bias: Some(bias.gpu()) })
            .unwrap();
        let bias = pair.read::<f32>(bias)[0].clone();
        let groups = values.chunks(k).flat_map(|row| row.chunks(group));
        let quantised: Vec<f32> = groups.flat_map(|group| quantize_group(group, scaling)).collect();
        let sum = |x: &[f32], w: &[f32]| -> f64 {
            x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
        };
        let expected: Vec<T> = quantised
            .chunks(k)
            .flat_map(|x| rows.iter().zip(&bias).map(move |(w, b)| (x, w, b)))
            .map(|(x, w, b)| T::of(sum(x, w) as f32 + b))
            .collect();
        let mut expected = pair.put(&expected, m, n);
        std::mem::swap(&mut expected.gpu, &mut y.gpu);
        pair.check(what, &expected, tolerance(T::DTYPE));
    }
}

/// Quantises a group of inputs with one scale and returns the dequantised values.
pub(crate) fn quantize_group<T: GpuTestFloat>(group: &[T], scaling: ActivationScaling) -> Vec<f32> {
    let peak = group.iter().fold(0f32, |peak, x| peak.max(x.value().abs()));
    let scale = scaling.scale(peak);
    group.iter().map(|x| Fp8E4m3::from_f32(x.value() * (1.0 / scale)).to_f32() * scale).collect()
}

/// Output rows have the same bits alone, in small batches, and in large batches that use the same kernel.
#[test]
fn fp8_linear_rows_are_batch_invariant() {
    for pair in &pairs() {
        for ((n, k), grid, normed) in [
            ((48, 1088), ScaleGranularity::Blocks, false),
            ((48, 1088), ScaleGranularity::Blocks, true),
            ((24, 2560), ScaleGranularity::Channels, true),
        ] {
            check_rows(pair, n, k, grid, normed);
        }
    }
}

fn check_rows(pair: &CpuGpuPair, n: usize, k: usize, grid: ScaleGranularity, normed: bool) {
    let (rows, eps) = (40, 1e-6);
    let mut numbers = pair.numbers(2);
    let values = numbers.reals::<bf16>(rows * k);
    let norm = pair.random(&mut numbers, DType::BF16, 1, k);
    let [w, _] = Fp8Weights::new(&mut numbers, n, k, grid).pack(pair);
    let product = |from: usize, m: usize| {
        let x = pair.put(&values[from * k..(from + m) * k], m, k);
        let mut y = pair.poisoned(DType::F32, m, n);
        if m > 16 {
            pair.gpu
                .launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &w, bias: None })
                .unwrap();
        } else {
            let norm = normed.then(|| (norm.gpu(), eps));
            let fusion = LinearFusion { norm, ..LinearFusion::default() };
            pair.gpu
                .launch(&S, FusedLinear { y: y.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
                .unwrap();
        }
        pair.read::<f32>(&y)[0].clone()
    };
    if FusedLinear::supports(&pair.backends()[0], 16, DType::BF16, &w) {
        let small_batch = product(0, 16);
        for (from, m) in [(0, 1), (7, 1), (15, 1), (3, 2), (5, 9)] {
            let same = product(from, m) == small_batch[from * n..(from + m) * n];
            assert!(same, "{m} rows from {from} of {n} x {k} {grid:?}");
        }
    }
    let large_batch = product(0, rows);
    let same = product(5, 24) == large_batch[5 * n..29 * n];
    // The vendor's BLAS library chooses algorithms by the number of rows, so with it the bits of a row may
    // depend on the batch.
    assert!(same || pair.gpu.name().contains("with a BLASLt"), "24 rows of {n} x {k} {grid:?}");
}

/// A prologue (a norm or gate activation before the GEMM) that quantises its output to fp8 gives the same bits as
/// separate kernels.
#[test]
fn fp8_prologue_quantizes_inputs() {
    use ActivationScaling::{Dynamic, PowerOfTwo, Static};
    use ScaleGranularity::{Blocks, Channels, Tensor};
    // Half of the inputs saturate.
    let limit = Static(0.5 / Fp8E4m3::MAX);
    for pair in &pairs() {
        for (m, k) in [(17, 128), (18, 1152), (17, 8320)] {
            for (grid, scaling) in
                [(Blocks, Dynamic), (Blocks, PowerOfTwo), (Tensor, limit), (Channels, limit)]
            {
                check_norm_before(pair, [m, k], grid, scaling);
                check_gate_before(pair, [m, k], grid, scaling);
            }
        }
        for ((n, k), grid, scaling, rows) in [
            ((32, 192), Blocks, Dynamic, 40),
            ((32, 256), Channels, Dynamic, 40),
            ((32, 256), Blocks, limit, 40),
            ((32, 256), Blocks, Dynamic, 16),
        ] {
            let weights = Fp8Weights::new(&mut pair.numbers(3), n, k, grid);
            let [w, _] = weights.with_scaling(scaling).pack(pair);
            assert!(
                !PrologueLinear::supports(&pair.backends()[0], rows, DType::BF16, &w),
                "{rows} x {n} x {k} {grid:?} {scaling:?}"
            );
        }
    }
}

/// Number of outputs of the linear layer after a prologue. Static scales with one weight scale take the form of blocks only
/// if each stacked matrix has whole blocks; tests stack two halves.
fn outputs_before(grid: ScaleGranularity) -> usize {
    if grid == ScaleGranularity::Tensor { 256 } else { 32 }
}

fn check_norm_before(
    pair: &CpuGpuPair,
    [m, k]: [usize; 2],
    grid: ScaleGranularity,
    scaling: ActivationScaling,
) {
    let (n, eps, bf16) = (outputs_before(grid), 1e-6, DType::BF16);
    let mut numbers = pair.numbers((m * k) as u64);
    let weights = Fp8Weights::new(&mut numbers, n, k, grid);
    let [w, _] = weights.with_scaling(scaling).pack(pair);
    assert!(PrologueLinear::supports(&pair.backends()[0], m, bf16, &w), "{m} x {k}");
    let (x, delta) = (pair.random(&mut numbers, bf16, m, k), pair.random(&mut numbers, bf16, m, k));
    let weight_type = if m == 18 { DType::F32 } else { bf16 };
    let norm = pair.random(&mut numbers, weight_type, 1, k);
    let bias = pair.random(&mut numbers, DType::F32, 1, n);
    let start = pair.read::<device::bf16>(&x)[0].clone();
    let (mut one, mut both) = (pair.put(&start, m, k), pair.put(&start, m, k));
    let mut normed = pair.poisoned(bf16, m, k);
    let (mut expected, mut y) = (pair.poisoned(bf16, m, n), pair.poisoned(bf16, m, n));
    let sum = one.gpu_mut();
    pair.gpu
        .launch(
            &S,
            AddRmsNorm { y: normed.gpu_mut(), x: sum, delta: delta.gpu(), weight: norm.gpu(), eps },
        )
        .unwrap();
    pair.gpu
        .launch(
            &S,
            Linear { y: expected.gpu_mut(), x: normed.gpu(), weight: &w, bias: Some(bias.gpu()) },
        )
        .unwrap();
    let (x, delta, norm) = (both.gpu_mut(), delta.gpu(), norm.gpu());
    let before = LinearPrologue::AddNorm { x, delta, norm, eps };
    pair.gpu
        .launch(
            &S,
            PrologueLinear { y: y.gpu_mut(), prologue: before, weight: &w, bias: Some(bias.gpu()) },
        )
        .unwrap();
    for (what, got, expected) in [("stream", &both, &one), ("product", &y, &expected)] {
        let [got, expected] =
            [got, expected].map(|twin| pair.read::<device::bf16>(twin)[0].clone());
        assert!(got == expected, "{what} of {m} x {k}");
    }
}

fn check_gate_before(
    pair: &CpuGpuPair,
    [m, k]: [usize; 2],
    grid: ScaleGranularity,
    scaling: ActivationScaling,
) {
    let (n, bf16) = (outputs_before(grid), DType::BF16);
    let mut numbers = pair.numbers((m + k) as u64);
    let weights = Fp8Weights::new(&mut numbers, n, k, grid);
    let [w, _] = weights.with_scaling(scaling).pack(pair);
    let halves = pair.random(&mut numbers, bf16, m, 2 * k);
    let mut gated = pair.poisoned(bf16, m, k);
    let (mut expected, mut y) = (pair.poisoned(bf16, m, n), pair.poisoned(bf16, m, n));
    let activation = if m == 18 { GateActivation::GeluTanh } else { GateActivation::Silu };
    let op = GatedActivation { y: gated.gpu_mut(), x: halves.gpu(), activation };
    pair.gpu.launch(&S, op).unwrap();
    pair.gpu
        .launch(&S, Linear { y: expected.gpu_mut(), x: gated.gpu(), weight: &w, bias: None })
        .unwrap();
    let before = LinearPrologue::Gated { x: halves.gpu(), activation };
    pair.gpu
        .launch(&S, PrologueLinear { y: y.gpu_mut(), prologue: before, weight: &w, bias: None })
        .unwrap();
    let [got, expected] = [&y, &expected].map(|twin| pair.read::<device::bf16>(twin)[0].clone());
    assert!(got == expected, "product of {m} x {k}");
}
