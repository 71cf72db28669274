//! Registry of the nodes that are connected to node 0 (the node with the scheduler), and the messages
//! exchanged with them.

use super::cluster_requirements::ClusterRequirements;
use super::remote_executor::RemoteExecutor;
use super::start_command::{IssuedStartCommand, PendingLink, StartCommand, StartCommandProgress};
use super::{BODY_BYTES_MAX, EPOCH, HEARTBEAT_INTERVAL, OUTBOX_MESSAGES};
use crate::heartbeat_timeout::{HEARTBEAT_GRACE_PERIOD, HEARTBEAT_TIMEOUT, recv_within_timeout};
use protocol::link::{FrameReader, FrameWriter, HeartbeatConfig, MessageSender, run_writer};
use protocol::{Epoch, ExecutorLinkRequest, NodeCommand, NodeEvent, NodeInfo, Rank};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Maximum wait for the previous session (connection) of a node to end. If that connection was lost without
/// being closed, the session ends with the heartbeat timeout.
const PREDECESSOR_WAIT: Duration =
    HEARTBEAT_TIMEOUT.saturating_add(HEARTBEAT_GRACE_PERIOD).saturating_add(Duration::from_secs(2));

/// Registry of all other nodes of the cluster, kept by node 0.
pub struct NodeRegistry {
    expected: ClusterRequirements,
    state: Mutex<NodeRegistryState>,
    changed: Condvar,
}

/// Mutable state of the registry: connected nodes and start commands.
struct NodeRegistryState {
    /// Connected nodes by node rank; the entry of node 0 is always empty.
    nodes: Vec<Option<ConnectedNode>>,
    /// Latest start command of each group on each other node, by the first rank.
    start_commands: BTreeMap<u16, StartCommand>,
    sessions: u64,
    tickets: u64,
    /// Whether the nodes have been commanded to leave the cluster.
    shutting_down: bool,
}

/// Connected node. A session is one connection of a node.
struct ConnectedNode {
    session: u64,
    commands: SyncSender<NodeCommand>,
    stream: TcpStream,
}

