//! The emulated run-time compiler: error messages with the file names and lines of the caller's source,
//! compiler options, and the visible symbols of a module.

use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};
use crate::injected_bugs::ROWS;

const OPTIONS: &str = r#"
#include "dev.h"
KERNEL(64) options(u32* out) {
    if (tid() == 0) {
        out[0] = WARP_SIZE;
        out[1] = DEV_GFX;
        out[2] = sizeof(ACT);
        out[3] = FP8_MAX;
        out[4] = ACT_WIDTH;
    }
}
EXPORT(options)
"#;

#[test]
fn compile_errors_name_file_and_line() {
    let gpu = EmulatedGpu::open();
    let source = "#include \"dev.h\"\n\nKERNEL(64) wrong(u32* out) { out[0] = undefined_name; }\n";
    let log = gpu.try_compile(source, &[], |_, text| text.to_owned()).unwrap_err();
    assert!(log.starts_with("test/test.hip:"), "{log}");
    assert!(log.contains("test/test.hip:3:") && log.contains("undefined_name"), "{log}");
}

#[test]
fn vendor_options_are_accepted_and_defines_apply() {
    let gpu = EmulatedGpu::open();
    let cases: [(&[&str], [u32; 5]); 4] = [
        (&["-O3", "--offload-arch=gfx942"], [64, 0, 2, 448, 8]),
        (&["-DWARP_SIZE=32", "-DACT_F32=1"], [32, 0, 4, 448, 4]),
        (&["-DWARP_SIZE=64", "-DDEV_EMU_GFX=0x942"], [64, 0x942, 2, 240, 8]),
        (&["-DDEV_EMU_GFX=0x950", "-ffp-contract=fast"], [64, 0x950, 2, 448, 8]),
    ];
    for (options, expected) in cases {
        let out = gpu.alloc(20);
        gpu.launch(
            gpu.kernel(OPTIONS, options, "options"),
            LaunchShape(1, 64, 0),
            &[KernelArg::At(out)],
        );
        assert_eq!(gpu.download::<u32>(out), expected);
    }
}

#[test]
fn modules_of_one_source_are_independent() {
    let gpu = EmulatedGpu::open();
    let kernels =
        ["-DWARP_SIZE=64", "-DWARP_SIZE=32"].map(|w| gpu.kernel(OPTIONS, &[w], "options"));
    for (kernel, wave) in kernels.into_iter().zip([64, 32]).cycle().take(4) {
        let out = gpu.alloc(20);
        gpu.launch(kernel, LaunchShape(1, 64, 0), &[KernelArg::At(out)]);
        assert_eq!(gpu.download::<u32>(out)[0], wave);
    }
}

#[test]
fn invalid_image_or_kernel_is_rejected() {
    let gpu = EmulatedGpu::open();
    let mut out = std::ptr::null_mut();
    // SAFETY: all texts end with a NUL, and the variables for the compiler's results are writable.
    unsafe {
        let junk = b"not an image at all, however long it may be, and it is longer than a header\0";
        assert_eq!((gpu.driver.module_load)(&raw mut out, junk.as_ptr().cast()), 200);
        let image = gpu.try_compile(ROWS, &[], |_, text| text.to_owned()).unwrap();
        let module = gpu.load(&image);
        assert_eq!((gpu.driver.module_function)(&raw mut out, module, c"missing".as_ptr()), 500);
        assert_eq!((gpu.driver.module_unload)(module), 0);
    }
}
