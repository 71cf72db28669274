//! Single instructions of emulated machine code against their definitions, with operands at the edges of their
//! ranges.

use half::f16;

use crate::gpu::{KernelArg, LaunchShape};
use crate::machine_code::{ARCHITECTURES, MachineCodeGpu};

const LANES: usize = 64;

/// An instruction with up to three vector operands, and its result for the bits of these operands.
struct VectorInstruction {
    name: &'static str,
    operands: usize,
    result: fn([u32; 3]) -> u32,
}

const fn op(name: &'static str, operands: usize, result: fn([u32; 3]) -> u32) -> VectorInstruction {
    VectorInstruction { name, operands, result }
}

fn float(bits: u32) -> f32 {
    f32::from_bits(bits)
}

/// Returns the value of the lower (0) or upper (1) f16 of a register.
fn half(bits: u32, index: u32) -> f64 {
    f16::from_bits((bits >> (16 * index)) as u16).to_f64()
}

fn half_bits(value: f64) -> u32 {
    u32::from(f16::from_f64(value).to_bits())
}

/// Returns f16 bits rounded toward zero; finite numbers stay finite.
fn truncated_half(value: f32) -> u32 {
    let nearest = f16::from_f32(value);
    let too_large = f32::from(nearest).abs() > value.abs();
    u32::from(nearest.to_bits() - u16::from(too_large))
}

/// Expected result of V_PERM_B32. Each byte of z selects a result byte: 0-7 selects that byte of {x, y}, 8-11
/// the replicated sign bit of 16-bit word 0-3, 12 selects 0x00, above 12 selects 0xff.
fn permuted([x, y, z]: [u32; 3]) -> u32 {
    let bytes = [y.to_le_bytes(), x.to_le_bytes()].concat();
    let select = |s: u8| match s {
        0..=7 => bytes[usize::from(s)],
        8..=11 => 0u8.wrapping_sub(bytes[usize::from(s - 8) * 2 + 1] >> 7),
        12 => 0,
        _ => 0xff,
    };
    u32::from_le_bytes(z.to_le_bytes().map(select))
}

fn halves(f: impl Fn(u32) -> u32) -> u32 {
    f(0) & 0xffff | f(1) << 16
}

fn signed_24(x: u32) -> i32 {
    (x << 8) as i32 >> 8
}

