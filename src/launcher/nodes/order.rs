//! What another node has been ordered to start, and which links have come of it.

use super::remote_executor::RemoteExecutor;
use protocol::{Epoch, HostSettings, Rank, Replica, ToNode};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

/// Executors that a node shall start.
pub(super) struct Order {
    pub(super) node: u16,
    pub(super) epoch: Epoch,
    pub(super) ranks: Vec<Rank>,
    pub(super) given: Option<Given>,
}

/// An order that a node has got.
pub(super) struct Given {
    pub(super) session: u64,
    pub(super) ticket: u64,
    pub(super) at: Instant,
    /// By rank, until somebody takes them.
    pub(super) arrived: Vec<Option<Arrived>>,
    /// Of those that have arrived, to close them.
    pub(super) streams: Vec<TcpStream>,
    pub(super) executors: Vec<Arc<RemoteExecutor>>,
    pub(super) failed: Option<String>,
}

/// A link that an executor of another node is about to use.
pub(super) struct Arrived {
    pub(super) rank: Rank,
    pub(super) stream: TcpStream,
    pub(super) host: HostSettings,
    pub(super) executor: Arc<RemoteExecutor>,
}

/// How far an order is.
pub(super) enum Progress {
    /// The node is not there.
    Absent,
    /// It starts the executors, since then.
    Ordered(Instant),
    /// It cannot.
    Failed(String),
    /// Here they are, in the order of their ranks.
    Arrived(Vec<Arrived>),
}

impl Order {
    /// Sends it to its node's session, unless that has it already. Returns whether it was sent.
    pub(super) fn give(
        &mut self,
        session: u64,
        to: &SyncSender<ToNode>,
        replica: Replica,
        ticket: u64,
    ) -> bool {
        if self.given.as_ref().is_some_and(|given| given.session == session) {
            return false;
        }
        let start = ToNode::Start { replica, epoch: self.epoch, ticket };
        if to.try_send(start).is_err() {
            return false; // It is about to be given up.
        }
        self.given = Some(Given {
            session,
            ticket,
            at: Instant::now(),
            arrived: self.ranks.iter().map(|_| None).collect(),
            streams: Vec::new(),
            executors: Vec::new(),
            failed: None,
        });
        true
    }
}

impl Given {
    /// Closes its links.
    pub(super) fn close(&self) {
        for stream in &self.streams {
            let _ = stream.shutdown(Shutdown::Both); // It may be closed already.
        }
    }
}
