//! Connection of a worker node to node 0 (the node with the scheduler): the join request, and the threads
//! that read and write messages.

use super::dial::{NodeDialer, RETRY_INTERVAL};
use super::worker_node::WorkerNodeEvent;
use super::{BODY_BYTES_MAX, EPOCH, HEARTBEAT_INTERVAL, OUTBOX_MESSAGES};
use crate::heartbeat_timeout::{HEARTBEAT_TIMEOUT, recv_within_timeout};
use anyhow::{Context, Result, bail};
use protocol::link::{FrameReader, FrameWriter, HeartbeatConfig, MessageReceiver, run_writer};
use protocol::{NodeCommand, NodeEvent, NodeInfo};
use std::io;
use std::net::{IpAddr, TcpStream};
use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Interval of log lines about the wait for node 0.
const WAIT_LOG_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum wait until node 0 accepts this node. Node 0 may first wait until the previous connection of this
/// node has timed out.
const ACCEPT_WAIT: Duration = Duration::from_secs(15);

/// Connection on which node 0 sends commands.
pub(super) struct NodeZeroConnection {
    stream: TcpStream,
    /// Reader of the commands, which may already have buffered some commands.
    commands: FrameReader<TcpStream, NodeCommand>,
}

impl NodeZeroConnection {
    /// Connects to node 0, which may still be starting, and waits until node 0 accepts this node. Returns
    /// `None` if a signal is received first.
    ///
    /// Errors: node 0 is not reachable in time, belongs to another cluster, or rejects this node.
    pub(super) fn join(
        dialer: &NodeDialer,
        info: &NodeInfo,
        timeout: Duration,
        events: &Receiver<WorkerNodeEvent>,
    ) -> Result<Option<Self>> {
        let (began, mut last_log) = (Instant::now(), None::<Instant>);
        loop {
            let error = match dialer.connect(NodeEvent::Join(info.clone())) {
                Ok(stream) => return Self::await_acceptance(stream).map(Some),
                Err(error) if !error.is_transient() => bail!(error),
                Err(error) => error,
            };
            if began.elapsed() > timeout {
                let seconds = timeout.as_secs();
                bail!("{error}, for {seconds} s; --startup-timeout sets this bound");
            }
            if last_log.is_none_or(|last_log| last_log.elapsed() > WAIT_LOG_INTERVAL) {
                last_log = Some(Instant::now());
                tracing::info!(%error, "waiting for node 0");
            }
            if let Ok(WorkerNodeEvent::Signal(_)) = events.recv_timeout(RETRY_INTERVAL) {
                return Ok(None);
            }
        }
    }

    /// Address of this node on the network of the connection.
    pub(super) fn local_address(&self) -> io::Result<IpAddr> {
        Ok(self.stream.local_addr()?.ip())
    }

    /// Waits until node 0 accepts this node; returns the connection.
    fn await_acceptance(stream: TcpStream) -> Result<Self> {
        let mut commands = FrameReader::with_body_limit(stream.try_clone()?, EPOCH, BODY_BYTES_MAX);
        match commands.recv(ACCEPT_WAIT).context("node 0 closed the connection")? {
            Some(NodeCommand::Accepted) => Ok(Self { stream, commands }),
            Some(NodeCommand::Rejected { reason }) => bail!("node 0 rejected this node: {reason}"),
            Some(_) => bail!("unexpected message from node 0 before it accepted this node"),
            None => bail!("node 0 did not accept this node within {} s", ACCEPT_WAIT.as_secs()),
        }
    }

    /// Starts the threads that read from and write to node 0; returns the queue of outgoing messages.
    pub(super) fn start(self, events: Sender<WorkerNodeEvent>) -> Result<SyncSender<NodeEvent>> {
        let Self { stream, commands } = self;
        let writer = FrameWriter::new(stream, EPOCH);
        let (node_zero, outbox) = sync_channel(OUTBOX_MESSAGES);
        thread::Builder::new().name("node-out".to_owned()).spawn(move || {
            let heartbeat =
                HeartbeatConfig { interval: HEARTBEAT_INTERVAL, message: || NodeEvent::Heartbeat };
            // A write error needs no handling, because the reader thread detects the end of the connection.
            let _ = run_writer(outbox, writer, Some(&heartbeat));
        })?;
        thread::Builder::new()
            .name("node-in".to_owned())
            .spawn(move || forward_commands(commands, &events))?;
        Ok(node_zero)
    }
}

/// Forwards the commands of node 0 to `events` until the connection fails; the failure is the last event.
fn forward_commands(
    mut commands: FrameReader<TcpStream, NodeCommand>,
    events: &Sender<WorkerNodeEvent>,
) {
    loop {
        let event = match recv_within_timeout(&mut commands) {
            Ok(Some(NodeCommand::Heartbeat)) => continue,
            Ok(Some(command)) => WorkerNodeEvent::NodeZeroCommand(command),
            Ok(None) => WorkerNodeEvent::Disconnected(format!(
                "no heartbeat for {} s",
                HEARTBEAT_TIMEOUT.as_secs()
            )),
            Err(error) => WorkerNodeEvent::Disconnected(error.to_string()),
        };
        let last = matches!(event, WorkerNodeEvent::Disconnected(_));
        if events.send(event).is_err() || last {
            return;
        }
    }
}
