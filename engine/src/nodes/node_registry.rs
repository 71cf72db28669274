//! Registry of the nodes that are connected to node 0 (the node with the scheduler), and the messages
//! exchanged with them.

use super::cluster_requirements::ClusterRequirements;
use super::remote_executor::RemoteExecutor;
use super::start_command::{IssuedStartCommand, PendingLink, StartCommand, StartCommandProgress};
use super::{BODY_BYTES_MAX, EPOCH, HEARTBEAT_INTERVAL, OUTBOX_MESSAGES};
use crate::heartbeat_timeout::{HEARTBEAT_GRACE_PERIOD, HEARTBEAT_TIMEOUT, recv_within_timeout};
use protocol::link::{FrameReader, FrameWriter, HeartbeatConfig, MessageSender, run_writer};
use protocol::{Epoch, ExecutorLinkRequest, NodeCommand, NodeEvent, NodeInfo, Rank, Replica};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Shutdown, TcpStream};
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
    /// Latest start command of each remote replica.
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
            start_command.epoch == epoch && start_command.ranks.contains(&rank)
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
            (start_command.node, start_command.ranks.iter().position(|own| *own == rank));
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

    /// Commands a node to start the executors of a replica, and closes the links of the previous executors.
    pub(super) fn command_start(
        &self,
        replica: Replica,
        node: u16,
        epoch: Epoch,
        ranks: Vec<Rank>,
    ) {
        let start_command = StartCommand { node, epoch, ranks, issued: None };
        if let Some(StartCommand { issued: Some(previous), .. }) =
            self.lock().start_commands.insert(replica.0, start_command)
        {
            previous.close();
        }
    }

    /// Waits for a change of the registry, for at most `time`.
    pub(super) fn wait_for_change(&self, time: Duration) {
        // The result is ignored, because callers check their condition again after a timeout.
        drop(self.changed.wait_timeout(self.lock(), time));
    }

    /// Sends the start command of a replica to its node, unless the node has already received the command in
    /// its current session (connection). Returns the progress of the start command.
    pub(super) fn advance_start(&self, replica: Replica) -> StartCommandProgress {
        let mut state = self.lock();
        let NodeRegistryState { nodes, start_commands, tickets, .. } = &mut *state;
        let Some(start_command) = start_commands.get_mut(&replica.0) else {
            return StartCommandProgress::NodeDisconnected;
        };
        let Some(node) = &nodes[usize::from(start_command.node)] else {
            return StartCommandProgress::NodeDisconnected;
        };
        let ticket = *tickets;
        if start_command.issue(node.session, &node.commands, replica, ticket) {
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

    /// Closes the connections to a replica's executors, which ends the executors.
    pub(super) fn close(&self, replica: Replica) {
        let state = self.lock();
        if let Some(issued) = state
            .start_commands
            .get(&replica.0)
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
mod tests {
    use super::*;
    use protocol::link::MessageReceiver;
    use protocol::{HostSettings, ParallelConfig};
    use std::io::Read;
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_mins(1);
    const EXPECTED: ClusterRequirements = ClusterRequirements {
        nodes: 2,
        parallel: ParallelConfig { tp_size: 1, dp_size: 2, expert_parallel: false },
        manifest: 7,
    };

    fn member() -> NodeInfo {
        let ClusterRequirements { nodes, parallel, manifest } = EXPECTED;
        let build = env!("CARGO_PKG_VERSION").to_owned();
        NodeInfo { node: 1, nodes, parallel, build, model_digest: manifest }
    }

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// Worker node's end of a connection to node 0.
    struct TestNodeConnection {
        stream: TcpStream,
        commands: FrameReader<TcpStream, NodeCommand>,
    }

    fn join(registry: &Arc<NodeRegistry>, info: NodeInfo) -> TestNodeConnection {
        let (client, server) = connected();
        let registry = Arc::clone(registry);
        thread::spawn(move || registry.join(&info, server));
        TestNodeConnection {
            commands: FrameReader::new(client.try_clone().unwrap(), EPOCH),
            stream: client,
        }
    }

    impl TestNodeConnection {
        /// Returns the next command other than a heartbeat.
        fn next(&mut self) -> NodeCommand {
            loop {
                match self.commands.recv(LONG).unwrap() {
                    Some(NodeCommand::Heartbeat) => {}
                    other => return other.expect("a command"),
                }
            }
        }
    }

    fn offer(ticket: u64, rank: u16) -> ExecutorLinkRequest {
        let host = HostSettings {
            model_dir: "/m".into(),
            libraries: None,
            kernel_cache: None,
            threads: None,
            rendezvous: None,
        };
        ExecutorLinkRequest { ticket, rank: Rank(rank), host }
    }

    fn is_closed(mut stream: TcpStream) -> bool {
        stream.set_read_timeout(Some(LONG)).unwrap();
        matches!(stream.read(&mut [0]), Ok(0))
    }

    /// Waits until the start command of replica 1 has been sent; returns the ticket (number of the start
    /// command) that the node receives.
    fn ticket(registry: &NodeRegistry, node: &mut TestNodeConnection, epoch: u64) -> u64 {
        while !matches!(registry.advance_start(Replica(1)), StartCommandProgress::Issued(_)) {
            registry.wait_for_change(Duration::from_millis(5));
        }
        let NodeCommand::Start { replica: Replica(1), epoch: Epoch(received), ticket } =
            node.next()
        else {
            panic!("no start command")
        };
        assert_eq!(received, epoch);
        ticket
    }

    /// Commands the start of replica 1 on node 1.
    fn start_command(registry: &NodeRegistry, epoch: u64) {
        registry.command_start(Replica(1), 1, Epoch(epoch), vec![Rank(1)]);
    }

    #[test]
    fn link_requires_the_ticket_of_the_latest_command() {
        let registry = Arc::new(NodeRegistry::new(EXPECTED));
        start_command(&registry, 1);
        assert!(matches!(
            registry.advance_start(Replica(1)),
            StartCommandProgress::NodeDisconnected
        ));
        let mut node = join(&registry, member());
        assert_eq!(node.next(), NodeCommand::Accepted);
        let first = ticket(&registry, &mut node, 1);
        start_command(&registry, 2);
        let second = ticket(&registry, &mut node, 2);
        for offer in [offer(first, 1), offer(second, 0), offer(second.wrapping_add(9), 1)] {
            let (client, server) = connected();
            registry.accept_link(offer, server);
            assert!(is_closed(client));
        }
        let (client, server) = connected();
        registry.accept_link(offer(second, 1), server);
        let (duplicate, server) = connected();
        registry.accept_link(offer(second, 1), server);
        assert!(is_closed(duplicate), "the rank is linked already");
        let StartCommandProgress::Linked(links) = registry.advance_start(Replica(1)) else {
            panic!("not linked")
        };
        assert_eq!(links.iter().map(|link| link.rank).collect::<Vec<_>>(), [Rank(1)]);
    }

    #[test]
    fn links_are_closed_when_their_node_disconnects() {
        let registry = Arc::new(NodeRegistry::new(EXPECTED));
        start_command(&registry, 1);
        let mut node = join(&registry, member());
        assert_eq!(node.next(), NodeCommand::Accepted);
        let ticket_of_link = ticket(&registry, &mut node, 1);
        let (client, server) = connected();
        registry.accept_link(offer(ticket_of_link, 1), server);
        let StartCommandProgress::Linked(_links) = registry.advance_start(Replica(1)) else {
            panic!("not linked")
        };
        node.stream.shutdown(Shutdown::Both).unwrap();
        assert!(is_closed(client));
        // The node receives the start command again in its next session (connection).
        start_command(&registry, 3);
        let mut rejoined = join(&registry, member());
        assert_eq!(rejoined.next(), NodeCommand::Accepted);
        ticket(&registry, &mut rejoined, 3);
        registry.shut_down_nodes();
        assert_eq!(rejoined.next(), NodeCommand::Leave);
        drop(rejoined);
        registry.wait_until_disconnected(LONG);
        let ending = NodeCommand::Rejected { reason: "node 0 is shutting down".to_owned() };
        assert_eq!(join(&registry, member()).next(), ending, "rejected during shutdown");
        assert!(matches!(
            registry.advance_start(Replica(1)),
            StartCommandProgress::NodeDisconnected
        ));
    }

    #[test]
    fn waiting_node_is_rejected_during_shutdown() {
        let registry = Arc::new(NodeRegistry::new(EXPECTED));
        let mut first = join(&registry, member());
        assert_eq!(first.next(), NodeCommand::Accepted);
        let mut second = join(&registry, member());
        registry.shut_down_nodes();
        assert_eq!(first.next(), NodeCommand::Leave);
        assert_eq!(
            second.next(),
            NodeCommand::Rejected { reason: "node 0 is shutting down".to_owned() }
        );
    }

    #[test]
    fn links_of_a_previous_session_are_closed() {
        let registry = Arc::new(NodeRegistry::new(EXPECTED));
        registry.command_start(Replica(1), 1, Epoch(1), vec![Rank(1)]);
        let mut node = join(&registry, member());
        assert_eq!(node.next(), NodeCommand::Accepted);
        let first = ticket(&registry, &mut node, 1);
        let (_client, server) = connected();
        registry.accept_link(offer(first, 1), server);
        node.stream.shutdown(Shutdown::Both).unwrap();
        registry.wait_until_disconnected(LONG);
        // In the next session (connection) of the node, the command queue is full, so the start command is
        // not queued.
        let (_client, stream) = connected();
        let (commands, outbox) = sync_channel(0);
        registry.lock().nodes[1] = Some(ConnectedNode { session: 9, commands, stream });
        assert!(matches!(
            registry.advance_start(Replica(1)),
            StartCommandProgress::NodeDisconnected
        ));
        drop(outbox);
    }

    #[test]
    fn mismatched_node_is_rejected_with_reason() {
        let registry = Arc::new(NodeRegistry::new(EXPECTED));
        let parallel = ParallelConfig { tp_size: 2, ..EXPECTED.parallel };
        for (info, expected) in [
            (NodeInfo { nodes: 3, ..member() }, "node 1 has --nnodes 3, node 0 2"),
            (NodeInfo { node: 2, ..member() }, "node 2 is not in the range 1 to 1"),
            (NodeInfo { node: 0, ..member() }, "node 0 is not in the range 1 to 1"),
            (
                NodeInfo { parallel, ..member() },
                "has parallel sizes tensor-parallel 2, data-parallel 2",
            ),
            (NodeInfo { build: "0.0.9".to_owned(), ..member() }, "node 1 has build 0.0.9"),
            (NodeInfo { model_digest: 8, ..member() }, "model digest 0000000000000008"),
        ] {
            let NodeCommand::Rejected { reason } = join(&registry, info).next() else {
                panic!("admitted")
            };
            assert!(reason.contains(expected), "{reason}");
        }
    }
}
