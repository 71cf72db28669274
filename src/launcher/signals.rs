//! Passes termination signals on to the main thread.

use std::io;
use tokio::signal::unix::{SignalKind, signal};

/// Forwards the numbers of SIGTERM and SIGINT for as long as `tell` says that somebody listens. Call it inside a
/// runtime.
pub fn forward(tell: impl Fn(i32) -> bool + Send + 'static) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            let kind = tokio::select! {
                _ = terminate.recv() => SignalKind::terminate(),
                _ = interrupt.recv() => SignalKind::interrupt(),
            };
            if !tell(kind.as_raw_value()) {
                return;
            }
        }
    });
    Ok(())
}
