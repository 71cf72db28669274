//! Kernels compiled to machine code of gfx942 and gfx950, and emulated instruction by instruction: correct
//! kernels give correct results in every order of wavefronts.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_runtime_sys::DriverPtr;

use crate::correct_kernels::values;
use crate::emulated_gpu;
use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};
use crate::injected_bugs::{ROWS, sums_error};
use crate::matrix::{F16, MATRIX, MmaModule, fp8_mismatch, mismatch};

pub(crate) const ARCHITECTURES: [u32; 2] = [0x942, 0x950];

/// An emulated GPU that runs machine code. Only one test uses it at a time, because a failed launch makes the
/// device unusable.
pub(crate) struct MachineCodeGpu {
    gpu: EmulatedGpu,
    gfx: u32,
    _lock: MutexGuard<'static, ()>,
}

impl Deref for MachineCodeGpu {
    type Target = EmulatedGpu;
    fn deref(&self) -> &EmulatedGpu {
        &self.gpu
    }
}

impl MachineCodeGpu {
    /// Opens the GPU of an architecture, for example 0x942.
    pub(crate) fn open(gfx: u32) -> Self {
        static LOCK: Mutex<()> = Mutex::new(());
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let gpu = EmulatedGpu::open_library(&emulated_gpu::library_of("machine-code"));
        gpu.use_machine_code(gfx);
        gpu.clear_failure();
        gpu.seed(0);
        Self { gpu, gfx, _lock: lock }
    }

    /// Compiles a source.
    pub(crate) fn image(&self, source: &str, options: &[&str]) -> Vec<u8> {
        let image = self.try_compile(source, options, |_, text| text.to_owned());
        image.unwrap_or_else(|log| panic!("{log}"))
    }

    /// Returns the MMA kernels of a compiled image.
    pub(crate) fn mma_module(&self, image: &[u8], f16: bool) -> MmaModule {
        MmaModule { module: self.load(image), warp_size: 64, fnuz: self.gfx == 0x942, f16 }
    }
}

/// Length of the arrays of `product`: not a multiple of 64.
pub(crate) const PRODUCTS: usize = 100;

/// Launches `product` for `PRODUCTS` elements and returns whether the launch succeeded and all products are
/// right.
pub(crate) fn products_are_right(gpu: &EmulatedGpu, kernel: DriverPtr) -> bool {
    let (a, b) = (values(PRODUCTS), values(2 * PRODUCTS).split_off(PRODUCTS));
    let y = gpu.alloc(4 * PRODUCTS);
    let args = [y, gpu.upload(&a), gpu.upload(&b)].map(KernelArg::At);
    let args = [args.as_slice(), &[KernelArg::U32(PRODUCTS as u32)]].concat();
    if gpu.try_launch(kernel, LaunchShape(1, 128, 0), &args) != 0 {
        return false;
    }
    let got = gpu.download::<f32>(y);
    got.iter().zip(a.iter().zip(&b)).all(|(y, (a, b))| *y == a * b)
}

#[test]
fn rows_are_right_in_every_order_of_wavefronts() {
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        let module = gpu.load(&gpu.image(ROWS, &[]));
        let [sums, product] = ["sums_twice", "product"].map(|name| gpu.function(module, name));
        for seed in 0..8 {
            gpu.seed(seed);
            assert!(sums_error(&gpu, sums) < 1e-3, "seed {seed}: {}", gpu.last_failure());
            assert!(products_are_right(&gpu, product), "seed {seed}: {}", gpu.last_failure());
        }
    }
}

#[test]
fn the_last_block_sees_what_all_blocks_did() {
    let gpu = MachineCodeGpu::open(0x942);
    let counts = gpu.upload(&[0u32; 3]);
    let kernel = gpu.kernel(ROWS, &[], "count_threads");
    gpu.launch(kernel, LaunchShape(70, 256, 0), &[KernelArg::At(counts)]);
    assert_eq!(gpu.download::<u32>(counts), [70 * 256, 70, 2 * 70 * 256]);
}

#[test]
fn blocks_can_wait_for_other_blocks() {
    let gpu = MachineCodeGpu::open(0x950);
    let token = gpu.upload(&[0u32]);
    let kernel = gpu.kernel(ROWS, &[], "hand_on");
    gpu.launch(kernel, LaunchShape(30, 64, 0), &[KernelArg::At(token)]);
    assert_eq!(gpu.download::<u32>(token), [30]);
}

#[test]
fn matrix_instructions_have_the_layouts_of_the_kernels() {
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        for f16 in [false, true] {
            let options: &[&str] = if f16 { &[F16] } else { &[] };
            let build = gpu.mma_module(&gpu.image(MATRIX, options), f16);
            let mut cases = vec![
                ("tile_16x16x16", [16, 16, 16]),
                ("tile_loads", [16, 16, 16]),
                ("half_32x32x8", [32, 32, 8]),
                ("fp8_16x16x32", [16, 16, 32]),
                ("fp8_32x32x16", [32, 32, 16]),
            ];
            if gfx == 0x950 {
                cases.extend([("half_16x16x32", [16, 16, 32]), ("half_32x32x16", [32, 32, 16])]);
            }
            for (name, sizes) in cases {
                assert_eq!(mismatch(&gpu, &build, name, sizes), None, "gfx{gfx:x}");
            }
        }
    }
}

#[test]
fn fp8_has_the_format_of_the_architecture() {
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        let kernel = gpu.kernel(MATRIX, &[], "fp8_numbers");
        assert_eq!(fp8_mismatch(&gpu, kernel, gfx == 0x942), None, "gfx{gfx:x}");
    }
}

#[test]
fn wavefronts_of_32_lanes_are_rejected() {
    let gpu = MachineCodeGpu::open(0x942);
    let log = gpu.try_compile(ROWS, &["-DWARP_SIZE=32"], |_, text| text.to_owned()).unwrap_err();
    assert!(log.contains("machine code has waves of 64 lanes"), "{log}");
}

#[test]
fn code_of_the_host_is_still_accepted() {
    let gpu = MachineCodeGpu::open(0x950);
    let machine_code = gpu.kernel(ROWS, &[], "product");
    gpu.use_machine_code(0);
    let host_code = gpu.kernel(ROWS, &["-DWARP_SIZE=64"], "product");
    assert!(products_are_right(&gpu, machine_code) && products_are_right(&gpu, host_code));
}
