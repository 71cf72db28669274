//! Opens the sockets of one publisher.

use super::config::KvEventsConfig;
use super::endpoint::{self, EndpointError, TopicFields};
use super::pub_socket::PubSocketMode;
use super::zmtp::{PeerAddress, PeerListener};
use std::io;

/// Reason why the sockets of a publisher cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The configured endpoint or topic is invalid.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The operating system cannot open the socket.
    #[error("cannot publish KV events at {endpoint}: {cause}")]
    Open {
        /// Endpoint that could not be opened.
        endpoint: String,
        /// Error of the operating system.
        cause: io::Error,
    },
}

/// Open sockets of one publisher, with their endpoints.
pub(super) struct PublisherSockets {
    pub(super) publish: PubSocketMode,
    pub(super) endpoint: String,
    pub(super) binds: bool,
    pub(super) replay: Option<BoundSocket>,
    pub(super) topic: String,
}

/// Listening socket of a publisher.
pub(super) struct BoundSocket {
    pub(super) listener: PeerListener,
    /// Endpoint of the socket, with the port that the operating system chose if port 0 was configured.
    pub(super) endpoint: String,
}

/// Opens the sockets of DP rank `topic_fields.rank`.
pub(super) fn open(
    config: &KvEventsConfig,
    topic_fields: &TopicFields,
) -> Result<PublisherSockets, SocketError> {
    let topic = endpoint::topic(&config.topic, topic_fields)?;
    let at = endpoint::endpoint_of_rank("endpoint", &config.endpoint, topic_fields.rank)?;
    let binds = endpoint::binds(config.bind, &at);
    let (publish, endpoint) = if binds {
        let BoundSocket { listener, endpoint } = bind("endpoint", &at)?;
        (PubSocketMode::Bind(listener), endpoint)
    } else {
        (PubSocketMode::Connect(address("endpoint", &at)?), at)
    };
    let replay = config.replay_endpoint.as_ref().map(|replay| {
        bind(
            "replay_endpoint",
            &endpoint::endpoint_of_rank("replay_endpoint", replay, topic_fields.rank)?,
        )
    });
    Ok(PublisherSockets { publish, endpoint, binds, replay: replay.transpose()?, topic })
}

fn address(key: &'static str, at: &str) -> Result<PeerAddress, SocketError> {
    let shape = || EndpointError::Shape { key, endpoint: at.to_owned() };
    Ok(PeerAddress::parse(at).ok_or_else(shape)?)
}

/// Opens a listening socket at an endpoint.
fn bind(key: &'static str, at: &str) -> Result<BoundSocket, SocketError> {
    let opened = PeerListener::bind(&address(key, at)?);
    let listener = opened.map_err(|cause| SocketError::Open { endpoint: at.to_owned(), cause })?;
    if endpoint::is_public(at) {
        let endpoint = at;
        tracing::warn!(endpoint, "anyone who can reach this address can read the users' token ids");
    }
    let endpoint = listener.endpoint().unwrap_or_else(|| at.to_owned());
    Ok(BoundSocket { listener, endpoint })
}
