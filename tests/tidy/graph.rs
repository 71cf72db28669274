//! Checks dependencies with `cargo metadata`: on which workspace crates each workspace crate depends, and
//! which workspace crates use a third-party crate.

use crate::bounded_child::run_to_end;
use crate::source_tree::{read_file, root};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Each workspace crate, with the workspace crates on which it may depend.
const EDGES: &[(&str, &[&str])] = &[
    ("protocol", &[]),
    ("kvcache", &["protocol"]),
    ("scheduler", &["kvcache", "protocol"]),
    ("hip-runtime-sys", &[]),
    ("rccl-sys", &["hip-runtime-sys"]),
    ("device", &["hip-runtime-sys"]),
    ("kernels", &["device", "hip-runtime-sys"]),
    ("ops", &["device", "kernels"]),
    ("collectives", &["device", "hip-runtime-sys", "kernels", "rccl-sys"]),
    ("models", &["collectives", "ops", "protocol"]),
    ("executor", &["collectives", "device", "kernels", "models", "ops", "protocol"]),
    ("plugin", &["collectives", "device", "kernels", "models", "ops", "protocol"]),
    ("grammar", &["protocol", "scheduler"]),
    ("text", &["grammar", "protocol"]),
    ("metrics", &["grammar", "protocol", "scheduler"]),
    ("engine", &["executor", "grammar", "metrics", "protocol", "scheduler"]),
    ("server", &["engine", "grammar", "metrics", "protocol", "scheduler", "text"]),
    (
        "hadron",
        &[
            "engine",
            "executor",
            "grammar",
            "metrics",
            "models",
            "protocol",
            "scheduler",
            "server",
            "text",
        ],
    ),
    ("hadron-fuzz", &["grammar", "metrics", "models", "protocol", "server", "text"]),
];

/// Third-party crates, each with the only workspace crates that may depend on it.
const ALLOWED_DEPENDENTS: &[(&str, &[&str])] = &[
    ("tokio", &["engine", "hadron", "server"]),
    ("axum", &["server"]),
    ("hyper", &["hadron", "server"]),
    ("hyper-util", &["hadron", "server"]),
    ("clap", &["hadron"]),
    ("anyhow", &["engine", "grammar", "hadron"]),
    ("tokenizers", &["text"]),
    ("num-bigint", &["text"]),
    ("dashmap", &["engine"]),
    ("llguidance", &["grammar"]),
    ("hf-hub", &["hadron"]),
    ("tracing-subscriber", &["hadron"]),
    ("safetensors", &["hadron"]),
    ("rmp-serde", &["grammar", "metrics", "protocol"]),
    ("rmp", &["hadron", "metrics"]),
    ("zmq", &["hadron"]),
    ("socket2", &["metrics", "server"]),
    ("crc32c", &["protocol"]),
    ("rustix", &["collectives", "engine", "grammar", "hadron", "metrics", "text"]),
    ("prometheus", &["metrics"]),
    ("memmap2", &["device"]),
    ("libloading", &["hip-runtime-sys"]),
    ("xxhash-rust", &["device", "kernels", "kvcache"]),
    ("siphasher", &["kvcache"]),
];

/// Crates that access the device, directly or through other crates. The scheduling crates must not depend on
/// these crates, not even in tests.
const DEVICE: &[&str] = &[
    "hip-runtime-sys",
    "rccl-sys",
    "device",
    "kernels",
    "ops",
    "collectives",
    "models",
    "executor",
    "plugin",
];

/// A dependency that a workspace crate declares.
struct CrateDependency {
    name: String,
    dev: bool,
    in_tree: bool,
}

fn packages() -> BTreeMap<String, Vec<CrateDependency>> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version=1", "--no-deps", "--offline"]);
    let output = run_to_end(cargo.current_dir(root()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let dependency = |d: &Value| CrateDependency {
        name: d["name"].as_str().unwrap().to_owned(),
        dev: d["kind"] == "dev",
        in_tree: d["path"].is_string(),
    };
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| {
            let dependencies = p["dependencies"].as_array().unwrap().iter().map(dependency);
            (p["name"].as_str().unwrap().to_owned(), dependencies.collect())
        })
        .collect()
}

#[test]
fn crate_graph_matches_the_architecture_page() {
    let packages = packages();
    let known: BTreeSet<_> = EDGES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(packages.keys().cloned().collect::<BTreeSet<_>>(), known);
    for (name, allowed) in EDGES {
        for edge in packages[*name].iter().filter(|d| d.in_tree && !d.dev) {
            assert!(
                allowed.contains(&edge.name.as_str()),
                "{name} must not depend on {}",
                edge.name
            );
        }
    }
}

#[test]
fn scheduling_crates_reach_no_device_even_in_tests() {
    let packages = packages();
    for name in ["protocol", "kvcache", "scheduler"] {
        for edge in &packages[name] {
            assert!(!DEVICE.contains(&edge.name.as_str()), "{name} must not reach {}", edge.name);
        }
    }
}

#[test]
fn third_party_crates_have_only_allowed_dependents() {
    for (package, dependencies) in packages() {
        for dependency in dependencies.iter().filter(|d| !d.dev) {
            if let Some((_, homes)) =
                ALLOWED_DEPENDENTS.iter().find(|(name, _)| *name == dependency.name)
            {
                assert!(
                    homes.contains(&package.as_str()),
                    "{package} must not depend on {}",
                    dependency.name
                );
            }
        }
    }
}

#[test]
fn every_direct_dependency_is_documented() {
    let page = read_file("ARCHITECTURE.md");
    let missing: BTreeSet<String> = packages()
        .into_iter()
        .flat_map(|(package, dependencies)| {
            let outside = dependencies.into_iter().filter(|d| !d.in_tree);
            outside.map(move |d| (d.name, package.clone()))
        })
        .filter(|(name, _)| !page.contains(&format!("| `{name}` |")))
        .map(|(name, package)| format!("{name} (used by {package})"))
        .collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md has no row on {missing:?}");
}
