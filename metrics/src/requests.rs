//! Request metrics as defined by vLLM, observed when the events of a request are delivered to its stream.
//!
//! End-to-end latency and time to first token start at the arrival of the body and so include tokenisation;
//! queue time starts at submission to the engine.

use super::histogram_buckets::HistogramFamily;
use super::metric_registrar::{MetricRegistrar, ReplicaOrSharedSeries};
use super::request_times::RequestTimes;
use prometheus::local::LocalHistogram;
use prometheus::{Error, Histogram, IntCounter};
use protocol::RowError;
use scheduler::{AbortCause, FinishReason, RequestError, TokenEvent};
use std::time::{Duration, Instant};

/// Values of the label `finished_reason`.
const FINISH_REASONS: [&str; 5] = ["stop", "length", "abort", "error", "repetition"];

/// Request metrics as defined by vLLM: latencies, token counts and finish reasons.
pub struct RequestMetrics {
    first_token: ReplicaOrSharedSeries<Histogram>,
    inter_token_latency: ReplicaOrSharedSeries<Histogram>,
    per_token: ReplicaOrSharedSeries<Histogram>,
    latency: ReplicaOrSharedSeries<Histogram>,
    queue: ReplicaOrSharedSeries<Histogram>,
    inference: ReplicaOrSharedSeries<Histogram>,
    prefill: ReplicaOrSharedSeries<Histogram>,
    decode: ReplicaOrSharedSeries<Histogram>,
    prompt_tokens: ReplicaOrSharedSeries<Histogram>,
    generation_tokens: ReplicaOrSharedSeries<Histogram>,
    max_generation_tokens: ReplicaOrSharedSeries<Histogram>,
    max_tokens: ReplicaOrSharedSeries<Histogram>,
    n: ReplicaOrSharedSeries<Histogram>,
    preemptions: ReplicaOrSharedSeries<Histogram>,
    computed_tokens: ReplicaOrSharedSeries<Histogram>,
    finished: [ReplicaOrSharedSeries<IntCounter>; 5],
    corrupted: ReplicaOrSharedSeries<IntCounter>,
}

