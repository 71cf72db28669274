//! `hadron events dump`: writes the received batches to a file without decoding them.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use rmp::encode::{write_array_len, write_bin, write_uint};

use super::source;
use super::subscriber::{EventSubscriber, SubscriptionEvent};
use crate::config::{EventsDumpArgs, ProcessEnvironment};

/// Writes batches until the requested number of batches or the requested duration is reached.
pub(super) fn run(args: &EventsDumpArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let addresses = source::resolve(&args.subscribe, environment)?;
    let duration = args.duration.map(|duration| duration.0);
    let mut subscriber = EventSubscriber::open(&args.subscribe, &addresses, duration)?;
    let path = args.output.display();
    let file = File::create(&args.output).with_context(|| format!("cannot write {path}"))?;
    let mut out = BufWriter::new(file);
    let (mut batches, mut missing) = (0_u64, 0_u64);
    while let Some(event) = subscriber.next()? {
        match event {
            SubscriptionEvent::Batch(batch) => {
                write_array_len(&mut out, 3)?;
                write_bin(&mut out, &batch.topic)?;
                write_uint(&mut out, batch.seq)?;
                write_bin(&mut out, &batch.payload)?;
                // Each batch is flushed, so that the file is complete if a signal ends the process.
                out.flush().with_context(|| format!("cannot write {path}"))?;
                batches += 1;
            }
            SubscriptionEvent::Gap { from, to, replayed } => {
                missing += (to - from + 1).saturating_sub(replayed);
            }
            SubscriptionEvent::Restart { .. } | SubscriptionEvent::Malformed(_) => {}
        }
    }
    writeln!(std::io::stdout(), "{batches} batches in {path}, {missing} missing")?;
    Ok(ExitCode::SUCCESS)
}
