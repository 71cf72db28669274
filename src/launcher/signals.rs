//! Passes termination signals on to the main thread.

use super::engine_thread::Notice;
use std::io;
use std::sync::mpsc::Sender;
use tokio::signal::unix::{SignalKind, signal};

/// Forwards SIGTERM and SIGINT for as long as somebody listens. Call it inside a runtime.
pub fn forward(notices: Sender<Notice>) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            let kind = tokio::select! {
                _ = terminate.recv() => SignalKind::terminate(),
                _ = interrupt.recv() => SignalKind::interrupt(),
            };
            if notices.send(Notice::Signal(kind.as_raw_value())).is_err() {
                return;
            }
        }
    });
    Ok(())
}
