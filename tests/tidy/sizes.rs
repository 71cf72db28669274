//! Limits the lengths of files and functions: at most 5 % of them are longer than the limit. Prints the 95th
//! percentile and the longest ones.
//!
//! Definitions: a file is a `*.rs` file outside `tests/`, `target` and `data`; its length is its number of
//! lines. A function begins at its `fn` line and ends at the closing brace at the same indent; functions in test
//! modules count. The 95th percentile is the smallest length that at least 95 % of the lengths do not exceed
//! (nearest rank).

use crate::source_tree::{SourceFile, rust_files};

/// Length of a file or function, and where it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct CodeLength {
    lines: usize,
    place: String,
}

/// Largest 95th percentile of the lengths of files, in lines.
const FILE_LIMIT: usize = 328;

/// Largest 95th percentile of the lengths of functions, in lines.
const FUNCTION_LIMIT: usize = 30;

#[test]
fn lengths_of_files_and_functions_are_limited() {
    let files: Vec<SourceFile> =
        rust_files().into_iter().filter(|f| !f.path.starts_with("tests/")).collect();
    assert!(!files.is_empty());
    let length =
        |f: &SourceFile| CodeLength { lines: f.text.lines().count(), place: f.path.clone() };
    let mut file_lengths: Vec<CodeLength> = files.iter().map(length).collect();
    let mut function_lengths: Vec<CodeLength> = files.iter().flat_map(functions).collect();
    file_lengths.sort_unstable();
    function_lengths.sort_unstable();
    println!("{}", summary("files", &file_lengths));
    println!("{}", summary("functions", &function_lengths));
    let errors: Vec<String> = [
        limit_error("files", &file_lengths, FILE_LIMIT),
        limit_error("functions", &function_lengths, FUNCTION_LIMIT),
    ]
    .into_iter()
    .flatten()
    .collect();
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

/// Returns the number of `lengths`, their 95th percentile and the ten longest, one a line. `lengths` is sorted.
fn summary(what: &str, lengths: &[CodeLength]) -> String {
    let p95 = percentile_95(lengths);
    let head = format!("{} {what}, 95th percentile {p95} lines; the longest:", lengths.len());
    let longest = lengths.iter().rev().take(10);
    let lines = longest.map(|CodeLength { lines, place }| format!("  {lines:5} {place}"));
    std::iter::once(head).chain(lines).collect::<Vec<_>>().join("\n")
}

/// Returns a message if the 95th percentile of `lengths`, which are sorted, exceeds `limit`.
fn limit_error(what: &str, lengths: &[CodeLength], limit: usize) -> Option<String> {
    let p95 = percentile_95(lengths);
    let longer = lengths.iter().filter(|length| length.lines > limit).count();
    let allowed = lengths.len() - (lengths.len() * 95).div_ceil(100);
    (p95 > limit).then(|| {
        format!("{longer} of {} {what} exceed {limit} lines, at most {allowed} may", lengths.len())
    })
}

/// Returns the 95th percentile by nearest rank. `lengths` is sorted and not empty.
fn percentile_95(lengths: &[CodeLength]) -> usize {
    lengths[(lengths.len() * 95).div_ceil(100) - 1].lines
}

#[test]
fn percentile_is_the_nearest_rank() {
    let lengths = |count: usize| -> Vec<CodeLength> {
        (1..=count).map(|lines| CodeLength { lines, place: String::new() }).collect()
    };
    assert_eq!([1, 19, 20, 100].map(|count| percentile_95(&lengths(count))), [1, 19, 19, 95]);
    assert_eq!(limit_error("files", &lengths(100), 95), None);
    let error = limit_error("files", &lengths(100), 94).unwrap();
    assert_eq!(error, "6 of 100 files exceed 94 lines, at most 5 may");
}

/// Returns the length in lines and the location of each function, which extends from its `fn` line to the
/// closing brace at the same indent.
fn functions(file: &SourceFile) -> Vec<CodeLength> {
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
            let place = format!("{}:{} {name}", file.path, i + 1);
            found.push(CodeLength { lines: length + 2, place });
        }
    }
    found
}
