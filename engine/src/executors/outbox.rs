//! Writer thread for the links of one replica: encodes each message once and sends the same bytes to all
//! ranks.

use protocol::link::{FrameWriter, LinkSocket, run_writer};
use protocol::{Epoch, ExecutorCommand};
use std::io::{self, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

/// Capacity of the command queue, in messages. It exceeds the number of steps in flight plus their grammar
/// bitmasks.
const OUTBOX_MESSAGES: usize = 32;

/// Sockets to all ranks of a replica. Each write sends the same bytes to all ranks.
struct RankSockets(Vec<LinkSocket>);

impl Write for RankSockets {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for stream in &mut self.0 {
            stream.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // A socket has no user-space buffer.
    }
}

/// Starts the writer thread for the ranks of a replica with the epoch (executor generation) `epoch`; returns
/// the command queue of the thread.
///
/// Errors: no thread or file descriptor is available.
pub(crate) fn start(
    streams: Vec<LinkSocket>,
    epoch: Epoch,
) -> io::Result<SyncSender<ExecutorCommand>> {
    let links = streams.iter().map(LinkSocket::try_clone).collect::<io::Result<Vec<_>>>()?;
    let (commands, outbox) = sync_channel(OUTBOX_MESSAGES);
    let writer = FrameWriter::new(RankSockets(streams), epoch);
    thread::Builder::new().name("executor-out".to_owned()).spawn(move || {
        if let Err(error) = run_writer(outbox, writer, None) {
            tracing::error!(%error, "cannot write to the executor");
            // Close the links to all ranks, so that their reader threads report the executors as failed.
            links.iter().for_each(LinkSocket::close);
        }
    })?;
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::link::{FrameReader, LinkError, MessageReceiver};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    #[test]
    fn broadcast_is_identical_and_fails_after_a_rank_exits() {
        const WAIT: Duration = Duration::from_secs(5);
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
        let commands = start(ours.into_iter().map(LinkSocket::from).collect(), Epoch(4)).unwrap();
        let reader = |stream| FrameReader::<_, ExecutorCommand>::new(stream, Epoch(4));
        let mut readers: Vec<_> = theirs.into_iter().map(reader).collect();
        commands.send(ExecutorCommand::AllocateKv { blocks: 7 }).unwrap();
        commands.send(ExecutorCommand::Profile { enabled: true }).unwrap();
        for reader in &mut readers {
            assert_eq!(reader.recv(WAIT), Ok(Some(ExecutorCommand::AllocateKv { blocks: 7 })));
            assert_eq!(reader.recv(WAIT), Ok(Some(ExecutorCommand::Profile { enabled: true })));
        }
        drop(readers.remove(1));
        // A write to the closed stream of rank 1 fails with the second message at the latest. The writer
        // thread then ends, and `send` fails.
        while commands.send(ExecutorCommand::Shutdown).is_ok() {}
        drop(commands);
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
