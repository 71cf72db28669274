//! What a rank last did together with others, in words.

use std::fmt;

use collectives::CollectiveCall;
use protocol::Rank;

/// Runs of calls that share a line of a log.
const RUNS_PER_LINE: usize = 8;

/// What a rank last did in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankCalls {
    /// `tp` or `dp`.
    pub axis: &'static str,
    /// The rank, in the world.
    pub rank: Rank,
    /// Its calls, oldest first.
    pub calls: Vec<CollectiveCall>,
}

impl RankCalls {
    /// All of them, in lines of a few hundred bytes: calls behind each other that only differ by their numbers are one
    /// run.
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

impl fmt::Display for RankCalls {
    /// The newest of them, for a line of a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}: ", self.axis, self.rank.0)?;
        match self.calls.last() {
            Some(call) => write!(f, "{call}, {:?}", call.state),
            None => write!(f, "nothing yet"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::{CallState, CollectiveOp};
    use device::DType;

    fn call(sequence: u32, rows: u32, state: CallState) -> CollectiveCall {
        let (operation, dtype) = (CollectiveOp::AllReduce, DType::BF16);
        CollectiveCall { sequence, op: operation, dtype, rows, cols: 64, state }
    }

    fn lines(calls: Vec<CollectiveCall>) -> Vec<String> {
        RankCalls { axis: "tp", rank: Rank(3), calls }.lines()
    }

    #[test]
    fn equal_calls_are_merged() {
        let (done, waiting) = (CallState::Done, CallState::InProgress);
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
        let told = lines((1..=1_024).map(|n| call(n, n, CallState::Done)).collect());
        assert_eq!(told.len(), 128);
        assert!(told.iter().all(|line| line.len() < 512), "{told:?}");
    }
}
