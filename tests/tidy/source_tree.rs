//! Reads the files of the source tree, with their paths relative to the repository root.

use std::fs;
use std::path::{Path, PathBuf};

/// Path and text of a source file.
pub(crate) struct SourceFile {
    /// Path from the repository root, with forward slashes.
    pub(crate) path: String,
    /// Whole content of the file.
    pub(crate) text: String,
}

/// Path of the repository root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Reads one file of the repository.
pub(crate) fn read_file(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Returns all Rust files of the repository except build outputs, sorted by path.
pub(crate) fn rust_files() -> Vec<SourceFile> {
    files_with(&["rs"])
}

/// Returns all files of the repository with one of `extensions` except build outputs, sorted by path.
pub(crate) fn files_with(extensions: &[&str]) -> Vec<SourceFile> {
    let mut found = Vec::new();
    walk(&root(), extensions, &mut found);
    found.sort_by(|a: &SourceFile, b| a.path.cmp(&b.path));
    found
}

fn walk(dir: &Path, extensions: &[&str], found: &mut Vec<SourceFile>) {
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && name != "target" && name != "data" {
                walk(&path, extensions, found);
            }
        } else if path.extension().is_some_and(|e| extensions.iter().any(|&wanted| e == wanted)) {
            let text = fs::read_to_string(&path).unwrap();
            let path = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
            found.push(SourceFile { path, text });
        }
    }
}

/// Returns the lines of a file before its first test module, with their line numbers from 1. Comments are cut
/// off at `//`.
pub(crate) fn code_lines(source: &SourceFile) -> impl Iterator<Item = (usize, &str)> {
    let end = source.text.find("#[cfg(test)]\nmod ").unwrap_or(source.text.len());
    source.text[..end].lines().enumerate().map(|(i, line)| {
        let code = line.split("//").next().unwrap_or("");
        (i + 1, code)
    })
}