const INSTRUCTIONS: &[VectorInstruction] = &[
    op("v_add_u32_e32", 2, |[x, y, _]| x.wrapping_add(y)),
    op("v_subrev_u32_e32", 2, |[x, y, _]| y.wrapping_sub(x)),
    op("v_mul_hi_u32", 2, |[x, y, _]| ((u64::from(x) * u64::from(y)) >> 32) as u32),
    op("v_mul_hi_i32", 2, |[x, y, _]| ((i64::from(x as i32) * i64::from(y as i32)) >> 32) as u32),
    op("v_mad_u32_u24", 3, |[x, y, z]| (x & 0xff_ffff).wrapping_mul(y & 0xff_ffff).wrapping_add(z)),
    op("v_mul_i32_i24_e32", 2, |[x, y, _]| signed_24(x).wrapping_mul(signed_24(y)) as u32),
    op("v_lshrrev_b32_e32", 2, |[x, y, _]| y >> (x & 31)),
    op("v_ashrrev_i32_e32", 2, |[x, y, _]| (y as i32 >> (x & 31)) as u32),
    op("v_bfe_u32", 3, |[x, y, z]| x >> (y & 31) & ((1 << (z & 31)) - 1)),
    op("v_bfi_b32", 3, |[x, y, z]| x & y | !x & z),
    op("v_perm_b32", 3, permuted),
    op("v_alignbit_b32", 3, |[x, y, z]| ((u64::from(x) << 32 | u64::from(y)) >> (z & 31)) as u32),
    op("v_xad_u32", 3, |[x, y, z]| (x ^ y).wrapping_add(z)),
    op("v_lshl_add_u32", 3, |[x, y, z]| (x << (y & 31)).wrapping_add(z)),
    op("v_and_or_b32", 3, |[x, y, z]| x & y | z),
    op("v_med3_i32", 3, |bits| {
        let mut sorted = bits.map(|x| x as i32);
        sorted.sort_unstable();
        sorted[1] as u32
    }),
    op("v_ffbh_u32_e32", 1, |[x, _, _]| if x == 0 { !0 } else { x.leading_zeros() }),
    op("v_bfrev_b32_e32", 1, |[x, _, _]| x.reverse_bits()),
    op("v_bcnt_u32_b32", 2, |[x, y, _]| x.count_ones().wrapping_add(y)),
    op("v_cvt_f32_u32_e32", 1, |[x, _, _]| (x as f32).to_bits()),
    op("v_cvt_u32_f32_e32", 1, |[x, _, _]| float(x) as u32),
    op("v_cvt_i32_f32_e32", 1, |[x, _, _]| (float(x) as i32) as u32),
    op("v_fma_f32", 3, |[x, y, z]| float(x).mul_add(float(y), float(z)).to_bits()),
    op("v_max_f32_e32", 2, |[x, y, _]| float(x).max(float(y)).to_bits()),
    op("v_rndne_f32_e32", 1, |[x, _, _]| float(x).round_ties_even().to_bits()),
    op("v_cvt_f16_f32_e32", 1, |[x, _, _]| u32::from(f16::from_f32(float(x)).to_bits())),
    op("v_cvt_f32_f16_e32", 1, |[x, _, _]| (half(x, 0) as f32).to_bits()),
    op("v_cvt_pkrtz_f16_f32", 2, |[x, y, _]| {
        truncated_half(float(x)) | truncated_half(float(y)) << 16
    }),
    op("v_add_f16_e32", 2, |[x, y, _]| half_bits(half(x, 0) + half(y, 0))),
    op("v_pk_mul_f16", 2, |[x, y, _]| halves(|i| half_bits(half(x, i) * half(y, i)))),
    op("v_pk_add_u16", 2, |[x, y, _]| halves(|i| (x >> (16 * i)).wrapping_add(y >> (16 * i)))),
    op("v_pack_b32_f16", 2, |[x, y, _]| x & 0xffff | y << 16),
];

/// Returns operands that differ by lane: edge cases of integers, f32 and f16, and arbitrary bits.
fn operand(seed: u32) -> Vec<u32> {
    let edges = [
        0,
        1,
        !0,
        0x8000_0000,
        0x7fff_ffff,
        0x3f80_0000,
        0xbf00_0000,
        0x3c00_3c01,
        0x0001_8400,
        0x4f7f_ffff,
        0x477f_e000,
        0x3880_0000,
        0x33ff_ffff,
        0x0c0d_0804,
        0x0b0a_0901,
        0x42f6_e979,
    ];
    let bits = |lane: usize| {
        let mixed = (lane as u32 * 7 + seed).wrapping_mul(0x9e37_79b9);
        // Floats of moderate size, so that sums and products are finite.
        if lane.is_multiple_of(3) { 0x3800_0000 | mixed >> 4 & 0x87ff_ffff } else { mixed }
    };
    (0..LANES)
        .map(|lane| *edges.get((lane * 5 + seed as usize) % 48).unwrap_or(&bits(lane)))
        .collect()
}

/// Returns whether a result of the instruction `name` is right. NaN results may have different bits.
fn is_right(name: &str, got: u32, want: u32) -> bool {
    let is_nan = |bits: u32| float(bits).is_nan();
    let has_nan = |bits: u32| half(bits, 0).is_nan() || half(bits, 1).is_nan();
    let same_nan = match name {
        _ if name.contains("_f16") => has_nan(got) && has_nan(want),
        _ => name.contains("_f32") && is_nan(got) && is_nan(want),
    };
    got == want || same_nan
}

