//! Faults injected into machine code, its disassembly or the headers of kernels. Each fault must be detected,
//! and the same kernel without the fault must give correct results.

use crate::gpu::EmulatedGpu;
use crate::injected_bugs::{FIRST_BARRIER, LAST_BARRIER, ROWS, inject_bug, sums_error};
use crate::machine_code::{ARCHITECTURES, MachineCodeGpu, products_are_right};
use crate::matrix::{MATRIX, MmaModule, fp8_mismatch, mismatch};

/// Replaces occurrence `index` of `from` in the disassembly of an image by `to`, padded with spaces.
pub(crate) fn edit_disassembly(image: &[u8], from: &str, to: &str, index: usize) -> Vec<u8> {
    let mut image = image.to_vec();
    let found: Vec<usize> = image
        .windows(from.len())
        .enumerate()
        .filter_map(|(i, window)| (window == from.as_bytes()).then_some(i))
        .collect();
    let at = *found.get(index).unwrap_or_else(|| panic!("{} occurrences of {from}", found.len()));
    assert!(to.len() <= from.len(), "{to} is longer than {from}");
    image[at..at + from.len()].fill(b' ');
    image[at..at + to.len()].copy_from_slice(to.as_bytes());
    image
}

/// Returns the number of occurrences of `text` in an image.
fn occurrences(image: &[u8], text: &str) -> usize {
    image.windows(text.len()).filter(|window| *window == text.as_bytes()).count()
}

/// Runs `product` with an edited disassembly. Returns the failure of the launch.
fn product_failure(gfx: u32, from: &str, to: &str, index: usize) -> String {
    let gpu = MachineCodeGpu::open(gfx);
    let source = product_alone();
    let image = gpu.image(&source, &[]);
    assert!(products_are_right(&gpu, gpu.function(gpu.load(&image), "product")));
    let module = gpu.load(&edit_disassembly(&image, from, to, index));
    assert!(!products_are_right(&gpu, gpu.function(module, "product")));
    let failure = gpu.last_failure();
    assert!(failure.contains("kernel product, workgroup (0,0,0), wave "), "{failure}");
    failure
}

/// Source of the kernel `product` only, so that its disassembly has no instruction of another kernel.
fn product_alone() -> String {
    let start = ROWS.find("// y = a * b").unwrap();
    let end = start + ROWS[start..].find("EXPORT(product)").unwrap();
    format!("#include \"dev.h\"\n{}", &ROWS[start..end])
}

#[test]
fn a_missing_wait_for_a_load_is_caught() {
    for gfx in ARCHITECTURES {
        let failure = product_failure(gfx, "s_waitcnt vmcnt(0)", "s_nop 0", 0);
        assert!(failure.contains("s_waitcnt vmcnt is missing or too weak"), "{failure}");
        assert!(failure.contains("v_mul_f32"), "{failure}");
    }
}

#[test]
fn a_wait_for_too_few_loads_is_caught() {
    for gfx in ARCHITECTURES {
        let failure = product_failure(gfx, "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", 0);
        assert!(failure.contains("s_waitcnt vmcnt is missing or too weak"), "{failure}");
    }
}

#[test]
fn a_missing_wait_for_scalar_loads_is_caught() {
    for gfx in ARCHITECTURES {
        for to in ["s_nop 0", "s_waitcnt lgkmcnt(1)"] {
            let failure = product_failure(gfx, "s_waitcnt lgkmcnt(0)", to, 0);
            assert!(failure.contains("reads s"), "{failure}");
            assert!(failure.contains("s_waitcnt lgkmcnt is missing or too weak"), "{failure}");
        }
    }
}

#[test]
fn a_wrong_mask_at_the_tail_is_caught() {
    for gfx in ARCHITECTURES {
        let failure = product_failure(gfx, "s_and_saveexec_b64", "s_or_saveexec_b64", 0);
        assert!(failure.contains("outside of all allocations"), "{failure}");
    }
}

#[test]
fn an_unknown_instruction_is_named() {
    for gfx in ARCHITECTURES {
        let failure = product_failure(gfx, "v_mul_f32_e32", "v_mux_f32_e32", 0);
        assert!(failure.contains("v_mux_f32_e32") && failure.contains("unknown"), "{failure}");
    }
}

#[test]
fn a_wrong_row_mask_of_dpp_is_caught() {
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        let image = gpu.image(ROWS, &[]);
        let masks = occurrences(&image, "row_mask:0xf");
        let wrong = (0..masks).filter(|index| {
            let edited = edit_disassembly(&image, "row_mask:0xf", "row_mask:0x7", *index);
            sums_error(&gpu, gpu.function(gpu.load(&edited), "sums_twice")) > 1e-3
        });
        assert!(sums_error(&gpu, gpu.function(gpu.load(&image), "sums_twice")) < 1e-3);
        // Each of the two reductions has four exchanges by DPP.
        assert!(masks >= 8 && wrong.count() >= 8);
    }
}

