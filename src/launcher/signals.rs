//! What signals do: some end the server in good order, some reopen log files, none ends it in the middle of a step.

use crate::log::LogFile;
use rustix::process::Signal as UnixSignal;
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Forwards the numbers of SIGTERM, SIGINT and SIGQUIT for as long as `tell` says that somebody listens. Call it
/// inside a runtime.
pub fn forward(tell: impl Fn(i32) -> bool + Send + 'static) -> io::Result<()> {
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
            if !tell(kind.as_raw_value()) {
                return;
            }
        }
    });
    Ok(())
}

/// Signals that would end a process and must not: SIGHUP and SIGUSR1, which reopen log files, and SIGUSR2.
#[derive(Debug)]
pub struct HarmlessSignals {
    hangup: Signal,
    user_1: Signal,
    user_2: Signal,
    /// A file at its size limit is an error of the write, not the end of the process.
    _file_size: Signal,
}

/// One of them has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HarmlessSignal {
    /// Log files are to be opened again.
    Reopen,
    /// Nothing is to be done.
    Ignored(i32),
}

impl HarmlessSignals {
    /// From here on they end nothing. Call it inside a runtime.
    ///
    /// Errors: the system gives no descriptor for them.
    pub fn catch() -> io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            user_1: signal(SignalKind::user_defined1())?,
            user_2: signal(SignalKind::user_defined2())?,
            _file_size: signal(SignalKind::from_raw(UnixSignal::XFSZ.as_raw()))?,
        })
    }

    /// The next one.
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

/// Answers signals that must not end the server: reopens the log and has `reopen` do the same for other files.
/// Executors write their log through the server. Call it inside a runtime, before anything else is started.
///
/// Errors: the system gives no descriptor for signals.
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
                    tracing::info!(signal = number, "this signal does nothing");
                }
            }
        }
    });
    Ok(())
}

/// Opens the log's file again, if it is one, and says so there.
fn reopen_log(log: Option<&LogFile>) {
    match log.map(LogFile::reopen) {
        Some(Err(error)) => {
            tracing::warn!(%error, "the log cannot be opened again: it goes on in the former file");
        }
        Some(Ok(())) => tracing::info!("the log was opened again"),
        None => {}
    }
}
