//! Commands to other nodes to start executors, and the connections of the started executors.

use super::remote_executor::RemoteExecutor;
use protocol::{Epoch, HostSettings, NodeCommand, Rank};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

/// Command to start the executors of a group on a node.
pub(super) struct StartCommand {
    pub(super) node: u16,
    pub(super) epoch: Epoch,
    /// World ranks of the executors.
    pub(super) ranks: Range<u16>,
    pub(super) issued: Option<IssuedStartCommand>,
}

/// State of a start command that was sent to its node in one session (connection) of the node.
pub(super) struct IssuedStartCommand {
    pub(super) session: u64,
    pub(super) ticket: u64,
    pub(super) at: Instant,
    /// Executor connections in rank order; `None` = not received yet, or already taken in order
    /// to send the executor settings.
    pub(super) links: Vec<Option<PendingLink>>,
    /// Handles to the streams of all received executor connections, used to close them.
    pub(super) streams: Vec<TcpStream>,
    pub(super) executors: Vec<Arc<RemoteExecutor>>,
    pub(super) failed: Option<String>,
}

/// Connection of an executor on another node, before the executor settings are sent over it.
pub(super) struct PendingLink {
    pub(super) rank: Rank,
    pub(super) stream: TcpStream,
    pub(super) host: HostSettings,
    pub(super) executor: Arc<RemoteExecutor>,
}

/// Progress of a start command.
pub(super) enum StartCommandProgress {
    /// The node of the command is not connected.
    NodeDisconnected,
    /// The command was sent at the given time, and not all executors have connected to node 0 yet.
    Issued(Instant),
    /// The node reported that the start failed.
    Failed(String),
    /// All executors have connected to node 0. Contains their connections in rank order.
    Linked(Vec<PendingLink>),
}

impl StartCommand {
    /// Sends the command, unless the node has received it in this session (connection). Returns whether the
    /// command was sent.
    pub(super) fn issue(
        &mut self,
        session: u64,
        commands: &SyncSender<NodeCommand>,
        ticket: u64,
    ) -> bool {
        if self.issued.as_ref().is_some_and(|issued| issued.session == session) {
            return false;
        }
        let (first_rank, count) = (Rank(self.ranks.start), self.ranks.len() as u16);
        let command = NodeCommand::Start { first_rank, count, epoch: self.epoch, ticket };
        if commands.try_send(command).is_err() {
            return false; // The queue is full or closed: the session is about to time out.
        }
        self.issued = Some(IssuedStartCommand {
            session,
            ticket,
            at: Instant::now(),
            links: self.ranks.clone().map(|_| None).collect(),
            streams: Vec::new(),
            executors: Vec::new(),
            failed: None,
        });
        true
    }
}

impl IssuedStartCommand {
    /// Closes the links of the executors started by this command, which ends these executors.
    pub(super) fn close(&self) {
        for stream in &self.streams {
            let _ = stream.shutdown(Shutdown::Both); // The stream may be closed already.
        }
    }
}
