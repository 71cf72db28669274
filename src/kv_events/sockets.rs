//! Opens the sockets of one publisher.

use super::endpoint::{self, EndpointError, TopicWords};
use crate::config::KvEventsConfig;
use zmq::{Context, Socket, SocketType};

/// A replay request is 17 bytes and an identity; longer messages end their connection.
const REQUEST_BYTES_MAX: i64 = 1024;

/// Why a publisher has no sockets.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The address cannot be used.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The system refuses it.
    #[error("cannot publish KV events at {endpoint}: {cause}")]
    Open {
        /// The address.
        endpoint: String,
        /// Why.
        cause: zmq::Error,
    },
}

/// What a batch has at most, nearly always: a step that fills a prompt of some thousand tokens has as much.
const BATCH_BYTES: u64 = 64 << 10;

/// Batches that may wait for one slow subscriber, so that they stay within its bytes. The socket counts batches alone,
/// and has to be told once and for all: libzmq hears of what a subscriber has taken only after half as many batches
/// as it was told, so one that has taken everything looks full for good once fewer are allowed.
fn waiting_max(config: &KvEventsConfig) -> i32 {
    let by_bytes = i32::try_from((config.max_queue_bytes / BATCH_BYTES).max(1)).unwrap_or(i32::MAX);
    if config.hwm == 0 { by_bytes } else { by_bytes.min(config.hwm) }
}

/// Open sockets and where they are.
pub(super) struct Sockets {
    pub(super) publish: Socket,
    pub(super) endpoint: String,
    pub(super) binds: bool,
    pub(super) replay: Option<(Socket, String)>,
    pub(super) topic: String,
}

/// Opens the sockets of rank `words.rank`.
pub(super) fn open(
    config: &KvEventsConfig,
    context: &Context,
    words: &TopicWords,
) -> Result<Sockets, SocketError> {
    let topic = endpoint::topic(&config.topic, words)?;
    let at = endpoint::of_rank("endpoint", &config.endpoint, words.rank)?;
    let binds = endpoint::binds(config.bind, &at);
    let (publish, endpoint) =
        socket(context, zmq::PUB, &at, binds, |publish| publish.set_sndhwm(waiting_max(config)))?;
    let replay = config.replay_endpoint.as_ref().map(|replay| {
        let at = endpoint::of_rank("replay_endpoint", replay, words.rank)?;
        let replies = i32::try_from(2 * (config.buffer_steps + 1)).unwrap_or(i32::MAX);
        socket(context, zmq::ROUTER, &at, true, |router| {
            router.set_sndhwm(replies)?;
            router.set_maxmsgsize(REQUEST_BYTES_MAX)
        })
    });
    Ok(Sockets { publish, endpoint, binds, replay: replay.transpose()?, topic })
}

/// A socket at an address, and the address it really got.
fn socket(
    context: &Context,
    kind: SocketType,
    at: &str,
    binds: bool,
    set: impl FnOnce(&Socket) -> zmq::Result<()>,
) -> Result<(Socket, String), SocketError> {
    let open = || {
        let socket = context.socket(kind)?;
        socket.set_linger(0)?;
        socket.set_ipv6(endpoint::is_v6(at))?;
        set(&socket)?;
        if binds {
            socket.bind(at)?;
        } else {
            socket.connect(at)?;
        }
        let real = socket.get_last_endpoint()?;
        Ok((socket, real.unwrap_or_else(|_| at.to_owned())))
    };
    let opened = open().map_err(|cause| SocketError::Open { endpoint: at.to_owned(), cause })?;
    if endpoint::is_public(at) {
        let endpoint = at;
        tracing::warn!(endpoint, "anyone who can reach this address reads users' tokens");
    }
    Ok(opened)
}