impl NodeRegistry {
    /// Creates a registry without connected nodes.
    pub fn new(expected: ClusterRequirements) -> Self {
        let state = NodeRegistryState {
            nodes: (0..expected.nodes).map(|_| None).collect(),
            start_commands: BTreeMap::new(),
            sessions: 0,
            tickets: RandomState::new().hash_one(0), // Random: differs from tickets of a previous node 0.
            shutting_down: false,
        };
        Self { expected, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Number of nodes of the cluster.
    pub fn nodes(&self) -> u16 {
        self.expected.nodes
    }

    fn lock(&self) -> MutexGuard<'_, NodeRegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves the connection of a node that requests to join, until the connection ends.
    pub(super) fn join(&self, info: &NodeInfo, stream: TcpStream) {
        let node = info.node;
        if let Err(reason) = self.expected.check(info) {
            return reject(&stream, reason);
        }
        let session = match self.admit(node, &stream) {
            Ok(Ok(session)) => session,
            Ok(Err(reason)) => return reject(&stream, reason),
            Err(error) => return tracing::warn!(node, %error, "cannot admit a node"),
        };
        tracing::info!(node, "node joined");
        let cause = self.read_events(stream);
        let leaving = self.disconnected(node, session, &cause);
        if leaving {
            tracing::info!(node, "node has left");
        } else {
            tracing::warn!(node, cause, "node failed");
        }
    }

    /// Admits a node after its previous session (connection) has ended. Returns the number of the new
    /// session, or the reason why the node is rejected.
    fn admit(&self, node: u16, stream: &TcpStream) -> io::Result<Result<u64, String>> {
        let writer = FrameWriter::new(stream.try_clone()?, EPOCH);
        let stream = stream.try_clone()?;
        let index = usize::from(node);
        let is_connected =
            |state: &mut NodeRegistryState| state.nodes[index].is_some() && !state.shutting_down;
        let waited = self.changed.wait_timeout_while(self.lock(), PREDECESSOR_WAIT, is_connected);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.shutting_down {
            // A node admitted now would miss the command to leave the cluster.
            return Ok(Err("node 0 is shutting down".to_owned()));
        }
        if is_connected(&mut state) {
            return Ok(Err(format!("node {node} is already connected")));
        }
        let (commands, outbox) = sync_channel(OUTBOX_MESSAGES);
        let heartbeat =
            HeartbeatConfig { interval: HEARTBEAT_INTERVAL, message: || NodeCommand::Heartbeat };
        thread::Builder::new().name("node-out".to_owned()).spawn(move || {
            // A write error needs no handling, because the reader thread detects the end of the connection.
            let _ = run_writer(outbox, writer, Some(&heartbeat));
        })?;
        let _ = commands.try_send(NodeCommand::Accepted); // The new queue is empty and accepts the message.
        state.sessions += 1;
        let session = state.sessions;
        state.nodes[index] = Some(ConnectedNode { session, commands, stream });
        drop(state);
        self.changed.notify_all();
        Ok(Ok(session))
    }

    /// Reads the events of a node until the connection ends. Returns the reason why it ended.
    fn read_events(&self, stream: TcpStream) -> String {
        let mut reader =
            FrameReader::<_, NodeEvent>::with_body_limit(stream, EPOCH, BODY_BYTES_MAX);
        loop {
            match recv_within_timeout(&mut reader) {
                Ok(Some(NodeEvent::Heartbeat)) => {}
                Ok(Some(NodeEvent::StartFailed { ticket, reason })) => {
                    self.start_failed(ticket, reason);
                }
                Ok(Some(NodeEvent::ExecutorExited { rank, epoch, description })) => {
                    self.executor_exited(rank, epoch, &description);
                }
                Ok(Some(NodeEvent::Join(_) | NodeEvent::Link(_))) => {
                    return "unexpected join request or executor link".to_owned();
                }
                Ok(None) => {
                    return format!("no heartbeat for {} s", HEARTBEAT_TIMEOUT.as_secs());
                }
                Err(error) => return error.to_string(),
            }
        }
    }

    fn start_failed(&self, ticket: u64, reason: String) {
        let mut state = self.lock();
        if let Some(issued) = state.issued_commands().find(|issued| issued.ticket == ticket) {
            issued.failed = Some(reason);
            self.changed.notify_all();
        }
    }

    fn executor_exited(&self, rank: Rank, epoch: Epoch, description: &str) {
        let state = self.lock();
        let own = |start_command: &&StartCommand| {
            start_command.epoch == epoch && start_command.ranks.contains(&rank.0)
        };
        let Some(start_command) = state.start_commands.values().find(own) else { return };
        let executors = start_command.issued.iter().flat_map(|issued| &issued.executors);
        executors
            .filter(|executor| executor.rank() == rank)
            .for_each(|executor| executor.set_exit(description));
    }

    /// Removes a disconnected node and closes the links of its executors. Returns whether the nodes have been
    /// commanded to leave the cluster.
    fn disconnected(&self, node: u16, session: u64, cause: &str) -> bool {
        let mut state = self.lock();
        let node = &mut state.nodes[usize::from(node)];
        if let Some(node) = node.take_if(|node| node.session == session) {
            // Closing the stream unblocks the writer thread of the node.
            let _ = node.stream.shutdown(Shutdown::Both);
        }
        for issued in state.issued_commands().filter(|issued| issued.session == session) {
            let description = format!("the node failed: {cause}");
            issued.executors.iter().for_each(|executor| executor.set_exit(&description));
            issued.close();
        }
        let leaving = state.shutting_down;
        drop(state);
        self.changed.notify_all();
        leaving
    }

    /// Stores the connection of an executor if a start command expects it; otherwise closes the connection.
    pub(super) fn accept_link(&self, offer: ExecutorLinkRequest, stream: TcpStream) {
        let ExecutorLinkRequest { ticket, rank, host } = offer;
        let mut state = self.lock();
        let is_expected = |start_command: &&mut StartCommand| {
            start_command.issued.as_ref().is_some_and(|issued| issued.ticket == ticket)
        };
        let Some(start_command) = state.start_commands.values_mut().find(is_expected) else {
            return tracing::debug!(rank = rank.0, "unexpected executor link");
        };
        let (node, local_rank) =
            (start_command.node, start_command.ranks.clone().position(|own| own == rank.0));
        let (Some(issued), Some(local_rank)) = (&mut start_command.issued, local_rank) else {
            return;
        };
        let (Ok(stream_handle), None) = (stream.try_clone(), &issued.links[local_rank]) else {
            return;
        };
        let executor = Arc::new(RemoteExecutor::new(rank, node));
        issued.streams.push(stream_handle);
        issued.executors.push(Arc::clone(&executor));
        issued.links[local_rank] = Some(PendingLink { rank, stream, host, executor });
        drop(state);
        self.changed.notify_all();
    }

    /// Commands a node to start the executors with the world ranks `ranks`, and closes the links of the previous executors.
    pub(super) fn command_start(&self, node: u16, epoch: Epoch, ranks: Range<u16>) {
        let first_rank = ranks.start;
        let start_command = StartCommand { node, epoch, ranks, issued: None };
        if let Some(StartCommand { issued: Some(previous), .. }) =
            self.lock().start_commands.insert(first_rank, start_command)
        {
            previous.close();
        }
    }

    /// Waits for a change of the registry, for at most `time`.
    pub(super) fn wait_for_change(&self, time: Duration) {
        // The result is ignored, because callers check their condition again after a timeout.
        drop(self.changed.wait_timeout(self.lock(), time));
    }

    /// Sends the start command of the executors from `first_rank` on to their node, unless the node has already received the command in
    /// its current session (connection). Returns the progress of the start command.
    pub(super) fn advance_start(&self, first_rank: Rank) -> StartCommandProgress {
        let mut state = self.lock();
        let NodeRegistryState { nodes, start_commands, tickets, .. } = &mut *state;
        let Some(start_command) = start_commands.get_mut(&first_rank.0) else {
            return StartCommandProgress::NodeDisconnected;
        };
        let Some(node) = &nodes[usize::from(start_command.node)] else {
            return StartCommandProgress::NodeDisconnected;
        };
        let ticket = *tickets;
        if start_command.issue(node.session, &node.commands, ticket) {
            *tickets = tickets.wrapping_add(1);
        }
        // If the start command was sent in a previous session (connection) of the node, the executor links of
        // that session have been closed and are not used.
        let current = start_command.issued.as_mut().filter(|issued| issued.session == node.session);
        let Some(issued) = current else { return StartCommandProgress::NodeDisconnected };
        if let Some(reason) = issued.failed.take() {
            return StartCommandProgress::Failed(reason);
        }
        if issued.links.iter().any(Option::is_none) {
            return StartCommandProgress::Issued(issued.at);
        }
        StartCommandProgress::Linked(issued.links.iter_mut().filter_map(Option::take).collect())
    }

    /// Closes the connections to the executors from `first_rank` on, which ends the executors.
    pub(super) fn close(&self, first_rank: Rank) {
        let state = self.lock();
        if let Some(issued) = state
            .start_commands
            .get(&first_rank.0)
            .and_then(|start_command| start_command.issued.as_ref())
        {
            issued.close();
        }
    }

    /// Commands all nodes to leave the cluster. Their executors must already have been commanded to stop.
    pub fn shut_down_nodes(&self) {
        let mut state = self.lock();
        state.shutting_down = true;
        for node in state.nodes.iter().flatten() {
            // If the queue is full, the node does not receive the command, but it detects that the process of
            // node 0 has ended.
            let _ = node.commands.try_send(NodeCommand::Leave);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until all nodes have disconnected, for at most `timeout`.
    pub fn wait_until_disconnected(&self, timeout: Duration) {
        let any_connected = |state: &mut NodeRegistryState| state.nodes.iter().any(Option::is_some);
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, any_connected);
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            tracing::warn!("not all nodes have disconnected in time");
        }
    }
}

/// Informs a node that it is rejected.
fn reject(stream: &TcpStream, reason: String) {
    tracing::warn!(text = reason, "node rejected");
    // The send fails if the node has disconnected.
    let _ = FrameWriter::new(stream, EPOCH).send(NodeCommand::Rejected { reason });
}

impl NodeRegistryState {
    fn issued_commands(&mut self) -> impl Iterator<Item = &mut IssuedStartCommand> {
        self.start_commands.values_mut().filter_map(|start_command| start_command.issued.as_mut())
    }
}

#[cfg(test)]
mod tests;
