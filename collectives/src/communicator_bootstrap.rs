//! Bootstrap of the communicator of a device group: rank 0 sends the communicator id to all ranks through
//! the rendezvous, and every rank waits until all ranks have joined the communicator.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kernels::gpu::GpuBackend;

use crate::communicator::{CollectiveLibrary, CommunicatorId, GpuCommunicator};
use crate::group_rendezvous::exchange_words;
use crate::group_watchdog::GroupHealth;
use crate::{CollectiveBackend, CollectiveError, SharedMemoryGroup};

/// Timeout for the creation of the communicator, after all ranks have joined the shared memory group.
const JOIN_TIMEOUT: Duration = Duration::from_mins(2);
/// Interval at which the creation of the communicator is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Creates the communicator of the ranks of `shared`. If a rank cannot join, the communicator is aborted and
/// the group fails.
pub(crate) fn join_communicator(
    shared: &SharedMemoryGroup,
    health: &GroupHealth,
    device: &Arc<GpuBackend>,
) -> Result<GpuCommunicator, CollectiveError> {
    let library = CollectiveLibrary::open(device)?;
    let id = share_communicator_id(&library, shared)?;
    let communicator = library.begin(&id, shared.size(), shared.rank())?;
    if let Err(error) = wait_until_ready(&communicator, health) {
        communicator.abort();
        return Err(shared.fail(error));
    }
    Ok(communicator)
}

/// Returns the id of a new communicator; rank 0 creates the id and sends it to the other ranks.
fn share_communicator_id(
    library: &CollectiveLibrary,
    rendezvous: &dyn crate::GroupRendezvous,
) -> Result<CommunicatorId, CollectiveError> {
    let words = match rendezvous.rank() {
        0 => library.new_id()?.to_words(),
        _ => [0; CommunicatorId::WORDS],
    };
    let ids = exchange_words(rendezvous, &words)?;
    let first = ids[..CommunicatorId::WORDS].first_chunk();
    Ok(CommunicatorId::from_words(first.expect("the words of rank 0")))
}

/// Waits until all ranks have joined the communicator.
fn wait_until_ready(
    communicator: &GpuCommunicator,
    health: &GroupHealth,
) -> Result<(), CollectiveError> {
    let started = Instant::now();
    while !communicator.is_ready()? {
        health.check_peers()?;
        if started.elapsed() > JOIN_TIMEOUT {
            return Err(CollectiveError::DevicesUnreachable { seconds: JOIN_TIMEOUT.as_secs() });
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}
