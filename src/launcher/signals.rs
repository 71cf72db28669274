//! Signal handling: some signals shut the server down gracefully, some reopen log files; no signal interrupts
//! a step.

use crate::log::LogFile;
use rustix::process::Signal as UnixSignal;
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Forwards the numbers of SIGTERM, SIGINT and SIGQUIT to `callback` until it returns false. Must be called
/// inside a runtime.
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

/// Signals that would end a process by default and must not: SIGHUP and SIGUSR1, which reopen log files, and
/// SIGUSR2.
#[derive(Debug)]
pub struct HarmlessSignals {
    hangup: Signal,
    user_1: Signal,
    user_2: Signal,
    /// SIGXFSZ: a file at its size limit must be a write error and not end the process.
    _file_size: Signal,
}

/// Action of a harmless signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HarmlessSignal {
    /// Reopen log files.
    Reopen,
    /// No action.
    Ignored(i32),
}

impl HarmlessSignals {
    /// Installs the handlers. Must be called inside a runtime.
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

    /// Waits for the next signal.
    async fn next(&mut self) -> HarmlessSignal {
        tokio::select! {
            _ = self.hangup.recv() => HarmlessSignal::Reopen,
            _ = self.user_1.recv() => HarmlessSignal::Reopen,
            _ = self.user_2.recv() => {
                HarmlessSignal::Ignored(SignalKind::user_defined2().as_raw_value())
            }
        }
    }
}

/// Handles harmless signals: reopens the log and calls `reopen` for other files. Executors write their log
/// through the server. Must be called inside a runtime, before other threads and processes are started.
///
/// Errors: a handler cannot be installed.
pub fn handle_harmless_signals(reopen: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = HarmlessSignals::catch()?;
    let log = LogFile::of_stderr();
    tokio::spawn(async move {
        loop {
            match signals.next().await {
                HarmlessSignal::Reopen => {
                    reopen_log(log.as_ref());
                    reopen();
                }
                HarmlessSignal::Ignored(number) => {
                    tracing::info!(signal = number, "signal ignored");
                }
            }
        }
    });
    Ok(())
}

/// Reopens the log file, if stderr is a file, and logs the result.
fn reopen_log(log: Option<&LogFile>) {
    match log.map(LogFile::reopen) {
        Some(Err(error)) => {
            tracing::warn!(%error, "cannot reopen the log file; continuing with the old file");
        }
        Some(Ok(())) => tracing::info!("log file reopened"),
        None => {}
    }
}