/// Runs `sums_twice` in an image and returns the failure of the launch.
fn sums_failure(gpu: &MachineCodeGpu, image: &[u8]) -> String {
    let kernel = gpu.function(gpu.load(image), "sums_twice");
    let result = std::panic::catch_unwind(|| sums_error(gpu, kernel));
    assert!(result.is_err(), "the launch succeeds");
    gpu.last_failure()
}

#[test]
fn a_race_in_lds_is_caught() {
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        for bug in [(FIRST_BARRIER, "    T r = parts[0];"), (LAST_BARRIER, "")] {
            for seed in 0..4 {
                gpu.clear_failure();
                gpu.seed(seed);
                let image = gpu.try_compile(ROWS, &[], |name, text| match name {
                    "dev/collective.h" => inject_bug(text, bug.0, bug.1),
                    _ => text.to_owned(),
                });
                let failure = sums_failure(&gpu, &image.unwrap());
                assert!(failure.contains("LDS race: wave "), "seed {seed}: {failure}");
            }
        }
    }
}

#[test]
fn a_barrier_that_does_not_wait_for_lds_is_caught() {
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        let image = gpu.image(ROWS, &[]);
        let failures = (0..occurrences(&image, "s_waitcnt lgkmcnt(0)")).filter(|index| {
            gpu.clear_failure();
            let edited = edit_disassembly(&image, "s_waitcnt lgkmcnt(0)", "s_nop 0", *index);
            let kernel = gpu.function(gpu.load(&edited), "sums_twice");
            std::panic::catch_unwind(|| sums_error(&gpu, kernel)).is_err()
                && gpu.last_failure().contains("LDS accesses are in flight at the barrier")
        });
        assert!(failures.count() >= 2);
    }
}

/// Returns the mismatches of an MMA kernel with edited headers: as machine code, and on the SIMT emulator.
fn layout_mismatches(
    gpu: &MachineCodeGpu,
    edit: impl Fn(&str, &str) -> String,
    kernel: &str,
    sizes: [usize; 3],
) -> [Option<String>; 2] {
    let image = gpu.try_compile(MATRIX, &[], &edit).unwrap();
    let machine_code = mismatch(gpu, &gpu.mma_module(&image, false), kernel, sizes);
    let simt = EmulatedGpu::open();
    let image = simt.try_compile(MATRIX, &["-DDEV_EMU_GFX=0x950"], &edit).unwrap();
    let build = MmaModule { module: simt.load(&image), warp_size: 64, fnuz: false, f16: false };
    [machine_code, mismatch(&simt, &build, kernel, sizes)]
}

#[test]
fn exchanged_rows_and_columns_of_a_layout_are_caught() {
    let exchange = |name: &str, text: &str| match name {
        "dev/matrix.h" => {
            let text = inject_bug(
                text,
                "c_row(u32 i) { return (lane() >> 4) * 4 + i; }",
                "c_row(u32) { return lane() & 15; }",
            );
            inject_bug(
                &text,
                "c_col(u32) { return lane() & 15; }",
                "c_col(u32 i) { return (lane() >> 4) * 4 + i; }",
            )
        }
        _ => text.to_owned(),
    };
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        let sizes = [16, 16, 16];
        let [found, simt] = layout_mismatches(&gpu, exchange, "tile_16x16x16", sizes);
        assert!(found.is_some(), "gfx{gfx:x}");
        assert_eq!(simt, None, "the SIMT emulator multiplies by the layout of the kernel");
    }
}

#[test]
fn a_half_rate_layout_for_a_full_rate_product_is_caught() {
    // Arranges A for two 16x16x16 products, in which the elements of a lane have other k indices than in one
    // 16x16x32 product.
    let half_rate = |name: &str, text: &str| match name {
        "dev/mfma.h" => inject_bug(
            text,
            "a_k(u32 i) { return lane() / SIDE * PER_LANE + i; }",
            "a_k(u32 i) { return i / 4 * 16 + lane() / SIDE * 4 + i % 4; }",
        ),
        _ => text.to_owned(),
    };
    let gpu = MachineCodeGpu::open(0x950);
    let [found, simt] = layout_mismatches(&gpu, half_rate, "half_16x16x32", [16, 16, 32]);
    assert!(found.is_some());
    assert_eq!(simt, None, "the SIMT emulator multiplies by the layout of the kernel");
}

#[test]
fn the_fp8_format_of_the_other_architecture_is_caught() {
    for (gfx, option) in [(0x942, "-DFP8_FNUZ=0"), (0x950, "-DFP8_FNUZ=1")] {
        let gpu = MachineCodeGpu::open(gfx);
        let kernel = gpu.kernel(MATRIX, &[option], "fp8_numbers");
        assert!(fp8_mismatch(&gpu, kernel, gfx == 0x942).is_some(), "gfx{gfx:x}");
    }
}
