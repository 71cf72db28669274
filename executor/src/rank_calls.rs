//! Call history of a rank: the most recent collectives, formatted for logs.

use std::fmt;

use collectives::CollectiveCall;
use protocol::Rank;

/// Maximum number of runs per log line. A run is a sequence of collectives that differ only in their sequence
/// numbers; it is logged as one item.
const RUNS_PER_LINE: usize = 8;

/// Most recent collectives of one rank in one communication group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveHistory {
    /// Kind of the communication group: `tp` or `dp`.
    pub axis: &'static str,
    /// Global rank that made the calls.
    pub rank: Rank,
    /// Calls of the rank, oldest first.
    pub calls: Vec<CollectiveCall>,
}

impl CollectiveHistory {
    /// Formats all calls as lines of a few hundred bytes. Successive calls that differ only in their sequence
    /// numbers are merged into one run.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let runs: Vec<String> = self.calls.chunk_by(is_same_call).map(run).collect();
        runs.chunks(RUNS_PER_LINE).map(|runs| runs.join("; ")).collect()
    }
}

fn is_same_call(a: &CollectiveCall, b: &CollectiveCall) -> bool {
    CollectiveCall { sequence: b.sequence, ..*a } == *b
}

fn run(calls: &[CollectiveCall]) -> String {
    match calls {
        [] => String::new(),
        [call] => format!("{call}, {:?}", call.state),
        [first, .., last] => format!("#{} to {last}, {:?}", first.sequence, last.state),
    }
}

impl fmt::Display for CollectiveHistory {
    /// Formats the rank and its most recent collective, for a log line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}: ", self.axis, self.rank.0)?;
        match self.calls.last() {
            Some(call) => write!(f, "{call}, {:?}", call.state),
            None => write!(f, "no call yet"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::{CollectiveCallState, CollectiveOp};
    use device::DType;

    fn call(sequence: u32, rows: u32, state: CollectiveCallState) -> CollectiveCall {
        let (operation, dtype) = (CollectiveOp::AllReduce, DType::BF16);
        CollectiveCall { sequence, op: operation, dtype, rows, cols: 64, state }
    }

    fn lines(calls: Vec<CollectiveCall>) -> Vec<String> {
        CollectiveHistory { axis: "tp", rank: Rank(3), calls }.lines()
    }

    #[test]
    fn equal_calls_are_merged() {
        let (done, waiting) = (CollectiveCallState::Done, CollectiveCallState::InProgress);
        let calls =
            vec![call(7, 1, done), call(8, 1, done), call(9, 2, done), call(10, 2, waiting)];
        assert_eq!(
            lines(calls),
            ["#7 to #8 all_reduce of 1 x 64 BF16, Done; #9 all_reduce of 2 x 64 BF16, Done; \
              #10 all_reduce of 2 x 64 BF16, InProgress"]
        );
        assert!(lines(Vec::new()).is_empty());
    }

    #[test]
    fn report_lines_are_bounded() {
        let report = lines((1..=1_024).map(|n| call(n, n, CollectiveCallState::Done)).collect());
        assert_eq!(report.len(), 128);
        assert!(report.iter().all(|line| line.len() < 512), "{report:?}");
    }
}
