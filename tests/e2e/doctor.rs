//! Tests `hadron doctor` on machines without a GPU, and on emulated AMD cards.

use crate::bounded_child::{CHILD_TIMEOUT, run_to_end, run_within};
use crate::emulated_gpu;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::{Command, Output};

/// Runs `hadron doctor`. The environment of the process has no variables that hide devices, except
/// `variables`.
fn doctor(flags: &[&str], variables: &BTreeMap<&str, &str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hadron"));
    for name in ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCM_PATH"]
    {
        command.env_remove(name);
    }
    run_to_end(command.arg("doctor").args(flags).envs(variables))
}

/// Runs `hadron doctor --json` with the emulator in place of the ROCm libraries. Returns whether the exit
/// status is success (the machine can serve), and the report.
fn emulated(libraries: &str, variables: &BTreeMap<&str, &str>) -> (bool, Value) {
    let output =
        doctor(&["--json", "--device", "rocm", "--device-libraries", libraries], variables);
    (output.status.success(), serde_json::from_slice(&output.stdout).unwrap())
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the messages of the findings with severity `level`.
fn findings(report: &Value, level: &str) -> Vec<String> {
    let all = report["findings"].as_array().unwrap().iter();
    let of_level = all.filter(|finding| finding["level"] == level);
    of_level.map(|finding| finding["what"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn doctor_reports_the_host_without_a_gpu() {
    let cache = tempfile::tempdir().unwrap();
    let variables = BTreeMap::from([("XDG_CACHE_HOME", cache.path().to_str().unwrap())]);
    let output = doctor(&["--device", "cpu"], &variables);
    let page = text(&output);
    assert!(output.status.success(), "{page}");
    for part in
        ["kernel         Linux ", "memory         ", "This machine can serve with --device cpu."]
    {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(page.contains("0 images, 0 B, writable") && page.lines().count() < 20, "{page}");

    let report: Value =
        serde_json::from_slice(&doctor(&["--device", "cpu", "--json"], &variables).stdout).unwrap();
    assert!(report["host"]["cores"].as_u64().unwrap() > 0, "{report}");
    assert!(report["host"]["memory_bytes"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(
        (report["can_serve"].as_bool(), report["gpus"].as_array().unwrap().len()),
        (Some(true), 0)
    );
}

#[test]
fn doctor_fails_if_a_required_gpu_library_is_missing() {
    let libraries = "/no/such/libamdhip64.so,,/no/such/libhipblaslt.so,,/no/such/librccl.so";
    let (can_serve, report) = emulated(libraries, &BTreeMap::new());
    assert!(!can_serve);
    let errors = findings(&report, "error").join("\n");
    assert!(errors.contains("tried /no/such/libamdhip64.so"), "{errors}");
    assert_eq!(report["gpus"][0]["libraries"][3]["role"], "collectives");
    assert!(report["gpus"][0]["libraries"][3]["path"].is_null());
}

#[test]
fn doctor_describes_emulated_cards_and_what_is_slow() {
    let library = emulated_gpu::library();
    let library = library.to_str().unwrap();
    let libraries = format!("{library},,/no/such/libhipblaslt.so,64,{library}");
    let card = ("HIPEMU_CARD", "MI300X");
    let (can_serve, report) =
        emulated(&libraries, &BTreeMap::from([card, ("HIP_VISIBLE_DEVICES", "5,2,0")]));
    assert!(can_serve, "{report}");
    let vendor = &report["gpus"][0];
    assert_eq!(vendor["visibility"], "HIP_VISIBLE_DEVICES=5,2,0");
    let devices = vendor["devices"].as_array().unwrap();
    let buses: Vec<&str> = devices.iter().map(|d| d["pci_bus_id"].as_str().unwrap()).collect();
    assert_eq!(buses, ["0000:06:00.0", "0000:03:00.0", "0000:01:00.0"]);
    let gpu = &devices[1];
    assert_eq!(
        (gpu["name"].as_str(), gpu["arch"].as_str()),
        (Some("AMD Instinct MI300X"), Some("gfx942"))
    );
    assert_eq!(
        (gpu["multiprocessors"].as_u64(), gpu["shared_bytes"].as_u64()),
        (Some(304), Some(64 << 10))
    );
    assert_eq!(gpu["last_level_cache_bytes"].as_u64(), Some(256 << 20));
    assert_eq!(gpu["peers"], serde_json::json!([0, 2]));
    let warnings = findings(&report, "warning").join("\n");
    assert!(warnings.contains("/no/such/libhipblaslt.so"), "{warnings}");
    assert!(!warnings.contains("peer access") && !warnings.contains("unsupported"), "{warnings}");
    let notes = findings(&report, "note").join("\n");
    assert!(
        notes.contains("no speed figure of this project was measured on an AMD GPU"),
        "{notes}"
    );

    let variables = BTreeMap::from([card, ("HIPEMU_DEVICES", "2"), ("HIPEMU_PEER_ACCESS", "0")]);
    let (_, report) = emulated(&libraries, &variables);
    let warnings = findings(&report, "warning").join("\n");
    assert!(warnings.contains("GPU 0 has no peer access to GPU 1"), "{warnings}");
}

#[test]
fn doctor_reports_peer_links_of_emulated_cards() {
    let library = emulated_gpu::library();
    let libraries = format!("{},,,64", library.to_str().unwrap());
    let links = |link| {
        let variables = [("HIPEMU_CARD", "MI300X"), ("HIPEMU_DEVICES", "2"), ("HIPEMU_LINK", link)];
        let (_, report) = emulated(&libraries, &BTreeMap::from(variables));
        [0, 1].map(|index| report["gpus"][0]["devices"][index]["links"].clone())
    };
    for (link, kind, hops) in
        [("xgmi", "xgmi", json!(1)), ("pcie", "pcie", json!(2)), ("none", "unknown", Value::Null)]
    {
        let expected = [1, 0].map(|peer| {
            json!([{"peer": peer, "has_access": true, "kind": kind, "hops": hops, "performance_rank": null}])
        });
        assert_eq!(links(link), expected, "{link}");
    }
}

#[test]
fn doctor_warns_of_an_untested_architecture() {
    let library = emulated_gpu::library();
    let libraries = format!("{},,,64", library.to_str().unwrap());
    let (can_serve, report) = emulated(&libraries, &BTreeMap::from([("HIPEMU_GFX", "90a")]));
    let warnings = findings(&report, "warning").join("\n");
    assert!(
        can_serve && warnings.contains("kernels compile for gfx90a, but no test"),
        "{warnings}"
    );
}

#[test]
fn doctor_names_variables_that_hide_all_devices() {
    let library = emulated_gpu::library();
    let libraries = format!("{},,,64", library.to_str().unwrap());
    let variables =
        BTreeMap::from([("ROCR_VISIBLE_DEVICES", "2,3"), ("HIP_VISIBLE_DEVICES", "2,3")]);
    let (can_serve, report) = emulated(&libraries, &variables);
    assert!(!can_serve);
    let errors = findings(&report, "error").join("\n");
    assert!(
        errors.contains("finds no device with ROCR_VISIBLE_DEVICES=2,3 HIP_VISIBLE_DEVICES=2,3"),
        "{errors}"
    );
    let warnings = findings(&report, "warning").join("\n");
    assert!(
        warnings.contains("HIP counts among the devices that ROCR_VISIBLE_DEVICES leaves"),
        "{warnings}"
    );
}

#[test]
fn doctor_page_of_an_emulated_card_fits_one_screen() {
    let library = emulated_gpu::library();
    let libraries = format!("{},,,64", library.to_str().unwrap());
    let flags = ["--device", "rocm", "--device-libraries", &libraries];
    let output =
        doctor(&flags, &BTreeMap::from([("HIPEMU_CARD", "MI355X"), ("HIPEMU_DEVICES", "2")]));
    let page = text(&output);
    assert!(output.status.success(), "{page}");
    for part in [
        "AMD GPUs (rocm): 2, /dev/kfd ",
        "version 7.0.0",
        "AMD Instinct MI355X, gfx950, 256 compute units of 64 lanes, 160 KiB shared memory, 256 MiB",
        "peer access to 1 (xGMI, 1 hop)",
        "This machine can serve with --device rocm.",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(page.lines().count() < 30, "{page}");
}

/// The executor runs in its own process, which inherits the environment variables; its error message must
/// reach the user.
#[test]
fn executor_error_names_variables_that_hide_its_gpu() {
    let libraries = format!("{},,,64", emulated_gpu::library().to_str().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_hadron"));
    command.args(["serve", "--port", "0", "--device", "rocm", "--device-libraries", &libraries]);
    command.args(["--device-ids", "3"]).env("HIP_VISIBLE_DEVICES", "0,1");
    let output = run_within(&mut command, CHILD_TIMEOUT);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("device 3 is not visible: HIP_VISIBLE_DEVICES=0,1 ("), "{text}");
}
