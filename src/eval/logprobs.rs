//! `hadron eval logprobs`: scores given token ids on a server, through `echo` and `logprobs`, and compares
//! the log-probabilities with those of an earlier run.

use std::io::Write as _;

use anyhow::{Context as _, Result, ensure};
use protocol::Token;
use serde_json::{Value, json};

use super::agreement::{self, RunLogprobDifferences};
use super::questions::read_ids;
use crate::client::{OpenAiClient, run_limited};
use crate::config::{EvalLogprobsArgs, ProcessEnvironment};
use crate::progress::{ProgressReporter, ProgressUnit};

/// Token ids of one line, with the log-probabilities that a server reports.
#[derive(Debug, Clone)]
pub(super) struct ScoredTokens {
    /// Token ids of the line.
    pub(super) tokens: Vec<Token>,
    /// Most likely id at the position of each token except the first.
    pub(super) top: Vec<Token>,
    /// Log-probability of each token except the first, given the tokens before it.
    pub(super) logprobs: Vec<f64>,
}

impl ScoredTokens {
    /// Returns the JSON object that is written to the output file.
    pub(super) fn json(&self, index: usize) -> Value {
        json!({
            "index": index,
            "logprob": self.logprobs.iter().sum::<f64>(),
            "tokens": self.tokens,
            "top": self.top,
            "token_logprobs": self.logprobs,
        })
    }
}

/// Scores every line and writes one JSON object per line. Returns false if the differences from the reference
/// exceed a bound of `args`.
pub(super) async fn run(args: &EvalLogprobsArgs, environment: &ProcessEnvironment) -> Result<bool> {
    let lines = read_ids(&args.data)?;
    ensure!(!lines.is_empty(), "{}: no lines", args.data.display());
    let is_share = |share: f64| (0.0..=1.0).contains(&share);
    ensure!(args.top_share_min.is_none_or(is_share), "--top-share-min: from 0 to 1");
    let is_valid_delta = |delta: f64| delta.is_finite() && delta >= 0.0;
    ensure!(args.mean_delta_max.is_none_or(is_valid_delta), "--mean-delta-max: at least 0");
    let reference = args.reference.as_deref().map(agreement::read).transpose()?;
    let client = OpenAiClient::new(&args.client.base_url, &args.client, environment)?;
    let model = client.model(args.client.model.as_deref()).await.context("/v1/models")?;
    let progress = ProgressReporter::new("lines", lines.len() as u64, ProgressUnit::Items);
    let score = async |(index, ids): (usize, Vec<Token>)| {
        let scored = scored(&client, &model, ids).await;
        scored.with_context(|| format!("line {}", index + 1))
    };
    let indexed_lines = lines.into_iter().enumerate().collect();
    let scored = run_limited(indexed_lines, args.concurrency, &progress, score).await;
    progress.finish();
    let scored = scored.into_iter().collect::<Result<Vec<_>>>()?;
    write(args, &scored)?;
    report(&scored);
    reference.map_or(Ok(true), |reference| agrees(args, &scored, &reference))
}

fn write(args: &EvalLogprobsArgs, scored: &[ScoredTokens]) -> Result<()> {
    let mut out: Box<dyn std::io::Write> = match &args.output {
        Some(path) => {
            Box::new(std::fs::File::create(path).with_context(|| path.display().to_string())?)
        }
        None => Box::new(std::io::stdout().lock()),
    };
    for (index, line) in scored.iter().enumerate() {
        writeln!(out, "{}", line.json(index))?;
    }
    Ok(())
}

fn report(scored: &[ScoredTokens]) {
    let sum: f64 = scored.iter().flat_map(|line| &line.logprobs).sum();
    let count: usize = scored.iter().map(|line| line.logprobs.len()).sum();
    let perplexity = (-sum / count.max(1) as f64).exp();
    tracing::info!("{count} tokens, log-probability {sum:.4}, perplexity {perplexity:.4}");
}

/// Compares the scores with those of an earlier run, line by line. Returns false if a bound is exceeded.
fn agrees(
    args: &EvalLogprobsArgs,
    scored: &[ScoredTokens],
    reference: &[ScoredTokens],
) -> Result<bool> {
    let (lines, reference_lines) = (scored.len(), reference.len());
    ensure!(lines == reference_lines, "--data has {lines} lines, --reference {reference_lines}");
    let mut agreement = RunLogprobDifferences::default();
    for (index, (line, reference)) in scored.iter().zip(reference).enumerate() {
        agreement.add(line, reference).with_context(|| format!("line {}", index + 1))?;
    }
    let (mean, top) = (agreement.delta_mean(), agreement.top_share());
    tracing::info!(
        "{} tokens: mean difference {mean:.6}, maximum {:.6}; equal most likely id at {:.2} % of the positions",
        agreement.tokens,
        agreement.delta_max,
        100.0 * top
    );
    let exceeded_max = args.mean_delta_max.filter(|&max| mean > max);
    let missed_min = args.top_share_min.filter(|&min| top < min);
    if let Some(max) = exceeded_max {
        tracing::error!("mean difference {mean:.6} is above --mean-delta-max {max}");
    }
    if let Some(min) = missed_min {
        tracing::error!("share of equal most likely ids {top:.4} is below --top-share-min {min}");
    }
    Ok(exceeded_max.is_none() && missed_min.is_none())
}

async fn scored(client: &OpenAiClient, model: &str, tokens: Vec<Token>) -> Result<ScoredTokens> {
    let body = json!({
        "model": model,
        "prompt": tokens,
        "max_tokens": 0,
        "temperature": 0.0,
        "echo": true,
        "logprobs": 1,
        "return_tokens_as_token_ids": true,
    });
    let reply = client.post("/v1/completions", &body).await?;
    let lists = &reply["choices"][0]["logprobs"];
    let entries = |name: &str| -> Result<Vec<Value>> {
        let entries = lists[name].as_array().with_context(|| format!("no {name} in the reply"))?;
        // A server that must generate a token in order to score the prompt appends generated tokens; these
        // are skipped.
        Ok(entries.iter().take(tokens.len()).skip(1).cloned().collect())
    };
    let logprobs: Option<Vec<f64>> = entries("token_logprobs")?.iter().map(Value::as_f64).collect();
    let top: Option<Vec<Token>> = entries("top_logprobs")?.iter().map(most_likely).collect();
    let is_complete = |count: usize| count + 1 == tokens.len();
    let logprobs = logprobs.filter(|list| is_complete(list.len()));
    let top = top.filter(|list| is_complete(list.len()));
    let missing_entries = "the reply does not have one entry per token";
    let (logprobs, top) = (logprobs.context(missing_entries)?, top.context(missing_entries)?);
    Ok(ScoredTokens { tokens, top, logprobs })
}

/// Returns the id with the largest log-probability among the ids that the server reports for a position.
/// Besides the most likely ids, the server may report the scored token.
fn most_likely(candidates: &Value) -> Option<Token> {
    let entries = candidates.as_object()?.iter();
    let by_logprob = |(_, a): &(_, &Value), (_, b): &(_, &Value)| {
        a.as_f64().unwrap_or(f64::MIN).total_cmp(&b.as_f64().unwrap_or(f64::MIN))
    };
    let (name, _) = entries.max_by(by_logprob)?;
    name.strip_prefix("token_id:")?.parse().ok()
}
