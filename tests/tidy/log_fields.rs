//! Checks that the fields of log events do not contain the `Debug` text of Rust types, because operators read
//! them.

use crate::source_tree::rust_files;

const MACROS: [&str; 5] = ["trace!(", "debug!(", "info!(", "warn!(", "error!("];

/// Returns the arguments of each log macro call in a source text, with the byte offset of the call.
fn log_events(text: &str) -> Vec<(usize, &str)> {
    let starts = text.match_indices("tracing::").filter_map(|(at, prefix)| {
        let name = &text[at + prefix.len()..];
        let found = MACROS.iter().find(|found| name.starts_with(*found))?;
        Some((at, at + prefix.len() + found.len()))
    });
    let events = starts.map(|(at, start)| {
        let mut depth = 1;
        let end = text[start..].find(|c: char| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        });
        (at, &text[start..end.map_or(text.len(), |end| start + end)])
    });
    events.collect()
}

/// Whether the arguments of a log macro format a value with `Debug` (`?field` or `{:?}`).
fn writes_debug_text(arguments: &str) -> bool {
    let mut before = ',';
    let debug_field = arguments.chars().any(|c| {
        let is_sigil = c == '?' && matches!(before, ',' | '=');
        if !c.is_whitespace() {
            before = c;
        }
        is_sigil
    });
    debug_field || arguments.contains(":?}")
}

#[test]
fn log_fields_are_not_debug_text() {
    let files = rust_files();
    let product = files.iter().filter(|file| !file.path.contains("tests/"));
    let hits: Vec<String> = product
        .flat_map(|file| {
            let events = log_events(&file.text).into_iter();
            let debug = events.filter(|(_, arguments)| writes_debug_text(arguments));
            debug.map(|(at, _)| {
                format!("{}:{}", file.path, file.text[..at].matches('\n').count() + 1)
            })
        })
        .collect();
    assert!(hits.is_empty(), "log events with Debug text:\n  {}", hits.join("\n  "));
    assert!(writes_debug_text("%a, ?b, \"x\"") && writes_debug_text("a = ?b, \"x\""));
    assert!(writes_debug_text("\"{x:?}\"") && !writes_debug_text("a = b?, \"what?\""));
}
