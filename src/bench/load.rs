//! `hadron bench serve`: load generator for OpenAI-compatible servers. The load is closed (a fixed number of
//! concurrent requests) or open (Poisson arrivals at a request rate, with a maximum number of concurrent
//! requests).

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::prompts::PromptGenerator;
use super::report;
use super::rng::SplitMix64;
use super::samples::{LoadLevelReport, RequestMeasurement};
use crate::client::{ClientError, OpenAiClient};
use crate::config::{BenchServeArgs, ProcessEnvironment};
use crate::progress::{ProgressReporter, ProgressUnit};

/// Stream number of the random number generator for arrival times.
const ARRIVAL_STREAM: u64 = u64::MAX - 1;

/// Measures every concurrency level of `args`, one after the other.
pub(super) fn run(args: &BenchServeArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    if args.concurrency.contains(&0) {
        bail!("--concurrency: at least 1");
    }
    if args.request_rate.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
        bail!("--request-rate: above 0");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure(args, environment))
}

async fn measure(args: &BenchServeArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let client = Arc::new(OpenAiClient::new(&args.client.base_url, &args.client, environment)?);
    let card = client.first_model_card().await.context("/v1/models")?;
    let model = client.model(args.client.model.as_deref()).await?;
    let prompts = PromptGenerator::new(args, model.clone(), &card)?;
    let mut levels = Vec::new();
    for &concurrency in &args.concurrency {
        let count = args.num_prompts.unwrap_or((4 * concurrency).max(4));
        let load = LoadGenerator { client: &client, path: prompts.path(), concurrency };
        let warmup = (0..args.warmup).map(|i| prompts.body(usize::MAX >> 32, i)).collect();
        load.run(warmup, None).await;
        let bodies: Vec<Bytes> = (0..count).map(|i| prompts.body(concurrency, i)).collect();
        let arrivals = args.request_rate.map(|rate| arrival_times(args.seed, rate, count));
        let (samples, errors) = load.run(bodies, arrivals).await;
        levels.push(LoadLevelReport::new(concurrency, args.request_rate, &samples, &errors));
    }
    print(&levels)?;
    let settings = json!({
        "model": model,
        "endpoint": prompts.path(),
        "input_len": args.input_len,
        "output_len": args.output_len,
        "shared_prefix": args.shared_prefix,
        "seed": args.seed,
    });
    report::write(args.output.as_deref(), &report::result("serve", &settings, &levels))?;
    let failed = levels.iter().any(|level| level.errors > 0);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the send time of each request relative to the start of the run. The requests form a Poisson
/// process.
fn arrival_times(seed: u64, rate: f64, count: usize) -> Vec<Duration> {
    let mut rng = SplitMix64::new(seed, ARRIVAL_STREAM);
    let mut at = 0.0;
    let next_arrival = |_| {
        let now = at;
        at += rng.exponential() / rate;
        Duration::from_secs_f64(now)
    };
    (0..count).map(next_arrival).collect()
}

/// Load generator for one concurrency level.
struct LoadGenerator<'a> {
    client: &'a Arc<OpenAiClient>,
    path: &'static str,
    concurrency: usize,
}

impl LoadGenerator<'_> {
    /// Sends one request per body, at most `concurrency` at a time, and waits for all responses. `arrivals`:
    /// earliest send times of the requests, relative to the start. Returns the measurements and the error
    /// messages.
    async fn run(
        &self,
        bodies: Vec<Bytes>,
        arrivals: Option<Vec<Duration>>,
    ) -> (Vec<RequestMeasurement>, Vec<String>) {
        if bodies.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let label = format!("concurrency {}", self.concurrency);
        let progress = ProgressReporter::new(&label, bodies.len() as u64, ProgressUnit::Items);
        let permits = Arc::new(Semaphore::new(self.concurrency));
        let start = tokio::time::Instant::now();
        let mut running = JoinSet::new();
        let (mut samples, mut errors) = (Vec::new(), Vec::new());
        let mut record =
            |result: Result<Result<RequestMeasurement, ClientError>, tokio::task::JoinError>| {
                progress.add(1);
                match result {
                    Ok(Ok(sample)) => samples.push(sample),
                    Ok(Err(error)) => errors.push(error.to_string()),
                    Err(error) => errors.push(error.to_string()),
                }
            };
        for (index, body) in bodies.into_iter().enumerate() {
            if let Some(arrivals) = &arrivals {
                tokio::time::sleep_until(start + arrivals[index]).await;
            }
            let permit = Arc::clone(&permits).acquire_owned().await;
            let (client, path) = (Arc::clone(self.client), self.path);
            running.spawn(async move {
                let _permit = permit; // Dropped when the response is complete.
                send_request(&client, path, body).await
            });
            while let Some(result) = running.try_join_next() {
                record(result);
            }
        }
        while let Some(result) = running.join_next().await {
            record(result);
        }
        progress.finish();
        (samples, errors)
    }
}

