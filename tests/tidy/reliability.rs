//! Checks that `docs/reliability.md` has a table row for each fault, incident and figure, and that the tests
//! named in these rows exist.

use crate::source_tree::read_file;
use std::collections::BTreeSet;

/// Returns the cells of each table row in `page` whose first cell is `name`.
fn rows<'a>(page: &'a str, name: &str) -> Vec<Vec<&'a str>> {
    let cells = |line: &'a str| line.trim_matches('|').split('|').map(str::trim).collect();
    let lines = page.lines().filter(|line| line.starts_with('|'));
    lines.map(cells).filter(|cells: &Vec<&str>| cells[0] == name).collect()
}

/// Returns file path and name of every test in a cell, which are written as `path::name`.
fn tests(cell: &str) -> BTreeSet<(&str, &str)> {
    cell.split('`').filter_map(|word| word.split_once(".rs::")).collect()
}

/// Whether a file contains a test with this name: the attribute `#[test]` precedes the function, with only
/// other attributes and comments between.
fn is_test(text: &str, name: &str) -> bool {
    let head = format!("fn {name}(");
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let Some(at) = lines.iter().position(|line| line.starts_with(&head)) else { return false };
    let above = lines[..at].iter().rev();
    let attributes = above.take_while(|line| line.starts_with("#[") || line.starts_with("//"));
    attributes.into_iter().any(|line| *line == "#[test]")
}

#[test]
fn every_reliability_row_names_existing_tests() {
    let page = read_file("docs/reliability.md");
    let faults = (1..=52).map(|n| format!("F{n}"));
    let incidents = (1..=22).map(|n| n.to_string());
    let counters = (1..=19).map(|n| format!("G{n}"));
    let mut wrong = Vec::new();
    for name in faults.chain(incidents).chain(counters) {
        let [row] = &rows(&page, &name)[..] else {
            wrong.push(format!("{name}: not one row"));
            continue;
        };
        let named = row.get(3).map(|cell| tests(cell)).unwrap_or_default();
        if row.len() != 5 || named.is_empty() {
            wrong.push(format!("{name}: {} cells, {} tests", row.len(), named.len()));
        }
        for (path, test) in named {
            let path = format!("{path}.rs");
            if !crate::source_tree::root().join(&path).exists() || !is_test(&read_file(&path), test)
            {
                wrong.push(format!("{name}: there is no test {path}::{test}"));
            }
        }
    }
    assert!(wrong.is_empty(), "docs/reliability.md:\n  {}", wrong.join("\n  "));
}

#[test]
fn tests_are_distinguished_from_functions() {
    assert!(is_test("#[test]\nfn a() {}", "a"));
    assert!(is_test("    #[test]\n    #[ignore = \"x\"]\n    // Why.\n    fn a() {}", "a"));
    assert!(!is_test("fn a() {}", "a") && !is_test("#[test]\nfn ab() {}", "a"));
    assert!(!is_test("#[test]\nfn b() {}\n\nfn a() {}", "a"));
}
