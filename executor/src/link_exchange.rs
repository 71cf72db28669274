//! Exchange of the endpoints of ranks on several hosts, through the links of the ranks to the scheduler.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use protocol::link::{LinkError, MessageReceiver};
use protocol::{ExecutorCommand, ExecutorEvent, RankEndpoint};

use crate::run::OutboxMessage;
use crate::{EndpointExchange, ExecutorError};

/// Timeout of each wait for the endpoints of other ranks.
const EXCHANGE_POLL: Duration = Duration::from_secs(1);

/// Exchange of endpoints through the link to the scheduler.
pub(crate) struct LinkExchange<'a, R> {
    pub(crate) link: &'a mut R,
    pub(crate) outbox: &'a SyncSender<OutboxMessage>,
}

impl<R: MessageReceiver<Message = ExecutorCommand>> EndpointExchange for LinkExchange<'_, R> {
    fn exchange(&mut self, own: RankEndpoint) -> Result<Vec<RankEndpoint>, ExecutorError> {
        let message = OutboxMessage::Message(ExecutorEvent::Endpoint(own));
        self.outbox.send(message).map_err(|_| ExecutorError::Link(LinkError::Closed))?;
        // The scheduler limits the time of the start, and closes the link if another rank fails.
        loop {
            match self.link.recv(EXCHANGE_POLL).map_err(ExecutorError::Link)? {
                Some(ExecutorCommand::Endpoints(endpoints)) => return Ok(endpoints),
                Some(ExecutorCommand::Shutdown) => {
                    return Err(ExecutorError::Link(LinkError::Closed));
                }
                _ => {}
            }
        }
    }
}