#[test]
fn vector_instructions_have_their_results() {
    let statement = |(i, instruction): (usize, &VectorInstruction)| {
        let sources = &", %1, %2, %3"[..4 * instruction.operands];
        format!(
            "    asm volatile(\"{} %0{sources}\" : \"=v\"(r) : \"v\"(x), \"v\"(y), \"v\"(z));\n    \
             out[{i} * 64 + tid()] = r;\n",
            instruction.name
        )
    };
    let body: String = INSTRUCTIONS.iter().enumerate().map(statement).collect();
    let source = format!(
        "#include \"dev.h\"\nKERNEL(64) all(u32* out, const u32* in) {{\n    \
         u32 r, x = in[tid()], y = in[64 + tid()], z = in[128 + tid()];\n{body}}}\n"
    );
    let operands = [1, 11, 23].map(operand);
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        let out = gpu.alloc(4 * LANES * INSTRUCTIONS.len());
        let args = [out, gpu.upload(&operands.concat())].map(KernelArg::At);
        let kernel = gpu.kernel(&source, &[], "all");
        gpu.launch(kernel, LaunchShape(1, 64, 0), &args);
        let results = gpu.download::<u32>(out);
        for (instruction, got) in INSTRUCTIONS.iter().zip(results.chunks(LANES)) {
            for (lane, got) in got.iter().enumerate() {
                let bits = [0, 1, 2].map(|i| operands[i][lane]);
                let want = (instruction.result)(bits);
                let name = instruction.name;
                assert!(is_right(name, *got, want), "{name} of {bits:x?}: {got:x} for {want:x}");
            }
        }
    }
}

/// A DPP control, and the lane that each lane reads; `None` keeps the destination.
struct DppControl {
    text: &'static str,
    source: fn(usize) -> Option<usize>,
}

const CONTROLS: &[DppControl] = &[
    DppControl { text: "quad_perm:[3,1,0,2]", source: |l| Some(l / 4 * 4 + [3, 1, 0, 2][l % 4]) },
    DppControl { text: "row_mirror", source: |l| Some(l / 16 * 16 + 15 - l % 16) },
    DppControl { text: "row_half_mirror", source: |l| Some(l / 8 * 8 + 7 - l % 8) },
    DppControl { text: "row_ror:5", source: |l| Some(l / 16 * 16 + (l + 11) % 16) },
    DppControl { text: "row_shr:3", source: |l| (l % 16 >= 3).then(|| l - 3) },
    DppControl { text: "row_shl:2", source: |l| (l % 16 < 14).then(|| l + 2) },
    DppControl { text: "row_bcast:15", source: |l| (l >= 16).then(|| l / 16 * 16 - 1) },
    DppControl { text: "row_bcast:31", source: |l| (l >= 32).then_some(31) },
];

#[test]
fn dpp_reads_the_lane_of_its_control() {
    // The row mask disables the DPP rows (groups of 16 lanes) 1 and 3.
    let statement = |(i, control): (usize, &DppControl)| {
        format!(
            "    r = 1000;\n    asm volatile(\"s_nop 1\\n v_mov_b32_dpp %0, %1 {} row_mask:0x5 \
             bank_mask:0xf\" : \"+v\"(r) : \"v\"(x));\n    out[{i} * 64 + tid()] = r;\n",
            control.text
        )
    };
    let body: String = CONTROLS.iter().enumerate().map(statement).collect();
    let source = format!(
        "#include \"dev.h\"\nKERNEL(64) all(u32* out) {{\n    u32 r, x = tid();\n{body}}}\n"
    );
    let gpu = MachineCodeGpu::open(0x942);
    let out = gpu.alloc(4 * LANES * CONTROLS.len());
    let kernel = gpu.kernel(&source, &[], "all");
    gpu.launch(kernel, LaunchShape(1, 64, 0), &[KernelArg::At(out)]);
    for (control, got) in CONTROLS.iter().zip(gpu.download::<u32>(out).chunks(LANES)) {
        let want: Vec<u32> = (0..LANES)
            .map(|lane| {
                (control.source)(lane).filter(|_| lane / 16 % 2 == 0).unwrap_or(1000) as u32
            })
            .collect();
        assert_eq!(got, want, "{}", control.text);
    }
}
