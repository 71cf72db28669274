//! The one writer of a group's links: a message is encoded once, and every rank gets the same bytes.

use protocol::link::{FrameWriter, LinkSocket, run_writer};
use protocol::{Epoch, ExecutorCommand};
use std::io::{self, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

/// Messages that may wait for the writer; more than the steps in flight and their masks.
const OUTBOX_MESSAGES: usize = 32;

/// The streams to all ranks of a group, as one.
struct RankStreams(Vec<LinkSocket>);

impl Write for RankStreams {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for stream in &mut self.0 {
            stream.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // A socket keeps nothing back.
    }
}

/// Starts the thread that writes to all ranks of generation `epoch`; returns the road to it.
///
/// Errors: no thread or descriptor is left.
pub(crate) fn start(
    streams: Vec<LinkSocket>,
    epoch: Epoch,
) -> io::Result<SyncSender<ExecutorCommand>> {
    let links = streams.iter().map(LinkSocket::try_clone).collect::<io::Result<Vec<_>>>()?;
    let (to, outbox) = sync_channel(OUTBOX_MESSAGES);
    let writer = FrameWriter::new(RankStreams(streams), epoch);
    thread::Builder::new().name("executor-out".to_owned()).spawn(move || {
        if let Err(error) = run_writer(outbox, writer, None) {
            tracing::error!(%error, "cannot write to the executor");
            // The readers shall see that the links are of no more use.
            links.iter().for_each(LinkSocket::close);
        }
    })?;
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::link::{FrameReader, LinkError, MessageReceiver};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    #[test]
    fn broadcast_is_identical_and_fails_once_a_rank_is_gone() {
        const WAIT: Duration = Duration::from_secs(5);
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
        let to = start(ours.into_iter().map(LinkSocket::from).collect(), Epoch(4)).unwrap();
        let reader = |stream| FrameReader::<_, ExecutorCommand>::new(stream, Epoch(4));
        let mut readers: Vec<_> = theirs.into_iter().map(reader).collect();
        to.send(ExecutorCommand::AllocateKv { blocks: 7 }).unwrap();
        to.send(ExecutorCommand::Profile { enabled: true }).unwrap();
        for reader in &mut readers {
            assert_eq!(reader.recv(WAIT), Ok(Some(ExecutorCommand::AllocateKv { blocks: 7 })));
            assert_eq!(reader.recv(WAIT), Ok(Some(ExecutorCommand::Profile { enabled: true })));
        }
        drop(readers.remove(1));
        // The writer notices at the latest with the second message, and is gone.
        while to.send(ExecutorCommand::Shutdown).is_ok() {}
        drop(to);
        let mut last = readers.remove(1);
        let end = loop {
            match last.recv(WAIT) {
                Ok(Some(_)) => {}
                other => break other,
            }
        };
        assert_eq!(end, Err(LinkError::Closed));
    }
}
