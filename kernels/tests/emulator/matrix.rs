//! MMAs through their fragment layouts, including the AMD builtins, and fp8 in both formats (OCP and FNUZ).

use hip_runtime_sys::DriverPtr;

use crate::correct_kernels::values;
use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};

pub(crate) const MATRIX: &str = include_str!("kernels/matrix.hip");
const WGMMA: &str = include_str!("kernels/wgmma.hip");

pub(crate) const F16: &str = "-DHALF_F16=1";

/// Returns the bits of `x` rounded to f16 or bf16; `wide` converts the bits back.
fn narrow(x: f32, f16: bool) -> u16 {
    if f16 { half::f16::from_f32(x).to_bits() } else { half::bf16::from_f32(x).to_bits() }
}

fn wide(bits: u16, f16: bool) -> f64 {
    if f16 { half::f16::from_bits(bits).to_f64() } else { half::bf16::from_bits(bits).to_f64() }
}

/// Returns the value of e4m3 bits; FNUZ has a bias larger by one, and uses the encoding of negative zero for
/// NaN.
pub(crate) fn fp8_value(bits: u8, fnuz: bool) -> f64 {
    let (bias, nan) = if fnuz { (8, bits == 0x80) } else { (7, bits & 0x7f == 0x7f) };
    if nan {
        return f64::NAN;
    }
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let size = if exponent == 0 {
        mantissa / 8.0 * f64::from(1 - bias).exp2()
    } else {
        (1.0 + mantissa / 8.0) * f64::from(exponent - bias).exp2()
    };
    if bits >> 7 == 1 { -size } else { size }
}

/// Returns `C + A B` in f64, for `A [m, k]`, `B [k, n]` and `C [m, n]`.
pub(crate) fn product(c: &[f32], a: &[f64], b: &[f64], [n, k]: [usize; 2]) -> Vec<f64> {
    let dot = |i: usize| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum::<f64>();
    c.iter().enumerate().map(|(i, c)| f64::from(*c) + dot(i)).collect()
}

/// A source with MMA kernels, compiled and loaded for one warp size and 16-bit type.
pub(crate) struct MmaModule {
    pub(crate) module: DriverPtr,
    pub(crate) warp_size: u32,
    pub(crate) fnuz: bool,
    pub(crate) f16: bool,
}

impl MmaModule {
    /// Compiles for f16 if `half` is given, otherwise for bf16.
    fn new(gpu: &EmulatedGpu, source: &str, option: &str, half: Option<&str>) -> Self {
        let options: Vec<&str> = [option].into_iter().chain(half).collect();
        let image = gpu.try_compile(source, &options, |_, text| text.to_owned());
        let module = gpu.load(&image.unwrap_or_else(|log| panic!("{log}")));
        let wave = if option == "-DWARP_SIZE=32" { 32 } else { 64 };
        Self { module, warp_size: wave, fnuz: option.ends_with("0x942"), f16: half == Some(F16) }
    }
}

fn check(gpu: &EmulatedGpu, build: &MmaModule, name: &str, sizes: [usize; 3]) {
    assert_eq!(mismatch(gpu, build, name, sizes), None);
}

/// Runs a kernel of one warp on an `m × n × k` product and returns the first element that differs from
/// `product`. Elements are random numbers of the 16-bit type, or fp8 bits below 64.
pub(crate) fn mismatch(
    gpu: &EmulatedGpu,
    build: &MmaModule,
    name: &str,
    sizes: [usize; 3],
) -> Option<String> {
    mismatch_of_launch(gpu, build, name, sizes, LaunchShape(1, build.warp_size, 0))
}

fn mismatch_of_launch(
    gpu: &EmulatedGpu,
    build: &MmaModule,
    name: &str,
    [m, n, k]: [usize; 3],
    shape: LaunchShape,
) -> Option<String> {
    let kernel = gpu.function(build.module, name);
    let c = values(m * n);
    let (a, b, memory) = if name.starts_with("fp8") {
        let bits =
            |n: usize, step: usize| (0..n).map(|i| (i * step % 64) as u8).collect::<Vec<u8>>();
        let (a, b) = (bits(m * k, 7), bits(k * n, 11));
        let wide =
            |bits: &[u8]| bits.iter().map(|b| fp8_value(*b, build.fnuz)).collect::<Vec<f64>>();
        (wide(&a), wide(&b), [gpu.upload(&a), gpu.upload(&b)])
    } else {
        let all = values(m * k + k * n);
        let bits: Vec<u16> = all.iter().map(|v| narrow(*v, build.f16)).collect();
        let wide = |bits: &[u16]| bits.iter().map(|b| wide(*b, build.f16)).collect::<Vec<f64>>();
        let (a, b) = bits.split_at(m * k);
        (wide(a), wide(b), [gpu.upload(a), gpu.upload(b)])
    };
    let out = gpu.upload(&c);
    gpu.launch(
        kernel,
        shape,
        &[KernelArg::At(out), KernelArg::At(memory[0]), KernelArg::At(memory[1])],
    );
    let got = gpu.download::<f32>(out);
    let wrong = got.iter().zip(product(&c, &a, &b, [n, k])).find(|(got, want)| {
        let near = (f64::from(**got) - want).abs() <= 1e-5 * (1.0 + want.abs());
        !near // Also for NaN.
    });
    wrong.map(|(got, want)| format!("{name}: {got} for {want}"))
}

