//! `hadron eval logprobs`: the log-probability of given token ids, through echo and logprobs.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use protocol::Token;
use serde_json::{Value, json};

use super::questions::read_ids;
use crate::client::{Client, run_limited};
use crate::config::{Environment, LogprobsArgs};
use crate::progress::{Progress, Unit};

/// Scores every line and writes one JSON object for each.
pub(super) async fn run(args: &LogprobsArgs, environment: &Environment) -> Result<bool> {
    let lines = read_ids(&args.data)?;
    let client = Client::new(&args.client.base_url, &args.client, environment)?;
    let model = client.model(args.client.model.as_deref()).await.context("/v1/models")?;
    let progress = Progress::new("lines", lines.len() as u64, Unit::Items);
    let score = async |(index, ids): (usize, Vec<Token>)| {
        let scored = logprobs(&client, &model, &ids).await;
        scored.with_context(|| format!("line {}", index + 1))
    };
    let numbered = lines.into_iter().enumerate().collect();
    let scored = run_limited(numbered, args.concurrency, &progress, score).await;
    progress.finish();

    let mut out: Box<dyn std::io::Write> = match &args.output {
        Some(path) => {
            Box::new(std::fs::File::create(path).with_context(|| path.display().to_string())?)
        }
        None => Box::new(std::io::stdout().lock()),
    };
    let (mut sum, mut count) = (0.0, 0);
    for (index, scored) in scored.into_iter().enumerate() {
        let logprobs = scored?;
        let line_sum: f64 = logprobs.iter().sum();
        sum += line_sum;
        count += logprobs.len();
        let line = json!({"index": index, "logprob": line_sum, "token_logprobs": logprobs});
        writeln!(out, "{line}")?;
    }
    let perplexity = (-sum / count.max(1) as f64).exp();
    tracing::info!("{count} tokens, log-probability {sum:.4}, perplexity {perplexity:.4}");
    Ok(true)
}

/// Log-probabilities of `ids[1..]`, each given those before it.
async fn logprobs(client: &Client, model: &str, ids: &[Token]) -> Result<Vec<f64>> {
    let body = json!({
        "model": model,
        "prompt": ids,
        "max_tokens": 0,
        "temperature": 0.0,
        "echo": true,
        "logprobs": 0,
    });
    let reply = client.post("/v1/completions", &body).await?;
    let listed = &reply["choices"][0]["logprobs"]["token_logprobs"];
    let listed = listed.as_array().context("no token_logprobs in the reply")?;
    // A server that cannot score without generating appends tokens of its own.
    let logprobs: Option<Vec<f64>> =
        listed.iter().take(ids.len()).skip(1).map(Value::as_f64).collect();
    logprobs
        .filter(|logprobs| logprobs.len() + 1 == ids.len())
        .context("the reply does not hold one logprob per token")
}
