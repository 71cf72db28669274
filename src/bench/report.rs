//! Output of benchmark results: tables on stdout, and JSON files.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};

/// Prints a table with right-aligned columns, each as wide as its widest cell.
pub(super) fn print_table(headings: &[&str], rows: &[Vec<String>]) -> Result<()> {
    let mut widths: Vec<usize> = headings.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}"));
        padded.collect::<Vec<_>>().join("  ")
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", line(headings.to_vec()))?;
    for row in rows {
        writeln!(out, "{}", line(row.iter().map(String::as_str).collect()))?;
    }
    Ok(())
}

/// Returns the content of a result file: the kind of benchmark, its settings, the version of `hadron`, and
/// the results of all levels.
pub(super) fn result<T: Serialize>(kind: &str, settings: &Value, levels: &[T]) -> Value {
    json!({
        "kind": kind,
        "version": env!("CARGO_PKG_VERSION"),
        "settings": settings,
        "levels": levels,
    })
}

/// Writes a result file, if `path` is given.
pub(super) fn write(path: Option<&Path>, result: &Value) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(result)? + "\n";
    std::fs::write(path, text).with_context(|| path.display().to_string())
}
