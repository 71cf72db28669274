//! Listening socket of node 0, which runs the scheduler: peers that prove that they have the cluster secret
//! are admitted; all other connections are closed.

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

/// Maximum number of unauthenticated connections. Node 0 closes further connections, and the connecting nodes
/// retry.
const UNAUTHENTICATED_MAX: usize = 32;
/// Pause after `accept` has failed because no file descriptor is available.
const DESCRIPTORS_EXHAUSTED_WAIT: Duration = Duration::from_millis(50);

/// Listening socket of node 0, before it accepts connections.
pub struct NodeListener {
    listener: TcpListener,
    address: SocketAddr,
    secret: ClusterSecret,
}

impl NodeListener {
    /// Opens the listening socket of node 0 for peers that have the secret.
    ///
    /// Errors: the address is not an address of this machine, or is in use.
    pub fn open(cluster: &ClusterConfig, secret: ClusterSecret) -> Result<Self> {
        let ClusterConfig { host, port, nodes, .. } = cluster;
        let listener = TcpListener::bind((host.as_str(), *port)).with_context(|| {
            format!("cannot listen for {} other nodes on {host}:{port} (--master-addr)", nodes - 1)
        })?;
        let address = listener.local_addr().context("the socket has no address")?;
        let named = host.parse::<IpAddr>().is_ok() || host == "localhost";
        if address.ip().is_loopback() && !named {
            tracing::warn!(
                %address,
                "{host} resolves to a loopback address: other machines cannot connect. \
                 --master-addr must be an address that they can reach"
            );
        }
        Ok(Self { listener, address, secret })
    }

    /// Starts accepting nodes.
    ///
    /// Errors: no thread is available.
    pub fn start(self, registry: &Arc<NodeRegistry>) -> io::Result<()> {
        tracing::info!(address = %self.address, nodes = registry.nodes(), "waiting for the other nodes");
        let (secret, registry) = (self.secret, Arc::clone(registry));
        let log_limiter = Arc::new(LogRateLimiter::default());
        let acceptor =
            NodeAcceptor { secret, registry, unauthenticated: Arc::new(()), log_limiter };
        let accept = move || {
            for stream in self.listener.incoming() {
                match stream {
                    Ok(stream) => acceptor.accept(stream),
                    Err(_) => thread::sleep(DESCRIPTORS_EXHAUSTED_WAIT),
                }
            }
        };
        thread::Builder::new().name("node-accept".to_owned()).spawn(accept).map(drop)
    }
}

/// Accepts connections to node 0 and authenticates their peers.
struct NodeAcceptor {
    secret: ClusterSecret,
    registry: Arc<NodeRegistry>,
    /// Counter of unauthenticated connections: each of them holds one strong reference, in addition to the
    /// reference in this field.
    unauthenticated: Arc<()>,
    /// Limits the rate of log lines about rejected connections.
    log_limiter: Arc<LogRateLimiter>,
}

impl NodeAcceptor {
    /// Serves a connection on a separate thread. Closes the connection if there are too many unauthenticated
    /// connections.
    fn accept(&self, stream: TcpStream) {
        if Arc::strong_count(&self.unauthenticated) > UNAUTHENTICATED_MAX {
            return;
        }
        let (unauthenticated, secret) = (Arc::clone(&self.unauthenticated), self.secret.clone());
        let (registry, log_limiter) = (Arc::clone(&self.registry), Arc::clone(&self.log_limiter));
        let serve = move || {
            let admitted = stream
                .set_nodelay(true)
                .map_err(Into::into)
                .and_then(|()| admit(&stream, &secret, HANDSHAKE_TIME));
            drop(unauthenticated);
            match admitted {
                Ok(NodeEvent::Join(info)) => registry.join(&info, stream),
                Ok(NodeEvent::Link(offer)) => registry.accept_link(offer, stream),
                Ok(_) => tracing::warn!("node sent neither a join request nor an executor link"),
                Err(error) => log_rejection(&error, &stream, &log_limiter),
            }
        };
        // If no thread is available, the connection is closed and the node retries.
        let _ = thread::Builder::new().name("node-link".to_owned()).spawn(serve);
    }
}

/// Logs a rejected connection, subject to the rate limit.
fn log_rejection(error: &HandshakeError, stream: &TcpStream, log_limiter: &LogRateLimiter) {
    let peer = stream.peer_addr().ok().map(tracing::field::display);
    if error.is_not_a_node() {
        return tracing::debug!(peer, %error, "connection is not from a node");
    }
    if let Some(suppressed) = log_limiter.allow(Instant::now()) {
        tracing::warn!(peer, %error, suppressed, "node connection rejected");
    }
}
