//! Activations quantised with power-of-two scales (`scale_fmt` "ue8m0"), compared with the bytes and scales of torch in
//! `tests/data/ue8m0.bin`, which `tests/golden/activation_scales.py` writes.

use device::{DType, DeviceDriver, Fp8E4m3, bf16};
use kernels::{ActivationScaling, HostMat, Linear};

use crate::device_pair::{CpuGpuPair, pairs};
use crate::support::S;

const ROWS: usize = 24;
const COLS: usize = 256;
/// Number of values with a common scale.
const GROUP: usize = 128;

/// Inputs `[ROWS, COLS]`, their fp8 bytes, and the scale of each group, as torch computes them.
struct ReferenceActivations {
    x: Vec<bf16>,
    bytes: Vec<u8>,
    scales: Vec<f32>,
}

impl ReferenceActivations {
    fn read() -> Self {
        let file = include_bytes!("../data/ue8m0.bin");
        let (x, rest) = file.split_at(ROWS * COLS * 2);
        let (bytes, scales) = rest.split_at(ROWS * COLS);
        Self {
            x: x.as_chunks::<2>().0.iter().map(|word| bf16::from_le_bytes(*word)).collect(),
            bytes: bytes.to_vec(),
            scales: scales
                .as_chunks::<4>()
                .0
                .iter()
                .map(|word| f32::from_le_bytes(*word))
                .collect(),
        }
    }

    /// The values that the bytes and scales represent.
    fn dequantized(&self) -> Vec<f32> {
        let value = |i: usize| Fp8E4m3::from_bits(self.bytes[i]).to_f32() * self.scales[i / GROUP];
        (0..ROWS * COLS).map(value).collect()
    }
}

#[test]
fn power_of_two_scales_and_bytes_are_those_of_torch() {
    let expected = ReferenceActivations::read();
    let groups = expected.x.chunks(GROUP).zip(expected.bytes.chunks(GROUP));
    for (group, (x, bytes)) in groups.enumerate() {
        let peak = x.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
        let scale = ActivationScaling::PowerOfTwo.scale(peak);
        assert_eq!(scale, expected.scales[group], "group {group}, peak {peak}");
        let quantized = x.iter().map(|x| Fp8E4m3::from_f32(x.to_f32() / scale).to_bits());
        assert!(quantized.eq(bytes.iter().copied()), "group {group}");
    }
}

/// The product with the identity matrix is the quantised input, exactly: a value of fp8 times a power of two.
#[test]
fn power_of_two_inputs_of_fp8_gemms_are_those_of_torch() {
    for pair in &pairs() {
        if pair.gpu.half_dtype() == DType::BF16 {
            check_identity(pair);
        }
    }
}

fn check_identity(pair: &CpuGpuPair) {
    let expected = ReferenceActivations::read();
    let mut identity = vec![0; COLS * COLS];
    for i in 0..COLS {
        identity[i * COLS + i] = Fp8E4m3::from_f32(1.0).to_bits();
    }
    let scales = [1.0; (COLS / GROUP) * (COLS / GROUP)];
    let weight = HostMat::new(&identity, DType::F8E4M3, COLS, COLS).unwrap();
    let weight = weight.scaled(&scales, [GROUP, GROUP]).unwrap();
    let weight = weight.with_activation_scaling(ActivationScaling::PowerOfTwo);
    let weight = pair.gpu.pack(&[weight], pair.gpu.half_dtype()).unwrap();
    let x = pair.put(&expected.x, ROWS, COLS);
    let mut y = pair.poisoned(DType::BF16, ROWS, COLS);
    let op = Linear { y: y.gpu_mut(), x: x.gpu(), weight: &weight, bias: None };
    pair.gpu.launch(&S, op).unwrap();
    let y: Vec<f32> = pair.read::<bf16>(&y)[0].iter().map(|y| y.to_f32()).collect();
    assert_eq!(y, expected.dequantized(), "{}", pair.gpu.name());
}
