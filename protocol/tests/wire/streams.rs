//! Tests of links over sockets, and of readers of streams that fail or split frames.

use crate::deadlines::BoundedJoin as _;
use crate::messages::executor_command;
use proptest::prelude::*;
use protocol::frame::{FrameError, encode};
use protocol::link::{
    FrameReader, FrameWriter, HeartbeatConfig, LinkError, MessageLink, MessageReceiver,
    MessageSender, UnixLink, run_writer, unix_link,
};
use protocol::{Epoch, ExecutorCommand, ExecutorEvent, PROTOCOL_VERSION};
use std::io::{Cursor, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

type SchedulerSideLink = UnixLink<ExecutorCommand, ExecutorEvent>;
type ExecutorSideLink = UnixLink<ExecutorEvent, ExecutorCommand>;

const LONG_TIMEOUT: Duration = Duration::from_secs(20);

fn link_pair() -> (SchedulerSideLink, ExecutorSideLink) {
    let (a, b) = UnixStream::pair().unwrap();
    (unix_link(a, Epoch(1)).unwrap(), unix_link(b, Epoch(1)).unwrap())
}

fn progress(done: u64) -> ExecutorEvent {
    ExecutorEvent::Progress { phase: protocol::StartupPhase::Load, done, total: u64::MAX }
}

#[test]
fn both_directions_work_and_close_is_seen_at_once() {
    let (mut scheduler_end, mut executor_end) = link_pair();
    assert_eq!(scheduler_end.recv(Duration::ZERO), Ok(None));
    scheduler_end.send(ExecutorCommand::AllocateKv { blocks: 5 }).unwrap();
    scheduler_end.send(ExecutorCommand::Shutdown).unwrap();
    assert_eq!(
        executor_end.recv(LONG_TIMEOUT),
        Ok(Some(ExecutorCommand::AllocateKv { blocks: 5 }))
    );
    executor_end.send(progress(1)).unwrap();
    assert_eq!(scheduler_end.recv(LONG_TIMEOUT), Ok(Some(progress(1))));
    let start = Instant::now();
    assert_eq!(scheduler_end.recv(Duration::from_millis(30)), Ok(None));
    assert!(start.elapsed() >= Duration::from_millis(25));
    drop(scheduler_end);
    assert_eq!(
        executor_end.recv(LONG_TIMEOUT),
        Ok(Some(ExecutorCommand::Shutdown)),
        "sent messages are still delivered"
    );
    assert_eq!(executor_end.recv(LONG_TIMEOUT), Err(LinkError::Closed));
    assert_eq!(executor_end.send(progress(2)), Err(LinkError::Closed));
}

#[test]
fn link_halves_work_on_separate_threads() {
    const COUNT: u64 = 5_000;
    let (scheduler_end, executor_end) = link_pair();
    let (mut scheduler_sender, mut scheduler_receiver) = scheduler_end.split();
    let (mut executor_sender, mut executor_receiver) = executor_end.split();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for blocks in 0..COUNT as u32 {
                scheduler_sender.send(ExecutorCommand::AllocateKv { blocks }).unwrap();
            }
            scheduler_sender // Kept open until all messages are read.
        });
        scope.spawn(move || {
            for done in 0..COUNT {
                executor_sender.send(progress(done)).unwrap();
            }
            executor_sender
        });
        scope.spawn(move || {
            for blocks in 0..COUNT as u32 {
                let command = executor_receiver.recv(LONG_TIMEOUT);
                assert_eq!(command, Ok(Some(ExecutorCommand::AllocateKv { blocks })));
            }
        });
        for done in 0..COUNT {
            assert_eq!(scheduler_receiver.recv(LONG_TIMEOUT), Ok(Some(progress(done))));
        }
    });
}

#[test]
fn wrong_version_and_garbage_are_typed_errors() {
    let cases: [(&[u8], FrameError); 2] = [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", FrameError::Magic(*b"GET ")),
        (
            b"HDRN\xff\xff________________________",
            FrameError::Version { theirs: u16::MAX, ours: PROTOCOL_VERSION },
        ),
    ];
    for (bytes, expected) in cases {
        let (mut raw, socket) = UnixStream::pair().unwrap();
        let mut link: SchedulerSideLink = unix_link(socket, Epoch(1)).unwrap();
        raw.write_all(bytes).unwrap();
        assert_eq!(link.recv(LONG_TIMEOUT), Err(LinkError::Frame(expected)));
    }
}

#[test]
fn older_epochs_are_dropped_and_newer_rejected() {
    let mut bytes = Vec::new();
    for epoch in [1, 4, 3] {
        encode(&ExecutorCommand::AllocateKv { blocks: epoch }, Epoch(epoch.into()), &mut bytes)
            .unwrap();
    }
    let mut reader = FrameReader::<_, ExecutorCommand>::new(Cursor::new(bytes), Epoch(4));
    assert_eq!(reader.receive(), Ok(Some(ExecutorCommand::AllocateKv { blocks: 4 })));
    assert_eq!(reader.receive(), Err(LinkError::Closed));
    assert_eq!(reader.stale_frames(), 2);
    let mut bytes = Vec::new();
    encode(&ExecutorCommand::Shutdown, Epoch(5), &mut bytes).unwrap();
    let mut reader = FrameReader::<_, ExecutorCommand>::new(Cursor::new(bytes), Epoch(4));
    let newer = FrameError::Epoch { theirs: Epoch(5), ours: Epoch(4) };
    assert_eq!(reader.receive(), Err(LinkError::Frame(newer)));
}

