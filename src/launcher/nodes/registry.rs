//! Who of the other nodes is there, and what passes between them and this one.

use super::order::{Arrived, Given, Order, Progress};
use super::remote_executor::RemoteExecutor;
use super::{BEAT_INTERVAL, BODY_BYTES_MAX, EPOCH, OUTBOX_MESSAGES};
use crate::launcher::silence::{SECOND_LOOK, SILENCE, heard};
use protocol::link::{Beat, FrameReader, FrameWriter, Sending, drain};
use protocol::{Epoch, FromNode, LinkOffer, Member, Parallel, Rank, Replica, ToNode};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long a node waits for its predecessor to be given up: it may have been cut off without a word.
const PREDECESSOR_WAIT: Duration =
    SILENCE.saturating_add(SECOND_LOOK).saturating_add(Duration::from_secs(2));

/// What every node of the cluster must be told alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Nodes.
    pub nodes: u16,
    /// How the ranks share the work.
    pub parallel: Parallel,
    /// Digest of the model folder.
    pub manifest: u64,
}

impl Expected {
    /// Whether a node belongs to this cluster.
    ///
    /// Errors: what differs, in words.
    fn check(&self, member: &Member) -> Result<(), String> {
        let node = member.node;
        let same = |what: &str, theirs: String, ours: String| {
            if theirs == ours {
                return Ok(());
            }
            Err(format!("node {node} has {what} {theirs}, node 0 {ours}"))
        };
        let sizes = |p: Parallel| {
            let experts = if p.experts { ", whole experts" } else { "" };
            format!("tensor-parallel {}, data-parallel {}{experts}", p.tp_size, p.dp_size)
        };
        let digest = |of: u64| format!("{of:016x}");
        same("build", member.build.clone(), env!("CARGO_PKG_VERSION").to_owned())?;
        same("--nnodes", member.nodes.to_string(), self.nodes.to_string())?;
        same("the sizes", sizes(member.parallel), sizes(self.parallel))?;
        same("model digest", digest(member.manifest), digest(self.manifest))?;
        if node == 0 || node >= self.nodes {
            return Err(format!("node {node} is none of the {} others", self.nodes - 1));
        }
        Ok(())
    }
}

/// All other nodes, as node 0 knows them.
pub struct Registry {
    expected: Expected,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By node; node 0 has none.
    seats: Vec<Option<Seat>>,
    /// What was ordered last of each replica that is elsewhere.
    orders: BTreeMap<u16, Order>,
    sessions: u64,
    tickets: u64,
    /// They have been told to leave.
    leaving: bool,
}

/// A node that is there.
struct Seat {
    session: u64,
    to: SyncSender<ToNode>,
    stream: TcpStream,
}

