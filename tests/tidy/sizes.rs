//! Prints the longest files and functions. There is no limit for the lengths.

use crate::source_tree::{SourceFile, rust_files};

#[test]
fn longest_files_and_functions_are_printed() {
    let files: Vec<SourceFile> =
        rust_files().into_iter().filter(|f| !f.path.starts_with("tests/")).collect();
    assert!(!files.is_empty());
    let mut lines: Vec<(usize, &str)> =
        files.iter().map(|f| (f.text.lines().count(), f.path.as_str())).collect();
    lines.sort_unstable_by(|a, b| b.cmp(a));
    println!("longest files:");
    for (count, path) in lines.iter().take(10) {
        println!("  {count:5} {path}");
    }
    let mut functions: Vec<(usize, String)> = files.iter().flat_map(functions).collect();
    functions.sort_unstable_by(|a, b| b.cmp(a));
    println!("longest functions:");
    for (count, place) in functions.iter().take(10) {
        println!("  {count:5} {place}");
    }
}

/// Returns the length in lines and the location of each function, which extends from its `fn` line to the
/// closing brace at the same indent.
fn functions(file: &SourceFile) -> Vec<(usize, String)> {
    let lines: Vec<&str> = file.text.lines().collect();
    let indent = |l: &str| l.len() - l.trim_start().len();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let head = line.trim_start();
        let is_fn = head.starts_with("fn ") || head.contains(" fn ") && head.starts_with("pub");
        if !is_fn || !lines[i..].iter().take(12).any(|l| l.ends_with('{')) {
            continue;
        }
        let end = lines[i..]
            .iter()
            .skip(1)
            .position(|l| indent(l) == indent(line) && l.trim_start().starts_with('}'));
        if let Some(length) = end {
            let name =
                head.split("fn ").nth(1).and_then(|n| n.split(['(', '<']).next()).unwrap_or("");
            found.push((length + 2, format!("{}:{} {name}", file.path, i + 1)));
        }
    }
    found
}
