//! Connector: connects and reconnects to a collector, on a separate thread because name resolution blocks.

use super::stream::{PeerAddress, PeerStream};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

/// Back-off between connection attempts: begins with `RETRY_FIRST` and doubles up to `RETRY_MAX`.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// Handle to the thread that connects the PUB socket to a collector of KV events. The thread ends when the
/// handle is dropped.
#[derive(Debug)]
pub(crate) struct CollectorConnector {
    requests: SyncSender<()>,
    streams: Receiver<PeerStream>,
    is_requested: bool,
}

impl CollectorConnector {
    /// Starts the connector thread. The thread writes a byte to `wake` after each successful connection.
    ///
    /// Errors: no thread is available.
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread ends with the sender of its requests"
    )]
    pub(crate) fn start(address: PeerAddress, wake: UnixStream) -> io::Result<Self> {
        let (requests_tx, requests_rx) = sync_channel(1);
        let (streams_tx, streams_rx) = sync_channel(1);
        let connect = move || {
            while requests_rx.recv().is_ok() {
                let Some(stream) = connect_with_retries(&address, &requests_rx) else { return };
                if streams_tx.send(stream).is_err() {
                    return;
                }
                // If the socket is full, the publisher thread has been woken already.
                let _ = (&wake).write(&[1]);
            }
        };
        thread::Builder::new().name("kv-events-connect".to_owned()).spawn(connect)?;
        Ok(Self { requests: requests_tx, streams: streams_rx, is_requested: false })
    }

    /// Returns the connection to the collector once the connector thread has made it; requests one from the
    /// thread unless it is requested already. Call it while the PUB socket has no connection.
    pub(crate) fn next(&mut self) -> Option<PeerStream> {
        if !self.is_requested {
            self.is_requested = self.requests.try_send(()).is_ok();
        }
        let stream = self.streams.try_recv().ok()?;
        self.is_requested = false;
        Some(stream)
    }
}

/// Attempts to connect to the collector until an attempt succeeds; returns `None` if the handle, which sends
/// `requests`, is dropped.
fn connect_with_retries(address: &PeerAddress, requests: &Receiver<()>) -> Option<PeerStream> {
    let mut backoff = RETRY_FIRST;
    loop {
        // Wait before the first attempt as well, because a collector may close every connection that it
        // accepts.
        thread::sleep(backoff);
        match address.connect() {
            Ok(stream) => return Some(stream),
            Err(error) => tracing::debug!(%error, "KV events: the collector is not reachable"),
        }
        if requests.try_recv() == Err(TryRecvError::Disconnected) {
            return None;
        }
        backoff = (2 * backoff).min(RETRY_MAX);
    }
}
