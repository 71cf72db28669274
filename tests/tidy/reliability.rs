//! Checks that `docs/reliability.json` has a row for each fault, incident and goal, that the tests named in these rows
//! exist, and that the tables of `docs/reliability.md` have these rows.
//!
//! `UPDATE_EXPECT=1 cargo test --test tidy reliability` writes the tables.

use crate::source_tree::{read_file, root};
use expect_test::expect_file;
use serde::Deserialize;
use std::collections::BTreeSet;

/// Row of a table: a fault, an incident of another engine or a goal.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LedgerRow {
    name: String,
    subject: String,
    /// Guarantee, rule or command.
    guarantee: String,
    /// Tests, `path::name` in code quotes, and their marks.
    tests: Vec<String>,
    measured: String,
}

/// Rows of all tables.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReliabilityLedger {
    faults: Vec<LedgerRow>,
    incidents: Vec<LedgerRow>,
    goals: Vec<LedgerRow>,
}

impl ReliabilityLedger {
    fn load() -> Self {
        serde_json::from_str(&read_file("docs/reliability.json")).unwrap()
    }

    /// Returns the rows of the table below a heading; `None` if the table has other rows.
    fn table(&self, heading: &str) -> Option<&[LedgerRow]> {
        match heading {
            "Faults" => Some(&self.faults),
            "Incidents of other engines" => Some(&self.incidents),
            "Goals" => Some(&self.goals),
            _ => None,
        }
    }

    /// Returns `page` with the rows of the ledger in its tables.
    fn rendered(&self, page: &str) -> String {
        let mut lines = Vec::new();
        let mut table = None;
        for line in page.lines() {
            if let Some(heading) = line.strip_prefix("## ") {
                table = self.table(heading);
            }
            let is_row = line.starts_with('|') && table.is_some();
            if !is_row || line.starts_with("|--") || line.contains(" | tests | ") {
                lines.push(line.to_owned());
            }
            if let Some(rows) = table.filter(|_| line.starts_with("|--")) {
                lines.extend(rows.iter().map(LedgerRow::line));
            }
        }
        lines.join("\n") + "\n"
    }
}

impl LedgerRow {
    fn line(&self) -> String {
        let Self { name, subject, guarantee, tests, measured } = self;
        format!("| {name} | {subject} | {guarantee} | {} | {measured} |", tests.join(", "))
    }
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
    let ledger = ReliabilityLedger::load();
    let names = |rows: &[LedgerRow]| rows.iter().map(|row| row.name.clone()).collect::<Vec<_>>();
    let expected = |prefix: &str, count| -> Vec<String> {
        (1..=count).map(|n| format!("{prefix}{n}")).collect()
    };
    assert_eq!(names(&ledger.faults), expected("F", 53));
    assert_eq!(names(&ledger.incidents), expected("", 22));
    assert_eq!(names(&ledger.goals), expected("G", 19));
    let mut wrong = Vec::new();
    for row in ledger.faults.iter().chain(&ledger.incidents).chain(&ledger.goals) {
        let named: BTreeSet<_> = row.tests.iter().flat_map(|cell| tests(cell)).collect();
        if named.is_empty() {
            wrong.push(format!("{}: no test", row.name));
        }
        for (path, test) in named {
            let path = format!("{path}.rs");
            if !root().join(&path).exists() || !is_test(&read_file(&path), test) {
                wrong.push(format!("{}: there is no test {path}::{test}", row.name));
            }
        }
    }
    assert!(wrong.is_empty(), "docs/reliability.json:\n  {}", wrong.join("\n  "));
}

#[test]
fn reliability_page_has_the_rows_of_the_ledger() {
    let rendered = ReliabilityLedger::load().rendered(&read_file("docs/reliability.md"));
    expect_file![root().join("docs/reliability.md")].assert_eq(&rendered);
}

#[test]
fn tests_are_distinguished_from_functions() {
    assert!(is_test("#[test]\nfn a() {}", "a"));
    assert!(is_test("    #[test]\n    #[ignore = \"x\"]\n    // Why.\n    fn a() {}", "a"));
    assert!(!is_test("fn a() {}", "a") && !is_test("#[test]\nfn ab() {}", "a"));
    assert!(!is_test("#[test]\nfn b() {}\n\nfn a() {}", "a"));
}
