//! Connects to a collector and comes back to it, on a thread of its own: names are looked up there, too.

use super::stream::{PeerAddress, PeerStream};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

/// Between two attempts: from the first to the longest.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LAST: Duration = Duration::from_secs(5);

/// The publisher's end of the thread, which ends with it.
#[derive(Debug)]
pub(crate) struct CollectorConnector {
    requests: SyncSender<()>,
    streams: Receiver<PeerStream>,
    is_requested: bool,
}

impl CollectorConnector {
    /// Starts the thread. It writes a byte to `wake` whenever a connection has been made.
    ///
    /// Errors: the system gives no thread.
    pub(crate) fn start(address: PeerAddress, wake: UnixStream) -> io::Result<Self> {
        let (wanted, requests) = sync_channel(1);
        let (made, streams) = sync_channel(1);
        let connect = move || {
            while requests.recv().is_ok() {
                let mut pause = RETRY_FIRST;
                let stream = loop {
                    // Also before the first attempt: a collector may close whatever it accepts.
                    thread::sleep(pause);
                    match address.connect() {
                        Ok(stream) => break stream,
                        Err(error) => tracing::debug!(%error, "KV events: the collector is away"),
                    }
                    if requests.try_recv() == Err(TryRecvError::Disconnected) {
                        return;
                    }
                    pause = (2 * pause).min(RETRY_LAST);
                };
                if made.send(stream).is_err() {
                    return;
                }
                // A full wire has woken the publisher already.
                let _ = (&wake).write(&[1]);
            }
        };
        thread::Builder::new().name("kv-events-connect".to_owned()).spawn(connect)?;
        Ok(Self { requests: wanted, streams, is_requested: false })
    }

    /// The connection, once there is a new one. Call it for as long as there is none.
    pub(crate) fn next(&mut self) -> Option<PeerStream> {
        if !self.is_requested {
            self.is_requested = self.requests.try_send(()).is_ok();
        }
        let stream = self.streams.try_recv().ok()?;
        self.is_requested = false;
        Some(stream)
    }
}
