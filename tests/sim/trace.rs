//! Trace of a simulation run: a hash of all events (I19) and, when one seed is replayed, readable lines.

use crate::hash_model::text::{EMPTY, avalanche, fold};
use std::fmt::Write as _;

/// The trace of one simulation run.
#[derive(Debug)]
pub(crate) struct SimTrace {
    hash: u64,
    lines: Option<String>,
}

impl SimTrace {
    /// Creates an empty trace; if `readable`, the trace also has readable lines.
    pub(crate) fn new(readable: bool) -> Self {
        Self { hash: EMPTY, lines: readable.then(String::new) }
    }

    /// Records the event `what`; `numbers` identify its replica, request or step.
    pub(crate) fn record(&mut self, now_ms: u64, what: &'static str, numbers: &[u64]) {
        let name = what.bytes().fold(0, |h, b| fold(h, u64::from(b)));
        self.hash = numbers.iter().fold(fold(fold(self.hash, now_ms), name), |h, &n| fold(h, n));
        self.line(|| format!("{now_ms:>8} ms  {what:<10} {numbers:?}"));
    }

    /// Adds numbers to the hash without a readable line.
    pub(crate) fn mix_into_hash(&mut self, numbers: impl Iterator<Item = u64>) {
        self.hash = numbers.fold(self.hash, fold);
    }

    /// Adds a readable line that is not part of the hash.
    pub(crate) fn line(&mut self, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            let _ = writeln!(lines, "{}", text());
        }
    }

    /// Returns the hash of everything recorded.
    pub(crate) fn hash(&self) -> u64 {
        avalanche(self.hash)
    }

    /// Returns the readable lines; empty if none were requested.
    pub(crate) fn into_lines(self) -> String {
        self.lines.unwrap_or_default()
    }
}
