//! First seeds of randomised tests, and shards of long tests. `.ci/run` derives `HADRON_CURSOR` from the hash of the commit, so that
//! the tests of a commit use seeds that hardly any other commit has used, and its run can be repeated. Without the variable
//! (`cargo test`), the seeds are fixed.

/// The number in `HADRON_CURSOR`, from which the seeds of a run are derived; 0 if the variable is unset.
#[allow(clippy::disallowed_methods, reason = "the gate says where drawn tests begin")]
pub(crate) fn cursor() -> u64 {
    std::env::var("HADRON_CURSOR").ok().map_or(0, |text| text.parse().expect("a number"))
}

/// Returns the first of the `count` seeds of this run: `fixed` if `HADRON_CURSOR` is unset; otherwise the
/// start of a range of `count` seeds at or above `fresh`, which is different for each value of
/// `HADRON_CURSOR`.
pub(crate) fn first_seed(fixed: u64, fresh: u64, count: u64) -> u64 {
    match cursor() {
        0 => fixed,
        cursor => fresh + cursor * count,
    }
}

/// Divides tests into `turns` shards, of which a run executes one. Returns whether the run executes shard
/// `turn`: if its number equals `HADRON_CURSOR` modulo `turns`, or if the variable is unset or 0.
#[allow(dead_code, reason = "not every test target has shards")]
pub(crate) fn is_selected_by_cursor(turn: u64, turns: u64) -> bool {
    let cursor = cursor();
    cursor == 0 || cursor % turns == turn % turns
}
