//! What another node has been ordered to start, and which links have come of it.

use super::remote_executor::RemoteExecutor;
use protocol::{Epoch, HostSettings, NodeCommand, Rank, Replica};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

/// Executors that a node shall start.
pub(super) struct StartOrder {
    pub(super) node: u16,
    pub(super) epoch: Epoch,
    pub(super) ranks: Vec<Rank>,
    pub(super) issued: Option<IssuedOrder>,
}

/// An order that a node has got.
pub(super) struct IssuedOrder {
    pub(super) session: u64,
    pub(super) ticket: u64,
    pub(super) at: Instant,
    /// By rank, until somebody takes them.
    pub(super) links: Vec<Option<PendingLink>>,
    /// Of those that have arrived, to close them.
    pub(super) streams: Vec<TcpStream>,
    pub(super) executors: Vec<Arc<RemoteExecutor>>,
    pub(super) failed: Option<String>,
}

/// A link that an executor of another node is about to use.
pub(super) struct PendingLink {
    pub(super) rank: Rank,
    pub(super) stream: TcpStream,
    pub(super) host: HostSettings,
    pub(super) executor: Arc<RemoteExecutor>,
}

/// How far an order is.
pub(super) enum OrderProgress {
    /// The node is not there.
    NodeDisconnected,
    /// It starts the executors, since then.
    Issued(Instant),
    /// It cannot.
    Failed(String),
    /// Here they are, in the order of their ranks.
    Linked(Vec<PendingLink>),
}

impl StartOrder {
    /// Sends it to its node's session, unless that has it already. Returns whether it was sent.
    pub(super) fn issue(
        &mut self,
        session: u64,
        to: &SyncSender<NodeCommand>,
        replica: Replica,
        ticket: u64,
    ) -> bool {
        if self.issued.as_ref().is_some_and(|given| given.session == session) {
            return false;
        }
        let start = NodeCommand::Start { replica, epoch: self.epoch, ticket };
        if to.try_send(start).is_err() {
            return false; // It is about to be given up.
        }
        self.issued = Some(IssuedOrder {
            session,
            ticket,
            at: Instant::now(),
            links: self.ranks.iter().map(|_| None).collect(),
            streams: Vec::new(),
            executors: Vec::new(),
            failed: None,
        });
        true
    }
}

impl IssuedOrder {
    /// Closes its links.
    pub(super) fn close(&self) {
        for stream in &self.streams {
            let _ = stream.shutdown(Shutdown::Both); // It may be closed already.
        }
    }
}
