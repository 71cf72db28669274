//! Node 0's socket for the others: who proves to know the secret is let in, everybody else is forgotten at once.

use super::HANDSHAKE_TIME;
use super::handshake::{HandshakeError, admit};
use super::node_registry::NodeRegistry;

use super::cluster::{ClusterConfig, ClusterSecret};
use anyhow::{Context, Result};
use metrics::LogRateLimiter;
use protocol::NodeEvent;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Connections that have proved nothing yet. Others are closed, and come again.
const UNAUTHENTICATED_MAX: usize = 32;
/// Without descriptors nothing can be accepted; they come back.
const DESCRIPTORS_EXHAUSTED_WAIT: Duration = Duration::from_millis(50);

/// The open socket; nobody is let in yet.
pub struct NodeListener {
    listener: TcpListener,
    address: SocketAddr,
    secret: ClusterSecret,
}

impl NodeListener {
    /// Opens the socket of node 0 for those who know the secret.
    ///
    /// Errors: the address is not of this machine, or taken.
    pub fn open(cluster: &ClusterConfig, secret: ClusterSecret) -> Result<Self> {
        let ClusterConfig { host, port, nodes, .. } = cluster;
        let listener = TcpListener::bind((host.as_str(), *port)).with_context(|| {
            format!("cannot listen for {} other nodes on {host}:{port}, which --master-addr says is here", nodes - 1)
        })?;
        let address = listener.local_addr().context("the socket has no address")?;
        let named = host.parse::<IpAddr>().is_ok() || host == "localhost";
        if address.ip().is_loopback() && !named {
            tracing::warn!(
                %address,
                "{host} is this machine's loopback address here: other machines cannot connect. \
                 --master-addr takes an address that they reach"
            );
        }
        Ok(Self { listener, address, secret })
    }

    /// Lets nodes in from now on.
    ///
    /// Errors: the system gives no thread.
    pub fn start(self, registry: &Arc<NodeRegistry>) -> io::Result<()> {
        tracing::info!(address = %self.address, nodes = registry.nodes(), "waiting for the other nodes");
        let (secret, registry) = (self.secret, Arc::clone(registry));
        let refusals = Arc::new(LogRateLimiter::default());
        let guests =
            NodeAcceptor { secret, registry, unauthenticated: Arc::new(()), log_limiter: refusals };
        let accept = move || {
            for stream in self.listener.incoming() {
                match stream {
                    Ok(stream) => guests.accept(stream),
                    Err(_) => thread::sleep(DESCRIPTORS_EXHAUSTED_WAIT),
                }
            }
        };
        thread::Builder::new().name("node-accept".to_owned()).spawn(accept).map(drop)
    }
}

/// Who comes in.
struct NodeAcceptor {
    secret: ClusterSecret,
    registry: Arc<NodeRegistry>,
    /// As many other handles of it as there are connections that have proved nothing yet.
    unauthenticated: Arc<()>,
    /// Of those that were told.
    log_limiter: Arc<LogRateLimiter>,
}

impl NodeAcceptor {
    /// Gives a connection a thread of its own, unless there are too many.
    fn accept(&self, stream: TcpStream) {
        if Arc::strong_count(&self.unauthenticated) > UNAUTHENTICATED_MAX {
            return;
        }
        let (stranger, secret) = (Arc::clone(&self.unauthenticated), self.secret.clone());
        let (registry, refusals) = (Arc::clone(&self.registry), Arc::clone(&self.log_limiter));
        let meet = move || {
            let admitted = stream
                .set_nodelay(true)
                .map_err(Into::into)
                .and_then(|()| admit(&stream, &secret, HANDSHAKE_TIME));
            drop(stranger);
            match admitted {
                Ok(NodeEvent::Join(member)) => registry.join(&member, stream),
                Ok(NodeEvent::Link(offer)) => registry.accept_link(offer, stream),
                Ok(_) => tracing::warn!("a node said nothing of what it wants"),
                Err(error) => log_rejection(&error, &stream, &refusals),
            }
        };
        // Without a thread the connection closes, and whoever it was comes again.
        let _ = thread::Builder::new().name("node-link".to_owned()).spawn(meet);
    }
}

/// Says in the log who was not let in, unless that was said often enough lately.
fn log_rejection(error: &HandshakeError, stream: &TcpStream, refusals: &LogRateLimiter) {
    let peer = stream.peer_addr().ok();
    if error.is_not_a_node() {
        return tracing::debug!(?peer, %error, "no node");
    }
    if let Some(untold) = refusals.allow(Instant::now()) {
        tracing::warn!(?peer, %error, untold, "a node was not let in");
    }
}
