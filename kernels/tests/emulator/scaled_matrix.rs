//! Products of fp8 and fp4 with a scale per 32 elements (gfx950), in the register layout that AMD's Composable
//! Kernel tests on hardware.

use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};
use crate::machine_code::MachineCodeGpu;
use crate::machine_code_faults::edit_disassembly;
use crate::matrix::{fp8_value, product};

const SOURCE: &str = include_str!("kernels/scaled_matrix.hip");
const SIDE: usize = 16;
const K: usize = 128;
const LANES: usize = 64;

/// Element format of the operands of a block-scaled matrix product.
#[derive(Clone, Copy, PartialEq)]
enum NarrowFloatFormat {
    Fp8,
    Fp4,
}

impl NarrowFloatFormat {
    fn bits(self) -> usize {
        if self == Self::Fp8 { 8 } else { 4 }
    }

    fn value(self, code: u8) -> f64 {
        let sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        match self {
            Self::Fp8 => fp8_value(code, false),
            Self::Fp4 if code < 8 => sizes[usize::from(code)],
            Self::Fp4 => -sizes[usize::from(code - 8)],
        }
    }

    /// Returns the K index of element `i` of a lane. In fp8 a lane has two ranges of 16 consecutive K
    /// indices; in fp4 it has one range of 32.
    fn k(self, lane: usize, i: usize) -> usize {
        match self {
            Self::Fp8 => i / 16 * 64 + lane / SIDE * 16 + i % 16,
            Self::Fp4 => lane / SIDE * 32 + i,
        }
    }
}

/// Operand A or B of a block-scaled matrix product: 16 lines (rows of A or columns of B) of 128 encoded
/// elements, with a scale byte for each block of 32 elements of a line.
struct ScaledOperand {
    format: NarrowFloatFormat,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl ScaledOperand {
    fn new(format: NarrowFloatFormat, step: usize) -> Self {
        let range = if format == NarrowFloatFormat::Fp8 { 0x50 } else { 16 };
        let codes = (0..SIDE * K).map(|i| (i * step % range) as u8).collect();
        let scales = (0..SIDE * K / 32).map(|i| (124 + i * step % 7) as u8).collect();
        Self { format, codes, scales }
    }

    /// Returns the value of element `k` of a line (a row of A or a column of B), multiplied by its block
    /// scale.
    fn value(&self, line: usize, k: usize) -> f64 {
        let scale = f64::from(self.scales[line * 4 + k / 32]) - 127.0;
        self.format.value(self.codes[line * K + k]) * scale.exp2()
    }

    /// Returns the operand registers of all lanes, eight 32-bit words per lane; fp4 uses four of them.
    fn words(&self) -> Vec<u32> {
        let mut words = vec![0; LANES * 8];
        for (lane, i) in (0..LANES).flat_map(|lane| (0..32).map(move |i| (lane, i))) {
            let code = u32::from(self.codes[lane % SIDE * K + self.format.k(lane, i)]);
            let bit = i * self.format.bits();
            words[lane * 8 + bit / 32] |= code << (bit % 32);
        }
        words
    }

    /// Returns the scale register of each lane (32 bits), with the scale in byte `byte` and unrelated values
    /// in the other bytes.
    fn scale_words(&self, byte: usize) -> Vec<u32> {
        let word = |lane: usize| {
            let scale = self.scales[lane % SIDE * 4 + lane / SIDE];
            let mut bytes = [120, 121, 122, 119];
            bytes[byte] = scale;
            u32::from_le_bytes(bytes)
        };
        (0..LANES).map(word).collect()
    }
}

/// Runs a kernel of `scaled_matrix.hip` and returns the first element that is wrong.
fn mismatch(gpu: &EmulatedGpu, image: &[u8], format: NarrowFloatFormat) -> Option<String> {
    let name = if format == NarrowFloatFormat::Fp8 { "scaled_fp8" } else { "scaled_fp4" };
    let (a, b) = (ScaledOperand::new(format, 7), ScaledOperand::new(format, 5));
    let c: Vec<f32> = (0..SIDE * SIDE).map(|i| i as f32).collect();
    let scales = [a.scale_words(2), b.scale_words(0)].concat();
    let out = gpu.upload(&c);
    let args = [out, gpu.upload(&a.words()), gpu.upload(&b.words()), gpu.upload(&scales)];
    let kernel = gpu.function(gpu.load(image), name);
    gpu.launch(kernel, LaunchShape(1, 64, 0), &args.map(KernelArg::At));
    let rows: Vec<f64> = (0..SIDE * K).map(|i| a.value(i / K, i % K)).collect();
    let columns: Vec<f64> = (0..K * SIDE).map(|i| b.value(i % SIDE, i / SIDE)).collect();
    let got = gpu.download::<f32>(out);
    let wrong = got.iter().zip(product(&c, &rows, &columns, [SIDE, K])).find(|(got, want)| {
        let near = (f64::from(**got) - want).abs() <= 1e-5 * (1.0 + want.abs());
        !near // Also for NaN.
    });
    wrong.map(|(got, want)| format!("{name}: {got} for {want}"))
}

#[test]
fn scaled_products_agree_with_the_cpu() {
    let gpu = MachineCodeGpu::open(0x950);
    let image = gpu.image(SOURCE, &[]);
    for format in [NarrowFloatFormat::Fp8, NarrowFloatFormat::Fp4] {
        assert_eq!(mismatch(&gpu, &image, format), None);
    }
}

#[test]
fn a_wrong_scale_byte_is_caught() {
    let gpu = MachineCodeGpu::open(0x950);
    let image = gpu.image(SOURCE, &[]);
    for (index, format) in [NarrowFloatFormat::Fp8, NarrowFloatFormat::Fp4].into_iter().enumerate()
    {
        let edited = edit_disassembly(&image, "op_sel_hi:[1,0,0]", "op_sel_hi:[0,0,0]", index);
        assert!(mismatch(&gpu, &edited, format).is_some());
    }
}
