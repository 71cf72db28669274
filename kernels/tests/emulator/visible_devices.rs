//! Lists of visible devices: `ROCR_VISIBLE_DEVICES` first, then `HIP_VISIBLE_DEVICES`, or `CUDA_VISIBLE_DEVICES`
//! if that is unset or empty, as AMD's runtimes read them.

use std::collections::BTreeMap;

use hip_runtime_sys::{DriverApi, GpuApi, LibrarySearchPaths, code};

use crate::{child_process, emulated_gpu};

/// Returns the PCI buses of the visible devices; without lists, device `i` has bus `i + 1`.
fn visible_buses() -> Vec<u32> {
    let search = LibrarySearchPaths::named("driver", &emulated_gpu::library());
    let driver = DriverApi::open(GpuApi::Hip, &search).unwrap();
    let (mut count, pci_bus_id) = (0, driver.pci_bus_id.unwrap());
    // SAFETY: `count` is writable.
    let status = unsafe { (driver.device_count)(&raw mut count) };
    assert_eq!(status, if count == 0 { code::NO_DEVICE } else { code::SUCCESS });
    let bus = |device| {
        let mut text = [0u8; 32];
        // SAFETY: `text` is writable and has 32 bytes.
        assert_eq!(unsafe { pci_bus_id(text.as_mut_ptr().cast(), 32, device) }, code::SUCCESS);
        u32::from_str_radix(std::str::from_utf8(&text[5..7]).unwrap(), 16).unwrap()
    };
    (0..count).map(bus).collect()
}

#[test]
#[ignore = "run by visibility_lists_combine_as_in_amd_runtimes"]
fn print_visible_devices() {
    println!("visible buses: {:?}", visible_buses());
}

#[test]
fn visibility_lists_combine_as_in_amd_runtimes() {
    const ROCR: &str = "ROCR_VISIBLE_DEVICES";
    const HIP: &str = "HIP_VISIBLE_DEVICES";
    const CUDA: &str = "CUDA_VISIBLE_DEVICES";
    let cases: [(&[(&str, &str)], &str); 11] = [
        (&[], "[1, 2, 3, 4]"),
        (&[(HIP, "2,0")], "[3, 1]"),
        (&[(ROCR, "1,2,3"), (HIP, "2")], "[4]"),
        (&[(ROCR, "2,3"), (HIP, "2,3")], "[]"), // HIP counts among the two that ROCR leaves.
        (&[(HIP, "1,9,0")], "[2]"),             // An unknown device ends the list.
        (&[(HIP, "-1")], "[]"),
        (&[(HIP, "1,1,0")], "[2, 1]"),
        (&[(ROCR, "1,1,0")], "[2]"),
        (&[(HIP, ""), (CUDA, "3")], "[4]"),
        (&[(ROCR, "")], "[]"),
        (&[(ROCR, "gpu-0000000000000003, 0")], "[3, 1]"),
    ];
    for (lists, expected) in cases {
        // Overrides the variables of the machine on which the test runs, which must not affect the result.
        let mut variables = BTreeMap::from([("HIPEMU_DEVICES", "4"), (HIP, ""), (CUDA, "")]);
        variables.extend(lists.iter().copied());
        let output = child_process::run("visible_devices::print_visible_devices", &variables);
        let text = child_process::text(&output);
        assert!(text.contains(&format!("visible buses: {expected}")), "{lists:?}: {text}");
    }
}