/// Fields of a completion chunk that the load generator reads.
#[derive(Deserialize)]
struct StreamedChunk {
    #[serde(default)]
    choices: Vec<StreamedChoice>,
    usage: Option<StreamedUsage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct StreamedChoice {
    delta: Option<StreamedDelta>,
    finish_reason: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct StreamedDelta {
    role: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    content: Option<String>,
}

#[derive(Deserialize)]
struct StreamedUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Deserialize)]
struct PromptTokensDetails {
    cached_tokens: Option<u64>,
}

impl StreamedChoice {
    /// Whether this is the first chunk of a chat response, which has a role and no content.
    fn is_role_chunk(&self) -> bool {
        self.finish_reason.is_none()
            && self.delta.as_ref().is_some_and(|delta| {
                delta.role.is_some() && delta.content.as_deref().unwrap_or("").is_empty()
            })
    }
}

/// Sends one request and records the arrival times of its stream events.
async fn send_request(
    client: &OpenAiClient,
    path: &str,
    body: Bytes,
) -> Result<RequestMeasurement, ClientError> {
    let sent = Instant::now();
    let mut stream = client.post_stream(path, body).await?;
    let (mut first, mut last) = (None, sent);
    let mut gaps = Vec::new();
    let mut usage: Option<StreamedUsage> = None;
    let mut done = false;
    while let Some(event) = stream.next().await? {
        if event.data == b"[DONE]" {
            done = true;
            continue;
        }
        let chunk: StreamedChunk = serde_json::from_slice(event.data)
            .map_err(|e| ClientError::Reply(format!("invalid event: {e}")))?;
        if let Some(error) = chunk.error {
            return Err(ClientError::Reply(error.to_string()));
        }
        usage = chunk.usage.or(usage);
        if chunk.choices.iter().all(StreamedChoice::is_role_chunk) {
            continue;
        }
        if first.is_some() {
            gaps.push(event.at.duration_since(last).as_secs_f32());
        }
        first.get_or_insert(event.at);
        last = event.at;
    }
    let Some(first) = first.filter(|_| done) else {
        return Err(ClientError::Reply("the stream ended before [DONE]".to_owned()));
    };
    let cached = |usage: &StreamedUsage| usage.prompt_tokens_details.as_ref()?.cached_tokens;
    Ok(RequestMeasurement {
        sent,
        first,
        last,
        output_tokens: usage.as_ref().map_or(gaps.len() as u64 + 1, |u| u.completion_tokens),
        prompt_tokens: usage.as_ref().map_or(0, |u| u.prompt_tokens),
        cached_tokens: usage.as_ref().and_then(cached).unwrap_or(0),
        gaps,
    })
}

fn print(levels: &[LoadLevelReport]) -> Result<()> {
    let headings = [
        "conc",
        "ok",
        "errors",
        "out tok/s",
        "total tok/s",
        "req/s",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "p90",
        "p99",
        "ITL p50",
        "p99",
        "E2E p50",
        "p99",
    ];
    let row = |l: &LoadLevelReport| {
        let mut cells = vec![
            l.concurrency.to_string(),
            l.requests.to_string(),
            l.errors.to_string(),
            format!("{:.1}", l.output_tok_s),
            format!("{:.1}", l.total_tok_s),
            format!("{:.2}", l.requests_per_s),
        ];
        let (ttft, tpot, itl, e2e) = (&l.ttft_ms, &l.tpot_ms, &l.itl_ms, &l.e2e_ms);
        let figures = [
            ttft.p50, ttft.p90, ttft.p99, tpot.p50, tpot.p90, tpot.p99, itl.p50, itl.p99, e2e.p50,
            e2e.p99,
        ];
        cells.extend(figures.iter().map(|ms| format!("{ms:.2}")));
        cells
    };
    report::print_table(&headings, &levels.iter().map(row).collect::<Vec<_>>())?;
    for level in levels.iter().filter(|level| level.errors > 0) {
        let error = level.first_error.as_deref().unwrap_or("unknown");
        tracing::error!(
            "concurrency {}: {} requests failed, first error: {error}",
            level.concurrency,
            level.errors
        );
    }
    Ok(())
}