/// Stream whose frame header states too large a body length: yields `head`, then 10 bytes per read. Records
/// the size of the largest buffer passed to a read.
struct OversizedLengthStream {
    head: Cursor<Vec<u8>>,
    left: usize,
    largest_buffer: usize,
}

impl Read for OversizedLengthStream {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.largest_buffer = self.largest_buffer.max(buffer.len());
        let bytes = self.head.read(buffer)?;
        if bytes > 0 {
            return Ok(bytes);
        }
        let bytes = self.left.min(10).min(buffer.len());
        self.left -= bytes;
        Ok(bytes)
    }
}

#[test]
fn oversized_length_field_allocates_nothing() {
    let mut head = Vec::new();
    encode(&ExecutorCommand::Shutdown, Epoch(1), &mut head).unwrap();
    head[16..20].copy_from_slice(&(1_u32 << 30).to_le_bytes());
    let mut stream =
        OversizedLengthStream { head: Cursor::new(head), left: 5_000, largest_buffer: 0 };
    let mut reader = FrameReader::<_, ExecutorCommand>::new(&mut stream, Epoch(1));
    assert_eq!(reader.receive(), Err(LinkError::Closed));
    assert!(stream.largest_buffer <= 128 << 10, "{} bytes at once", stream.largest_buffer);
}

#[test]
fn bodies_over_the_limit_are_rejected_by_header() {
    let mut head = Vec::new();
    encode(&ExecutorCommand::Shutdown, Epoch(1), &mut head).unwrap();
    let mut reader =
        FrameReader::<_, ExecutorCommand>::with_body_limit(Cursor::new(&head), Epoch(1), 8);
    assert_eq!(reader.receive(), Ok(Some(ExecutorCommand::Shutdown)));
    head[16..20].copy_from_slice(&9_u32.to_le_bytes());
    let mut reader =
        FrameReader::<_, ExecutorCommand>::with_body_limit(Cursor::new(&head), Epoch(1), 8);
    let too_long = FrameError::TooLong { bytes: 9, limit: 8 };
    assert_eq!(reader.receive(), Err(LinkError::Frame(too_long)));
}

#[test]
fn writer_keeps_order_and_sends_heartbeats() {
    let (scheduler_end, executor_end) = link_pair();
    let (_, mut inbox) = scheduler_end.split();
    let (sender, _) = executor_end.split();
    let (queue, outbox) = sync_channel(4);
    let heartbeat = HeartbeatConfig {
        interval: Duration::from_millis(20),
        message: || ExecutorEvent::Heartbeat,
    };
    let writer = std::thread::spawn(move || run_writer(outbox, sender, Some(&heartbeat)));
    for done in 0..10 {
        queue.send(progress(done)).unwrap();
    }
    for done in 0..10 {
        assert_eq!(inbox.recv(LONG_TIMEOUT), Ok(Some(progress(done))));
    }
    assert_eq!(inbox.recv(LONG_TIMEOUT), Ok(Some(ExecutorEvent::Heartbeat)));
    assert_eq!(inbox.recv(LONG_TIMEOUT), Ok(Some(ExecutorEvent::Heartbeat)));
    drop(queue);
    assert_eq!(writer.join_bounded(), Ok(()));
}

/// Stream whose reads return the given numbers of bytes; for a number of 0, the read returns `WouldBlock`.
struct ShortReadStream {
    bytes: Cursor<Vec<u8>>,
    lengths: Vec<usize>,
    reads: usize,
}

impl Read for ShortReadStream {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.reads += 1;
        let length = self.lengths[self.reads % self.lengths.len()];
        if length == 0 {
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        let most = length.min(buffer.len());
        self.bytes.read(&mut buffer[..most])
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn messages_survive_any_split_of_the_stream(
        messages in prop::collection::vec(executor_command(), 1..6),
        mut lengths in prop::collection::vec(0..600_usize, 1..8),
    ) {
        lengths.push(1 + lengths[0]);
        let mut writer = FrameWriter::new(Vec::new(), Epoch(1));
        for message in &messages {
            writer.send(message.clone()).unwrap();
        }
        let bytes = Cursor::new(writer.into_stream());
        let stream = ShortReadStream { bytes, lengths, reads: 0 };
        let mut reader = FrameReader::<_, ExecutorCommand>::new(stream, Epoch(1));
        let mut received = Vec::new();
        loop {
            match reader.receive() {
                Ok(Some(message)) => received.push(message),
                Ok(None) => {}
                Err(error) => {
                    prop_assert_eq!(error, LinkError::Closed);
                    break;
                }
            }
        }
        prop_assert_eq!(received, messages);
    }
}
