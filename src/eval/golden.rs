//! `hadron eval golden`: teacher-forced comparison of a server with the reference logits of a golden fixture.
//!
//! The server scores the token ids of the fixture (`prompt_logprobs`). At each position, the
//! log-probabilities of the 64 ids that are most likely in the reference are compared, if the server reports
//! them. The regret is computed as well: the reference log-probability of the reference's most likely id
//! minus the reference log-probability of the server's most likely id.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use models::synth::{SynthDType, SynthOptions, write};
use serde_json::{Value, json};

use super::fixture::EvalFixture;
use crate::client::{ClientError, OpenAiClient};
use crate::config::{EvalGoldenArgs, ProcessEnvironment};

/// Number of token ids whose log-probabilities are compared at each position: the ids that are most likely in
/// the reference.
const TOP_K: usize = 64;

/// Writes the checkpoint of a golden fixture and prints the command that serves it.
pub(super) fn write_model(fixture: &Path, dir: &Path) -> Result<bool> {
    let fixture = EvalFixture::read(fixture)?;
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let config = dir.join("config.json");
    std::fs::write(&config, &fixture.config).with_context(|| config.display().to_string())?;
    let options =
        SynthOptions { seed: fixture.seed, dtype: SynthDType::F32, ..SynthOptions::default() };
    write(&config, dir, &options, &mut |_, _| {})?;
    let line = format!("hadron serve {} --dtype float32 --max-logprobs {TOP_K}", dir.display());
    writeln!(std::io::stdout(), "{line}")?;
    Ok(true)
}

/// Runs the comparison and prints its result. Returns false if a bound of `args` is exceeded.
pub(super) async fn run(args: &EvalGoldenArgs, environment: &ProcessEnvironment) -> Result<bool> {
    let fixture = EvalFixture::read(&args.fixture)?;
    let client = OpenAiClient::new(&args.client.base_url, &args.client, environment)?;
    let model = client.model(args.client.model.as_deref()).await.context("/v1/models")?;
    let reply = score(&client, &model, &fixture).await?;
    let positions = reply["choices"][0]["prompt_logprobs"].as_array();
    let positions = positions.context("no prompt_logprobs in the reply")?;
    ensure!(
        positions.len() == fixture.tokens.len(),
        "prompt_logprobs must have one entry per prompt token"
    );
    let mut differences = GoldenLogprobDifferences::default();
    for (at, position) in positions.iter().enumerate().skip(1) {
        differences.add(&fixture.logprobs(at - 1), &entries(position)?);
    }
    differences.print()?;
    Ok(differences.mean() <= args.mean_max
        && differences.p99() <= args.p99_max
        && differences.regret <= args.regret_max)
}

/// Requests the log-probabilities of the token ids of the fixture.
async fn score(client: &OpenAiClient, model: &str, fixture: &EvalFixture) -> Result<Value> {
    let body = json!({
        "model": model,
        "prompt": fixture.tokens,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": TOP_K.min(fixture.vocab_size),
    });
    let reply = client.post("/v1/completions", &body).await;
    reply.map_err(|error| match error {
        ClientError::Status { status: 400, message } => anyhow::anyhow!(
            "{message}; serve the model of the fixture (--write-model) with --max-logprobs {TOP_K}"
        ),
        other => other.into(),
    })
}

/// A token id with its log-probability and rank, as reported by the server in `prompt_logprobs`.
#[derive(Debug, Clone, Copy)]
struct PromptLogprobEntry {
    id: usize,
    logprob: f64,
    rank: u64,
}

/// Parses the token ids and log-probabilities that the server reports for one position of `prompt_logprobs`.
fn entries(position: &Value) -> Result<Vec<PromptLogprobEntry>> {
    let ids = position.as_object().context("a position has no entries")?;
    let entry = |(id, entry): (&String, &Value)| {
        let (logprob, rank) = (entry["logprob"].as_f64()?, entry["rank"].as_u64()?);
        Some(PromptLogprobEntry { id: id.parse().ok()?, logprob, rank })
    };
    ids.iter().map(entry).collect::<Option<_>>().context("a malformed prompt_logprobs entry")
}

/// Differences between the log-probabilities of the server and of the reference, accumulated over positions.
#[derive(Debug, Default)]
struct GoldenLogprobDifferences {
    differences: Vec<f64>,
    regret: f64,
    positions: usize,
    top1_mismatches: usize,
}

impl GoldenLogprobDifferences {
    /// Adds the differences at one position. `reference`: log-probabilities of all ids in the reference;
    /// `served`: ids and log-probabilities that the server reports.
    fn add(&mut self, reference: &[f64], served: &[PromptLogprobEntry]) {
        let mut order: Vec<usize> = (0..reference.len()).collect();
        order.sort_by(|&a, &b| reference[b].total_cmp(&reference[a]));
        let top = &order[..TOP_K.min(order.len())];
        let compared = served.iter().filter(|entry| top.contains(&entry.id));
        self.differences.extend(compared.map(|entry| (reference[entry.id] - entry.logprob).abs()));
        let best = served.iter().find(|entry| entry.rank == 1 && entry.id < reference.len());
        if let Some(&PromptLogprobEntry { id, .. }) = best {
            self.regret = self.regret.max(reference[order[0]] - reference[id]);
            self.top1_mismatches += usize::from(id != order[0]);
        }
        self.positions += 1;
    }

    fn mean(&self) -> f64 {
        self.differences.iter().sum::<f64>() / self.differences.len().max(1) as f64
    }

    fn p99(&self) -> f64 {
        let mut sorted = self.differences.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = (sorted.len() as f64 * 0.99) as usize;
        sorted.get(at.min(sorted.len().max(1) - 1)).copied().unwrap_or(f64::INFINITY)
    }

    fn print(&self) -> Result<()> {
        let max = self.differences.iter().copied().fold(0.0, f64::max);
        writeln!(
            std::io::stdout(),
            "{} positions, {} log-probabilities: difference mean {:.2e}, p99 {:.2e}, max {max:.2e}; \
             regret {:.2e}; different top-1 token at {}",
            self.positions,
            self.differences.len(),
            self.mean(),
            self.p99(),
            self.regret,
            self.top1_mismatches,
        )?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprob_differences_and_regret_are_measured() {
        let mut differences = GoldenLogprobDifferences::default();
        let entry = |id, logprob, rank| PromptLogprobEntry { id, logprob, rank };
        let reference = [0.5_f64.ln(), 0.3_f64.ln(), 0.2_f64.ln()];
        differences.add(&reference, &[entry(0, 0.5_f64.ln(), 1), entry(1, 0.3_f64.ln() + 0.1, 2)]);
        assert_eq!((differences.differences.len(), differences.top1_mismatches), (2, 0));
        assert!((differences.mean() - 0.05).abs() < 1e-9 && (differences.p99() - 0.1).abs() < 1e-9);
        differences.add(&reference, &[entry(2, 0.2_f64.ln(), 1)]);
        assert_eq!(differences.top1_mismatches, 1);
        assert!((differences.regret - 2.5_f64.ln()).abs() < 1e-9);
        // The 99th percentile is infinite if no ids were compared, so the check fails.
        assert!(GoldenLogprobDifferences::default().p99().is_infinite());
    }
}