#[test]
fn tiles_are_right_in_the_layouts_of_both_vendors() {
    let gpu = EmulatedGpu::open();
    let halves = [None, Some(F16)];
    for (wave, half) in
        ["-DWARP_SIZE=64", "-DWARP_SIZE=32"].into_iter().flat_map(|w| halves.map(|h| (w, h)))
    {
        let build = MmaModule::new(&gpu, MATRIX, wave, half);
        check(&gpu, &build, "tile_16x16x16", [16, 16, 16]);
        check(&gpu, &build, "tile_loads", [16, 16, 16]);
    }
}

#[test]
fn wgmma_is_right_for_every_operand_layout() {
    let gpu = EmulatedGpu::open();
    for half in [None, Some(F16)] {
        let build = MmaModule::new(&gpu, WGMMA, "-DWARP_SIZE=32", half);
        for n in [64, 128, 256] {
            let shared_bytes = 64 * 128 + 2 * n * 128 + 1024;
            let shape = LaunchShape(1, 128, shared_bytes as u32);
            let name = format!("wgmma_{n}");
            assert_eq!(mismatch_of_launch(&gpu, &build, &name, [64, n, 64], shape), None);
        }
    }
}

#[test]
fn the_matrix_builtins_of_amd_are_right() {
    let gpu = EmulatedGpu::open();
    for half in [None, Some(F16)] {
        let gfx942 = MmaModule::new(&gpu, MATRIX, "-DDEV_EMU_GFX=0x942", half);
        let gfx950 = MmaModule::new(&gpu, MATRIX, "-DDEV_EMU_GFX=0x950", half);
        check(&gpu, &gfx942, "half_32x32x8", [32, 32, 8]);
        check(&gpu, &gfx950, "half_16x16x32", [16, 16, 32]);
        check(&gpu, &gfx950, "half_32x32x16", [32, 32, 16]);
    }
    let gfx942 = MmaModule::new(&gpu, MATRIX, "-DDEV_EMU_GFX=0x942", None);
    let gfx950 = MmaModule::new(&gpu, MATRIX, "-DDEV_EMU_GFX=0x950", None);
    check(&gpu, &gfx942, "fp8_16x16x32", [16, 16, 32]);
    check(&gpu, &gfx942, "fp8_32x32x16", [32, 32, 16]);
    check(&gpu, &gfx950, "fp8_16x16x32", [16, 16, 32]);
}

/// Returns the nearest fp8 number to `x`, ties to even mantissas, saturating.
fn nearest_fp8(x: f32, fnuz: bool) -> u8 {
    let x = f64::from(x);
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let size = x.abs().min(1e6); // With infinities all distances would be equal.
    let distance = |bits: &u8| (fp8_value(*bits, fnuz) - size).abs();
    let last = if fnuz { 0x7f } else { 0x7e };
    let best =
        (0..=last).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    let bits = best.unwrap();
    if fnuz && bits == 0 { 0 } else { bits | sign }
}

/// Runs `fp8_numbers` and returns the first conversion that differs from the conversion on the CPU.
pub(crate) fn fp8_mismatch(gpu: &EmulatedGpu, kernel: DriverPtr, fnuz: bool) -> Option<String> {
    let mut x: Vec<f32> = values(3000).iter().map(|v| (v * 24.0).exp2() * v.signum()).collect();
    // Tests every fp8 number, the midpoints of adjacent numbers, and values beyond the largest.
    let numbers: Vec<f32> =
        (0..=255).map(|b| fp8_value(b, fnuz) as f32).filter(|v| !v.is_nan()).collect();
    x.extend(numbers.windows(2).map(|w| f32::midpoint(w[0], w[1])));
    x.extend(&numbers);
    x.extend([0.0, 1e-30, 1e9, -1e9, f32::INFINITY, f32::NEG_INFINITY]);
    let (wide, narrow) = (gpu.alloc(4 * 256), gpu.alloc(4 * x.len()));
    let args = [
        KernelArg::At(wide),
        KernelArg::At(narrow),
        KernelArg::At(gpu.upload(&x)),
        KernelArg::U32(x.len() as u32),
    ];
    gpu.launch(kernel, LaunchShape(1, 256, 0), &args);
    for (bits, got) in (0..=255).zip(gpu.download::<f32>(wide)) {
        let want = fp8_value(bits, fnuz);
        if f64::from(got) != want && !(got.is_nan() && want.is_nan()) {
            return Some(format!("{bits}: {got} for {want}"));
        }
    }
    let narrowed = gpu.download::<u32>(narrow);
    let wrong = x.iter().zip(narrowed).find(|(x, got)| *got as u8 != nearest_fp8(**x, fnuz));
    wrong.map(|(x, got)| format!("{x} in fp8 is {got:#x}, fnuz: {fnuz}"))
}

#[test]
fn fp8_reads_and_rounds_in_both_dialects() {
    let gpu = EmulatedGpu::open();
    for (option, fnuz) in [("-DFP8_FNUZ=0", false), ("-DFP8_FNUZ=1", true)] {
        let kernel = gpu.kernel(MATRIX, &[option], "fp8_numbers");
        assert_eq!(fp8_mismatch(&gpu, kernel, fnuz), None);
    }
}
