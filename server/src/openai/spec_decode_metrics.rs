//! Statistics of speculative decoding of one request: the member `metrics.speculative_decoding` of replies, in
//! vLLM's form (`--per-request-spec-decode-metrics`).

use scheduler::VerifiedDraftCounts;
use serde::Serialize;

/// Statistics of draft tokens that replies contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpecDecodeMetricsOptions {
    /// Maximum number of draft tokens per step.
    pub draft_tokens: u8,
    /// Whether replies list the counts of each step.
    pub with_steps: bool,
}

/// Draft tokens of one request that the model has verified.
#[derive(Debug)]
pub(crate) struct SpecDecodeStepCounts {
    options: SpecDecodeMetricsOptions,
    /// For each number of accepted draft tokens, the number of steps.
    histogram: Vec<u32>,
    drafted: u64,
    /// Counts of each step; empty unless replies list them.
    steps: Vec<VerifiedDraftCounts>,
}

/// JSON form of the statistics.
#[derive(Debug, Serialize)]
struct SpecDecodeStatistics<'a> {
    mean_acceptance_length: f64,
    draft_acceptance_rate: f64,
    acceptance_histogram: &'a [u32],
    num_spec_steps: u64,
    num_accepted_draft_tokens: u64,
    num_draft_tokens: u64,
    num_spec_tokens: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_step_accepted: Option<Vec<u8>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_step_drafted: Option<Vec<u8>>,
}

impl SpecDecodeStepCounts {
    /// Creates the counts of a request without steps.
    pub(crate) fn new(options: SpecDecodeMetricsOptions) -> Self {
        let histogram = vec![0; usize::from(options.draft_tokens) + 1];
        Self { options, histogram, drafted: 0, steps: Vec::new() }
    }

    /// Adds one step; a step without draft tokens is not counted.
    pub(crate) fn add(&mut self, counts: VerifiedDraftCounts) {
        let VerifiedDraftCounts { drafted, accepted } = counts;
        if drafted == 0 {
            return;
        }
        if let Some(steps) = self.histogram.get_mut(usize::from(accepted)) {
            *steps += 1;
        }
        self.drafted += u64::from(drafted);
        if self.options.with_steps {
            self.steps.push(counts);
        }
    }

    /// Returns the statistics as JSON text.
    pub(crate) fn json(&self) -> String {
        let steps: u64 = self.histogram.iter().map(|&count| u64::from(count)).sum();
        let accepted_by_count = (0_u64..).zip(&self.histogram);
        let accepted: u64 =
            accepted_by_count.map(|(accepted, &count)| accepted * u64::from(count)).sum();
        let share =
            |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let list = |of: fn(&VerifiedDraftCounts) -> u8| {
            self.options.with_steps.then(|| self.steps.iter().map(of).collect())
        };
        let statistics = SpecDecodeStatistics {
            mean_acceptance_length: 1.0 + share(accepted, steps),
            draft_acceptance_rate: share(accepted, self.drafted),
            acceptance_histogram: &self.histogram,
            num_spec_steps: steps,
            num_accepted_draft_tokens: accepted,
            num_draft_tokens: self.drafted,
            num_spec_tokens: self.options.draft_tokens,
            per_step_accepted: list(|counts| counts.accepted),
            per_step_drafted: list(|counts| counts.drafted),
        };
        serde_json::to_string(&statistics).unwrap_or_else(|_| "null".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn statistics(with_steps: bool, steps: &[[u8; 2]]) -> Value {
        let mut counts =
            SpecDecodeStepCounts::new(SpecDecodeMetricsOptions { draft_tokens: 3, with_steps });
        for &[drafted, accepted] in steps {
            counts.add(VerifiedDraftCounts { drafted, accepted });
        }
        serde_json::from_str(&counts.json()).unwrap()
    }

    #[test]
    fn statistics_have_the_values_of_vllm() {
        let expected = json!({
            "mean_acceptance_length": 2.25, "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [1, 2, 0, 1], "num_spec_steps": 4,
            "num_accepted_draft_tokens": 5, "num_draft_tokens": 10, "num_spec_tokens": 3,
        });
        let steps = [[3, 1], [0, 0], [3, 3], [1, 0], [3, 1]];
        assert_eq!(statistics(false, &steps), expected);
        let mut detailed = expected;
        detailed["per_step_accepted"] = json!([1, 3, 0, 1]);
        detailed["per_step_drafted"] = json!([3, 3, 1, 3]);
        assert_eq!(statistics(true, &steps), detailed);
    }

    #[test]
    fn statistics_without_drafts_are_zero() {
        let empty = statistics(true, &[[0, 0]]);
        assert_eq!(empty["acceptance_histogram"], json!([0, 0, 0, 0]));
        assert_eq!((&empty["num_spec_steps"], &empty["per_step_drafted"]), (&json!(0), &json!([])));
        assert_eq!(empty["draft_acceptance_rate"], 0.0);
    }
}