impl RequestMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        use HistogramFamily::{InterTokenLatency, ParamsN, Preemptions, RequestLatency, TimeToFirstToken, Tokens};
        Ok(Self {
            first_token: f.histogram_of_replicas("vllm:time_to_first_token_seconds", "Time from the arrival of a request to its first token.", TimeToFirstToken)?,
            inter_token_latency: f.histogram_of_replicas("vllm:inter_token_latency_seconds", "Time between two deliveries of tokens of a request.", InterTokenLatency)?,
            per_token: f.histogram_of_replicas("vllm:request_time_per_output_token_seconds", "Mean time per output token after the first one, of a finished request.", InterTokenLatency)?,
            latency: f.histogram_of_replicas("vllm:e2e_request_latency_seconds", "Time from the arrival of a request to its end.", RequestLatency)?,
            queue: f.histogram_of_replicas("vllm:request_queue_time_seconds", "Queue time of a request, until it is first scheduled.", RequestLatency)?,
            inference: f.histogram_of_replicas("vllm:request_inference_time_seconds", "Time from the first scheduling of a request to its last token.", RequestLatency)?,
            prefill: f.histogram_of_replicas("vllm:request_prefill_time_seconds", "Time from the first scheduling of a request to its first token.", RequestLatency)?,
            decode: f.histogram_of_replicas("vllm:request_decode_time_seconds", "Time from the first token of a request to its last token.", RequestLatency)?,
            prompt_tokens: f.histogram_of_replicas("vllm:request_prompt_tokens", "Prompt tokens of a request.", Tokens)?,
            generation_tokens: f.histogram_of_replicas("vllm:request_generation_tokens", "Generated tokens of a request.", Tokens)?,
            max_generation_tokens: f.histogram_of_replicas("vllm:request_max_num_generation_tokens", "Maximum number of generated tokens of the choices of a prompt.", Tokens)?,
            max_tokens: f.histogram_of_replicas("vllm:request_params_max_tokens", "max_tokens of a request.", Tokens)?,
            n: f.histogram_of_replicas("vllm:request_params_n", "Requested choices (n) per prompt.", ParamsN)?,
            preemptions: f.histogram_of_replicas("vllm:request_num_preemptions", "Preemptions of a request.", Preemptions)?,
            computed_tokens: f.histogram_of_replicas("vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not in the prefix cache.", Tokens)?,
            finished: f.counters_of_replicas("vllm:request_success_total", "Finished requests, by reason.", "finished_reason", FINISH_REASONS)?.map(ReplicaOrSharedSeries::from),
            corrupted: f.counter_of_replicas("vllm:corrupted_requests_total", "Requests with NaN or infinite logits.")?.into(),
        })
    }

    /// Returns a recorder for token events that are delivered together; all events of a recorder have the
    /// same timestamp.
    pub fn delivery_round(&self) -> TokenEventRecorder<'_> {
        let inter_token_latencies =
            self.inter_token_latency.iter().map(Histogram::local).collect::<Vec<_>>().into();
        TokenEventRecorder { metrics: self, now: Instant::now(), inter_token_latencies }
    }

    /// Records that a request finished or was aborted by its client.
    pub fn ended(&self, times: &RequestTimes, finish: &FinishReason, now: Instant) {
        let Some(reason) = reason(finish) else { return };
        let replica = times.replica;
        self.finished[reason].of(replica).inc();
        if matches!(finish, FinishReason::Error(RequestError::RowFailed(RowError::NonFiniteLogits)))
        {
            self.corrupted.of(replica).inc();
        }
        self.latency.of(replica).observe(seconds(times.arrived, now));
        self.prompt_tokens.of(replica).observe(f64::from(times.prompt_tokens));
        self.generation_tokens.of(replica).observe(f64::from(times.generated));
        self.max_tokens.of(replica).observe(f64::from(times.max_tokens));
        self.preemptions.of(replica).observe(f64::from(times.preemptions));
        if let Some(max_tokens) = times.choices.ended(times.generated) {
            self.n.of(replica).observe(f64::from(times.choices.n));
            self.max_generation_tokens.of(replica).observe(f64::from(max_tokens));
        }
        self.phases(times);
    }

    /// Observes the durations of a request's phases (queue, prefill, decode). A request that was never
    /// scheduled has no phases.
    fn phases(&self, times: &RequestTimes) {
        let (Some(queued), Some(scheduled)) = (times.queued, times.scheduled()) else { return };
        let replica = times.replica;
        self.queue.of(replica).observe(queued.as_secs_f64());
        let computed = times.prompt_tokens.saturating_sub(times.cached_tokens);
        self.computed_tokens.of(replica).observe(f64::from(computed));
        let Some((first, last)) = times.tokens_at else { return };
        self.prefill.of(replica).observe(seconds(scheduled, first));
        self.decode.of(replica).observe(seconds(first, last));
        self.inference.of(replica).observe(seconds(scheduled, last));
        if times.generated > 1 {
            let per_token = seconds(first, last) / f64::from(times.generated - 1);
            self.per_token.of(replica).observe(per_token);
        }
    }
}

/// Recorder of token events that are delivered together.
pub struct TokenEventRecorder<'a> {
    metrics: &'a RequestMetrics,
    now: Instant,
    /// Inter-token latencies of these events. They are added to the shared histograms when the recorder is
    /// dropped, so that a token costs no write to shared memory.
    inter_token_latencies: ReplicaOrSharedSeries<LocalHistogram>,
}

impl TokenEventRecorder<'_> {
    /// Records an event that is delivered to the stream of its request.
    pub fn event(&self, times: &mut RequestTimes, event: &TokenEvent) {
        times.preemptions = event.preemptions;
        if let Some(admission) = event.first_admission {
            times.replica = admission.replica;
            times.queued = Some(Duration::from_millis(u64::from(admission.queued_ms)));
            times.cached_tokens = admission.cached_tokens;
        }
        if !event.tokens.is_empty() {
            times.generated += event.tokens.len() as u32;
            match &mut times.tokens_at {
                None => {
                    let first = seconds(times.arrived, self.now);
                    self.metrics.first_token.of(times.replica).observe(first);
                    times.tokens_at = Some((self.now, self.now));
                }
                Some((_, last)) => {
                    self.inter_token_latencies.of(times.replica).observe(seconds(*last, self.now));
                    *last = self.now;
                }
            }
        }
        if let Some(finish) = &event.finish_reason {
            self.metrics.ended(times, finish, self.now);
        }
    }
}

/// Index of a finish reason in `FINISH_REASONS`; `None` = the request was rejected.
fn reason(finish: &FinishReason) -> Option<usize> {
    match finish {
        FinishReason::Stop(_) | FinishReason::Abort(AbortCause::StopString) => Some(0),
        FinishReason::Length => Some(1),
        FinishReason::Abort(_) => Some(2),
        FinishReason::Error(_) => Some(3),
        FinishReason::Rejected(_) => None,
    }
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}
