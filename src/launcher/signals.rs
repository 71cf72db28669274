//! Signal handlers: signals that shut the server down, and signals that must not end the process.

use crate::log::LogFile;
use rustix::process::Signal as UnixSignal;
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Passes the numbers of SIGTERM, SIGINT and SIGQUIT to `callback` until it returns false. Must be called
/// within a Tokio runtime.
pub fn forward(callback: impl Fn(i32) -> bool + Send + 'static) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    tokio::spawn(async move {
        loop {
            let kind = tokio::select! {
                _ = terminate.recv() => SignalKind::terminate(),
                _ = interrupt.recv() => SignalKind::interrupt(),
                _ = quit.recv() => SignalKind::quit(),
            };
            if !callback(kind.as_raw_value()) {
                return;
            }
        }
    });
    Ok(())
}

/// Handlers of signals that end a process by default, but must not end this one: SIGHUP and SIGUSR1, which
/// reopen log files, SIGUSR2 and SIGXFSZ.
#[derive(Debug)]
pub struct NonFatalSignals {
    hangup: Signal,
    user_1: Signal,
    user_2: Signal,
    /// SIGXFSZ: a write to a file at its size limit must return an error instead.
    _file_size: Signal,
}

/// Action for a signal that must not end the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NonFatalSignalAction {
    /// Reopen log files.
    Reopen,
    /// Only log that the signal with this number is ignored.
    Ignored(i32),
}

impl NonFatalSignals {
    /// Installs the handlers. Must be called within a Tokio runtime.
    ///
    /// Errors: a handler cannot be installed.
    pub fn catch() -> io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            user_1: signal(SignalKind::user_defined1())?,
            user_2: signal(SignalKind::user_defined2())?,
            _file_size: signal(SignalKind::from_raw(UnixSignal::XFSZ.as_raw()))?,
        })
    }

    /// Waits for the next signal that has a handler, and returns the action for it.
    async fn next(&mut self) -> NonFatalSignalAction {
        tokio::select! {
            _ = self.hangup.recv() => NonFatalSignalAction::Reopen,
            _ = self.user_1.recv() => NonFatalSignalAction::Reopen,
            _ = self.user_2.recv() => {
                NonFatalSignalAction::Ignored(SignalKind::user_defined2().as_raw_value())
            }
        }
    }
}

/// Installs handlers that reopen the log file and call `reopen` for other files. Executors need none, because
/// the server writes their log. Must be called within a Tokio runtime, before other threads and processes are
/// started.
///
/// Errors: a handler cannot be installed.
pub fn handle_harmless_signals(reopen: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = NonFatalSignals::catch()?;
    let log = LogFile::of_stderr();
    tokio::spawn(async move {
        loop {
            match signals.next().await {
                NonFatalSignalAction::Reopen => {
                    reopen_log(log.as_ref());
                    reopen();
                }
                NonFatalSignalAction::Ignored(number) => {
                    tracing::info!(signal = number, "signal ignored");
                }
            }
        }
    });
    Ok(())
}

/// If stderr is a file, reopens it by its name and logs the result.
fn reopen_log(log: Option<&LogFile>) {
    match log.map(LogFile::reopen) {
        Some(Err(error)) => {
            tracing::warn!(%error, "cannot reopen the log file; continuing with the old file");
        }
        Some(Ok(())) => tracing::info!("log file reopened"),
        None => {}
    }
}
