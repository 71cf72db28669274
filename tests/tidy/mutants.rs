//! Checks the patches in `tests/sim/mutants`, each of which injects a fault into the code: each patch applies
//! to the current code, describes its fault, and is listed in the results page, which shows that the
//! simulator detects the fault.

use crate::bounded_child::run_to_end;
use crate::source_tree::{read_file, root};
use std::path::PathBuf;
use std::process::Command;

/// Minimum number of injected faults (by patches or by `fault_injector.rs`) that the simulator detects.
const INJECTED_FAULTS_MIN: usize = 43;
/// Page with the results of `just mutants`.
const RESULTS: &str = "tests/bench/results/cpu/injected_faults.md";

/// Returns the paths of all patches, sorted by name.
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
        // If the source tree is inside another git repository, `git apply` would prepend the tree's path to
        // the paths in the patch; this setting prevents it.
        let mut git = Command::new("git");
        git.args(["apply", "--check"]).arg(&patch).current_dir(root());
        git.env("GIT_CEILING_DIRECTORIES", root().parent().unwrap());
        let output = run_to_end(&mut git);
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
