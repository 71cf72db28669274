//! Checks the patches of `tests/sim/mutants`: each applies to the current code, describes the fault that it
//! injects, and is listed in the results page, which shows that the simulator finds it.

use crate::source_tree::{read_file, root};
use std::path::PathBuf;
use std::process::Command;

/// Minimum number of injected faults that the simulator finds: patches, and faults of `fault_injector.rs`.
const INJECTED_FAULTS_MIN: usize = 43;
/// Page with the results of `just mutants`.
const RESULTS: &str = "tests/bench/results/cpu/injected_faults.md";

/// Paths of all patches, sorted by name.
fn patches() -> Vec<PathBuf> {
    let files = std::fs::read_dir(root().join("tests/sim/mutants")).unwrap();
    let paths = files.map(|entry| entry.unwrap().path());
    let mut patches: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|end| end == "patch")).collect();
    patches.sort();
    patches
}

fn name_of(patch: &std::path::Path) -> String {
    patch.file_stem().unwrap().to_string_lossy().into_owned()
}

#[test]
fn every_mutant_patch_still_applies() {
    let mut stale = Vec::new();
    for patch in patches() {
        // If another repository contains the source tree, `git apply` must not prepend a path to those of the
        // patch.
        let output = Command::new("git")
            .args(["apply", "--check"])
            .arg(&patch)
            .current_dir(root())
            .env("GIT_CEILING_DIRECTORIES", root().parent().unwrap())
            .output()
            .expect("git is installed");
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            stale.push(format!("{}: {text}", name_of(&patch)));
        }
    }
    assert!(
        stale.is_empty(),
        "update these patches to the current code:\n  {}",
        stale.join("\n  ")
    );
}

#[test]
fn every_mutant_patch_is_described_and_found() {
    let page = read_file(RESULTS);
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| `")).collect();
    for patch in patches() {
        let (name, text) = (name_of(&patch), std::fs::read_to_string(&patch).unwrap());
        let described = text.lines().next().is_some_and(|line| line.starts_with("# "));
        assert!(described, "{name}: the first line is no description");
        let listed = rows.iter().any(|row| row.starts_with(&format!("| `{name}` | patch |")));
        assert!(listed, "{RESULTS} has no row for {name}: run `just mutants`");
    }
    let found = rows.iter().filter(|row| !row.contains("NOT FOUND")).count();
    assert_eq!(found, rows.len(), "{RESULTS} lists faults that are not found");
    assert!(found >= INJECTED_FAULTS_MIN, "{found} injected faults are found");
}
