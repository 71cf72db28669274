//! Tests of the registry with worker nodes on loopback connections.

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
        gpus: vec![],
        host_address: None,
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
    while !matches!(registry.advance_start(Rank(1)), StartCommandProgress::Issued(_)) {
        registry.wait_for_change(Duration::from_millis(5));
    }
    let NodeCommand::Start { first_rank: Rank(1), count: 1, epoch: Epoch(received), ticket } =
        node.next()
    else {
        panic!("no start command")
    };
    assert_eq!(received, epoch);
    ticket
}

/// Commands the start of replica 1 on node 1.
fn start_command(registry: &NodeRegistry, epoch: u64) {
    registry.command_start(1, Epoch(epoch), 1..2);
}

#[test]
fn link_requires_the_ticket_of_the_latest_command() {
    let registry = Arc::new(NodeRegistry::new(EXPECTED));
    start_command(&registry, 1);
    assert!(matches!(registry.advance_start(Rank(1)), StartCommandProgress::NodeDisconnected));
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
    let (_client, server) = connected();
    registry.accept_link(offer(second, 1), server);
    let (duplicate, server) = connected();
    registry.accept_link(offer(second, 1), server);
    assert!(is_closed(duplicate), "the rank is linked already");
    let StartCommandProgress::Linked(links) = registry.advance_start(Rank(1)) else {
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
    let StartCommandProgress::Linked(_links) = registry.advance_start(Rank(1)) else {
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
    assert!(matches!(registry.advance_start(Rank(1)), StartCommandProgress::NodeDisconnected));
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
    registry.command_start(1, Epoch(1), 1..2);
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
    assert!(matches!(registry.advance_start(Rank(1)), StartCommandProgress::NodeDisconnected));
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
