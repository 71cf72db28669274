//! `hadron events tail`: prints KV events when they arrive.

use std::io::{BufWriter, Write};
use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;

use super::subscriber::{EventSubscriber, RawKvEventBatch, SubscriptionEvent};
use super::{source, table};
use crate::config::{EventsTailArgs, ProcessEnvironment};
use metrics::kv_events::decode;

/// Prints events until the requested number of batches or duration is reached, or stdout is closed.
pub(super) fn run(args: &EventsTailArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let addresses = source::resolve(&args.subscribe, environment)?;
    let duration = args.duration.map(|duration| duration.0);
    let mut subscriber = EventSubscriber::open(&args.subscribe, &addresses, duration)?;
    let mut out = BufWriter::new(std::io::stdout());
    if !args.json {
        writeln!(out, "{}", table::HEADER)?;
        out.flush()?;
    }
    while let Some(event) = subscriber.next()? {
        let text = if args.json { json_lines(&event) } else { rows(&event) };
        if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
            break; // Stdout is closed, for example by `| head`.
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn rows(event: &SubscriptionEvent) -> String {
    match event {
        SubscriptionEvent::Batch(batch) => batch_rows(batch),
        SubscriptionEvent::Gap { from, to, replayed } => {
            let missing = to - from + 1;
            format!("-- gap: {missing} batches missing from {from} on, {replayed} replayed\n")
        }
        SubscriptionEvent::Restart { seq } => {
            format!("-- the sequence restarted at {seq}\n")
        }
        SubscriptionEvent::Malformed(text) => format!("-- not a batch: {text}\n"),
    }
}

fn batch_rows(batch: &RawKvEventBatch) -> String {
    match decode(&batch.payload) {
        Ok(payload) if payload.events.is_empty() => String::new(), // A batch without events is a heartbeat.
        Ok(payload) => {
            let row =
                |event| table::row(batch.seq, payload.ts, payload.data_parallel_rank, event) + "\n";
            payload.events.iter().map(row).collect()
        }
        Err(error) => format!("-- batch {}: {error}\n", batch.seq),
    }
}

fn json_lines(event: &SubscriptionEvent) -> String {
    let value = match event {
        SubscriptionEvent::Batch(batch) => {
            let topic = String::from_utf8_lossy(&batch.topic);
            let (seq, replayed) = (batch.seq, batch.replayed);
            match decode(&batch.payload) {
                Ok(payload) => json!({"seq": seq, "topic": topic, "replayed": replayed,
                                      "ts": payload.ts, "events": payload.events,
                                      "data_parallel_rank": payload.data_parallel_rank}),
                Err(error) => json!({"seq": seq, "error": error.to_string()}),
            }
        }
        SubscriptionEvent::Gap { from, to, replayed } => {
            json!({"gap": {"from": from, "to": to, "replayed": replayed}})
        }
        SubscriptionEvent::Restart { seq } => json!({"restart": {"seq": seq}}),
        SubscriptionEvent::Malformed(text) => json!({"malformed": text}),
    };
    format!("{value}\n")
}