impl Registry {
    /// Nobody is there.
    pub fn new(expected: Expected) -> Self {
        let state = State {
            seats: (0..expected.nodes).map(|_| None).collect(),
            orders: BTreeMap::new(),
            sessions: 0,
            tickets: RandomState::new().hash_one(0), // Not those of a former node 0.
            leaving: false,
        };
        Self { expected, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Nodes of the cluster.
    pub fn nodes(&self) -> u16 {
        self.expected.nodes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves the connection of a node that wants to belong here, until its end.
    pub(super) fn join(&self, member: &Member, stream: TcpStream) {
        let node = member.node;
        if let Err(text) = self.expected.check(member) {
            return refuse(&stream, text);
        }
        let session = match self.seat(node, &stream) {
            Ok(Ok(session)) => session,
            Ok(Err(text)) => return refuse(&stream, text),
            Err(error) => return tracing::warn!(node, %error, "a node could not be let in"),
        };
        tracing::info!(node, "node is here");
        let cause = self.listen(stream);
        let leaving = self.leave(node, session, &cause);
        if leaving {
            tracing::info!(node, "node has left");
        } else {
            tracing::warn!(node, cause, "node is lost");
        }
    }

    /// Takes a node in, once its predecessor is given up, and returns its session; or says why it is refused.
    fn seat(&self, node: u16, stream: &TcpStream) -> io::Result<Result<u64, String>> {
        let (writer, handle) = (FrameWriter::new(stream.try_clone()?, EPOCH), stream.try_clone()?);
        let at = usize::from(node);
        let taken = |state: &mut State| state.seats[at].is_some() && !state.leaving;
        let waited = self.changed.wait_timeout_while(self.lock(), PREDECESSOR_WAIT, taken);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.leaving {
            return Ok(Err("it is ending".to_owned())); // Nobody would tell it to leave.
        }
        if taken(&mut state) {
            return Ok(Err(format!("node {node} is here already")));
        }
        let (to, outbox) = sync_channel(OUTBOX_MESSAGES);
        let beat = Beat { every: BEAT_INTERVAL, message: || ToNode::Beat };
        thread::Builder::new().name("node-out".to_owned()).spawn(move || {
            // Its end is seen by who listens.
            let _ = drain(outbox, writer, Some(&beat));
        })?;
        let _ = to.try_send(ToNode::Accepted); // It is empty.
        state.sessions += 1;
        let session = state.sessions;
        state.seats[at] = Some(Seat { session, to, stream: handle });
        drop(state);
        self.changed.notify_all();
        Ok(Ok(session))
    }

    /// Hears what a node says until it says no more. Returns why.
    fn listen(&self, stream: TcpStream) -> String {
        let mut reader = FrameReader::<_, FromNode>::limited(stream, EPOCH, BODY_BYTES_MAX);
        loop {
            match heard(&mut reader) {
                Ok(Some(FromNode::Beat)) => {}
                Ok(Some(FromNode::NotStarted { ticket, text })) => self.not_started(ticket, text),
                Ok(Some(FromNode::Ended { rank, epoch, text })) => self.ended(rank, epoch, &text),
                Ok(Some(FromNode::Join(_) | FromNode::Link(_))) => {
                    return "it said again who it is".to_owned();
                }
                Ok(None) => return format!("no sign of life for {} s", SILENCE.as_secs()),
                Err(error) => return error.to_string(),
            }
        }
    }

    fn not_started(&self, ticket: u64, text: String) {
        let mut state = self.lock();
        if let Some(given) = state.given().find(|given| given.ticket == ticket) {
            given.failed = Some(text);
            self.changed.notify_all();
        }
    }

    fn ended(&self, rank: Rank, epoch: Epoch, text: &str) {
        let state = self.lock();
        let own = |order: &&Order| order.epoch == epoch && order.ranks.contains(&rank);
        let Some(order) = state.orders.values().find(own) else { return };
        let executors = order.given.iter().flat_map(|given| &given.executors);
        executors
            .filter(|executor| executor.rank() == rank)
            .for_each(|executor| executor.ended(text));
    }

    /// A node is gone, and what it ran. Returns whether it was told to leave.
    fn leave(&self, node: u16, session: u64, cause: &str) -> bool {
        let mut state = self.lock();
        let seat = &mut state.seats[usize::from(node)];
        if let Some(seat) = seat.take_if(|seat| seat.session == session) {
            // For whoever writes to it.
            let _ = seat.stream.shutdown(Shutdown::Both);
        }
        for given in state.given().filter(|given| given.session == session) {
            let text = format!("the node is lost: {cause}");
            given.executors.iter().for_each(|executor| executor.ended(&text));
            given.close();
        }
        let leaving = state.leaving;
        drop(state);
        self.changed.notify_all();
        leaving
    }

    /// Takes a link in, if somebody waits for it; else it closes.
    pub(super) fn link(&self, offer: LinkOffer, stream: TcpStream) {
        let LinkOffer { ticket, rank, host } = offer;
        let mut state = self.lock();
        let ordered = |order: &&mut Order| order.given.as_ref().is_some_and(|g| g.ticket == ticket);
        let Some(order) = state.orders.values_mut().find(ordered) else {
            return tracing::debug!(rank = rank.0, "a link that nobody waits for");
        };
        let (node, place) = (order.node, order.ranks.iter().position(|own| *own == rank));
        let (Some(given), Some(place)) = (&mut order.given, place) else { return };
        let (Ok(handle), None) = (stream.try_clone(), &given.arrived[place]) else { return };
        let executor = Arc::new(RemoteExecutor::new(rank, node));
        given.streams.push(handle);
        given.executors.push(Arc::clone(&executor));
        given.arrived[place] = Some(Arrived { rank, stream, host, executor });
        drop(state);
        self.changed.notify_all();
    }

    /// Wants the executors of a replica started on a node; links of former ones close.
    pub(super) fn order(&self, replica: Replica, node: u16, epoch: Epoch, ranks: Vec<Rank>) {
        let order = Order { node, epoch, ranks, given: None };
        if let Some(Order { given: Some(former), .. }) = self.lock().orders.insert(replica.0, order)
        {
            former.close();
        }
    }

    /// Waits until something has changed, or for so long.
    pub(super) fn wait(&self, time: Duration) {
        // Whoever waits looks again either way.
        drop(self.changed.wait_timeout(self.lock(), time));
    }

    /// Passes an order on to its node, if it has not got it, and says how far it is.
    pub(super) fn further(&self, replica: Replica) -> Progress {
        let mut state = self.lock();
        let State { seats, orders, tickets, .. } = &mut *state;
        let Some(order) = orders.get_mut(&replica.0) else { return Progress::Absent };
        let Some(seat) = &seats[usize::from(order.node)] else { return Progress::Absent };
        let ticket = *tickets;
        if order.give(seat.session, &seat.to, replica, ticket) {
            *tickets = tickets.wrapping_add(1);
        }
        // Links of a former session of the node are closed.
        let own = order.given.as_mut().filter(|given| given.session == seat.session);
        let Some(given) = own else { return Progress::Absent };
        if let Some(text) = given.failed.take() {
            return Progress::Failed(text);
        }
        if given.arrived.iter().any(Option::is_none) {
            return Progress::Ordered(given.at);
        }
        Progress::Arrived(given.arrived.iter_mut().filter_map(Option::take).collect())
    }

    /// Closes the links of a replica.
    pub(super) fn close(&self, replica: Replica) {
        let state = self.lock();
        if let Some(given) = state.orders.get(&replica.0).and_then(|order| order.given.as_ref()) {
            given.close();
        }
    }

    /// Tells all nodes to leave: their executors have been told to stop.
    pub fn dismiss(&self) {
        let mut state = self.lock();
        state.leaving = true;
        for seat in state.seats.iter().flatten() {
            let _ = seat.to.try_send(ToNode::Leave); // One that hears nothing notices that this process ends.
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until all nodes have left.
    pub fn wait_empty(&self, patience: Duration) {
        let occupied = |state: &mut State| state.seats.iter().any(Option::is_some);
        let waited = self.changed.wait_timeout_while(self.lock(), patience, occupied);
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            tracing::warn!("not every node has left in time");
        }
    }
}

/// Tells a node that it does not belong here.
fn refuse(stream: &TcpStream, text: String) {
    tracing::warn!(text, "a node was refused");
    // It may have left.
    let _ = FrameWriter::new(stream, EPOCH).send(ToNode::Refused { text });
}

impl State {
    fn given(&mut self) -> impl Iterator<Item = &mut Given> {
        self.orders.values_mut().filter_map(|order| order.given.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::HostSettings;
    use protocol::link::Receiving;
    use std::io::Read;
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_mins(1);
    const EXPECTED: Expected = Expected {
        nodes: 2,
        parallel: Parallel { tp_size: 1, dp_size: 2, experts: false },
        manifest: 7,
    };

    fn member() -> Member {
        let Expected { nodes, parallel, manifest } = EXPECTED;
        let build = env!("CARGO_PKG_VERSION").to_owned();
        Member { node: 1, nodes, parallel, build, manifest }
    }

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// A node's end of its connection.
    struct Post {
        stream: TcpStream,
        orders: FrameReader<TcpStream, ToNode>,
    }

    fn join(registry: &Arc<Registry>, member: Member) -> Post {
        let (near, far) = connected();
        let registry = Arc::clone(registry);
        thread::spawn(move || registry.join(&member, far));
        Post { orders: FrameReader::new(near.try_clone().unwrap(), EPOCH), stream: near }
    }

    impl Post {
        /// The next message that is no sign of life.
        fn next(&mut self) -> ToNode {
            loop {
                match self.orders.recv(LONG).unwrap() {
                    Some(ToNode::Beat) => {}
                    other => return other.expect("an order"),
                }
            }
        }
    }

    fn offer(ticket: u64, rank: u16) -> LinkOffer {
        let dir = "/m".into();
        let host =
            HostSettings { dir, libraries: None, kernel_cache: None, threads: None, meeting: None };
        LinkOffer { ticket, rank: Rank(rank), host }
    }

    fn is_closed(mut stream: TcpStream) -> bool {
        stream.set_read_timeout(Some(LONG)).unwrap();
        matches!(stream.read(&mut [0]), Ok(0))
    }

    /// The ticket of the order that a node gets for a replica that is wanted.
    fn ticket(registry: &Registry, post: &mut Post, epoch: u64) -> u64 {
        while !matches!(registry.further(Replica(1)), Progress::Ordered(_)) {
            registry.wait(Duration::from_millis(5));
        }
        let ToNode::Start { replica: Replica(1), epoch: Epoch(of), ticket } = post.next() else {
            panic!("no start")
        };
        assert_eq!(of, epoch);
        ticket
    }

    #[test]
    fn a_link_needs_the_ticket_of_the_last_order() {
        let registry = Arc::new(Registry::new(EXPECTED));
        let order = |epoch| registry.order(Replica(1), 1, Epoch(epoch), vec![Rank(1)]);
        order(1);
        assert!(matches!(registry.further(Replica(1)), Progress::Absent));
        let mut post = join(&registry, member());
        assert_eq!(post.next(), ToNode::Accepted);
        let former = ticket(&registry, &mut post, 1);
        order(2);
        let latter = ticket(&registry, &mut post, 2);
        for offer in [offer(former, 1), offer(latter, 0), offer(latter.wrapping_add(9), 1)] {
            let (near, far) = connected();
            registry.link(offer, far);
            assert!(is_closed(near));
        }
        let (near, far) = connected();
        registry.link(offer(latter, 1), far);
        let (second, far) = connected();
        registry.link(offer(latter, 1), far);
        assert!(is_closed(second), "there is one already");
        let Progress::Arrived(links) = registry.further(Replica(1)) else { panic!("not there") };
        assert_eq!(links.iter().map(|link| link.rank).collect::<Vec<_>>(), [Rank(1)]);

        // With the node its links are gone, and the next life of it gets the order anew.
        post.stream.shutdown(Shutdown::Both).unwrap();
        assert!(is_closed(near));
        order(3);
        let mut again = join(&registry, member());
        assert_eq!(again.next(), ToNode::Accepted);
        ticket(&registry, &mut again, 3);
        registry.dismiss();
        assert_eq!(again.next(), ToNode::Leave);
        drop(again);
        registry.wait_empty(LONG);
        let ending = ToNode::Refused { text: "it is ending".to_owned() };
        assert_eq!(join(&registry, member()).next(), ending, "there is nothing to join");
        assert!(matches!(registry.further(Replica(1)), Progress::Absent));
    }

    #[test]
    fn who_waits_for_its_predecessor_while_all_are_told_to_leave_is_refused() {
        let registry = Arc::new(Registry::new(EXPECTED));
        let mut former = join(&registry, member());
        assert_eq!(former.next(), ToNode::Accepted);
        let mut latter = join(&registry, member());
        registry.dismiss();
        assert_eq!(former.next(), ToNode::Leave);
        assert_eq!(latter.next(), ToNode::Refused { text: "it is ending".to_owned() });
    }

    #[test]
    fn links_of_a_former_session_are_nobodys() {
        let registry = Arc::new(Registry::new(EXPECTED));
        registry.order(Replica(1), 1, Epoch(1), vec![Rank(1)]);
        let mut post = join(&registry, member());
        assert_eq!(post.next(), ToNode::Accepted);
        let former = ticket(&registry, &mut post, 1);
        let (_near, far) = connected();
        registry.link(offer(former, 1), far);
        post.stream.shutdown(Shutdown::Both).unwrap();
        registry.wait_empty(LONG);
        // Its next life, which is too busy to take the order.
        let (_near, stream) = connected();
        let (to, outbox) = sync_channel(0);
        registry.lock().seats[1] = Some(Seat { session: 9, to, stream });
        assert!(matches!(registry.further(Replica(1)), Progress::Absent));
        drop(outbox);
    }

    #[test]
    fn who_does_not_belong_here_is_told_why() {
        let registry = Arc::new(Registry::new(EXPECTED));
        let parallel = Parallel { tp_size: 2, ..EXPECTED.parallel };
        for (member, reason) in [
            (Member { nodes: 3, ..member() }, "node 1 has --nnodes 3, node 0 2"),
            (Member { node: 2, ..member() }, "node 2 is none of the 1 others"),
            (Member { node: 0, ..member() }, "node 0 is none of the 1 others"),
            (Member { parallel, ..member() }, "has the sizes tensor-parallel 2, data-parallel 2"),
            (Member { build: "0.0.9".to_owned(), ..member() }, "node 1 has build 0.0.9"),
            (Member { manifest: 8, ..member() }, "model digest 0000000000000008"),
        ] {
            let ToNode::Refused { text } = join(&registry, member).next() else { panic!("let in") };
            assert!(text.contains(reason), "{text}");
        }
    }
}
