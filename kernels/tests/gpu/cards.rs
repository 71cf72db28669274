//! AMD cards as the driver presents them: names, architectures with feature suffixes, compute units, LDS, unified
//! memory, and lists of visible devices.

use crate::emulated_gpu::bounded_child::run_to_end;
use std::collections::BTreeMap;
use std::process::Command;

use device::gpu::GpuConfig;
use device::{DType, DeviceDriver};
use kernels::gpu::GpuBackend;

use crate::device_pair::pairs;
use crate::support::emulator;
use crate::{attention, mla};

/// Runs an ignored test of this file with environment variables on the emulator, and returns what it prints. `HIPEMU_GFX` is
/// unset, so that the architecture is that of the card.
fn run(name: &str, variables: &BTreeMap<&str, &str>) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "--nocapture", &format!("cards::{name}")]);
    let child = child.env_remove("HIPEMU_GFX").env_remove("HADRON_GPU");
    let output = run_to_end(child.envs(variables));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("1 passed"), "{variables:?}: {text}");
    text
}

#[test]
#[ignore = "child process, run by the tests of cards in this file"]
fn print_card() {
    let gpu = GpuBackend::open(&emulator(64)).unwrap();
    let memory = gpu.mem_info();
    println!("card: {}, {} KB of LDS", gpu.name(), gpu.shared_bytes() >> 10);
    println!("memory: {} of {} GiB", memory.free_bytes >> 30, memory.total_bytes >> 30);
}

#[test]
fn cards_are_described_by_their_driver() {
    for (card, arch, units, lds, memory) in [
        ("MI300X", "gfx942", 304, 64, 192),
        ("MI300A", "gfx942", 228, 64, 128),
        ("MI325X", "gfx942", 304, 64, 256),
        ("MI350X", "gfx950", 256, 160, 288),
        ("MI355X", "gfx950", 256, 160, 288),
    ] {
        let text = run("print_card", &[("HIPEMU_CARD", card)].into());
        let expected = format!(
            "card: AMD Instinct {card}, {arch}, {units} multiprocessors, without a BLASLt library, {lds} KB"
        );
        assert!(text.contains(&expected) && text.contains(&format!("of {memory} GiB")), "{text}");
    }
}

#[test]
#[ignore = "child process, run by the tests of cards in this file"]
fn attend_on_card() {
    for pair in pairs().iter().filter(|pair| pair.gpu.warp_size() == 64) {
        let (gpu, half) = (&pair.gpu, DType::BF16);
        let rows = [(1, 1), (1, 129), (1, 300), (1, 700), (1, 2050)];
        attention::check(pair, (4, 2, 128, 16), half, &rows);
        let window = attention::window(300);
        attention::check_keys(pair, (4, 2, 128, 16), half, &rows, window);
        mla::check(pair, [17, 128, 32, 32, 48, 32], mla::LONG, 4, half);
        println!("attended: {} with {} compute units", gpu.name(), gpu.multiprocessors());
    }
}

/// Cards with twice the compute units of an H200 divide keys into splits of half the length.
#[test]
fn short_splits_agree_with_the_cpu() {
    let text = run("attend_on_card", &[("HIPEMU_CARD", "MI300X")].into());
    assert!(text.contains("with 304 compute units"), "{text}");
}

/// The GPU memory of an MI300A is host memory, which other processes use too.
#[test]
fn free_unified_memory_is_that_of_the_host() {
    const GIB: &str = "16777216"; // More than any host has.
    let memory = format!("{GIB}G");
    let of = |card| {
        run("print_card", &[("HIPEMU_CARD", card), ("HIPEMU_MEMORY", memory.as_str())].into())
    };
    let all_free = format!("memory: {GIB} of {GIB} GiB");
    assert!(of("MI300X").contains(&all_free));
    assert!(!of("MI300A").contains(&all_free));
}

#[test]
#[ignore = "run by hidden_device_error_names_the_variable"]
#[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
fn print_hidden_device_error() {
    let Ok(visibility) = std::env::var("HIP_VISIBLE_DEVICES") else { return };
    let visibility = format!("HIP_VISIBLE_DEVICES={visibility}");
    let error = GpuBackend::open(&GpuConfig { device: 3, visibility, ..emulator(64) }).unwrap_err();
    println!("error: {error}");
}

#[test]
fn hidden_device_error_names_the_variable() {
    let text = run("print_hidden_device_error", &[("HIP_VISIBLE_DEVICES", "0,1")].into());
    assert!(text.contains("error: device 3 is not visible: HIP_VISIBLE_DEVICES=0,1 ("), "{text}");
    assert!(text.contains("finds 2)"), "{text}");
}
