//! Request ids chosen by clients. Such an id is unique or equals the id of another client's request. F34:
//! requests that share a client id get their own tokens and finish reasons, and an abort by client id ends
//! every request with that id.

use crate::client::{ClientStage, SimClient};
use crate::fault_injector::InjectedFault;
use crate::invariant::{CheckResult, ensure};
use crate::rng::SimRng;
use crate::world::SimWorld;
use protocol::RequestId;
use scheduler::{AbortCause, request_ids_by_client_id};

/// Maximum distance, in arrival order, between two requests that share a client id. The distance is small, so
/// that such requests are often in flight together.
const SHARED_ID_DISTANCE: u64 = 4;

impl SimWorld {
    /// Draws the client ids of all requests in the simulation.
    pub(crate) fn assign_client_ids(&mut self, rng: &mut SimRng) {
        for index in 1..self.clients.len() {
            if rng.chance_per_mille(self.config.load.shared_client_ids) {
                let distance = 1 + rng.below(SHARED_ID_DISTANCE) as usize;
                self.clients[index].client_id =
                    self.clients[index.saturating_sub(distance)].client_id.clone();
            }
        }
    }

    /// Indices of the clients whose live request has this client id.
    pub(crate) fn clients_with_id(&self, client_id: &str) -> Vec<usize> {
        let has_id =
            |client: &SimClient| client.stage == ClientStage::Live && client.client_id == client_id;
        let clients = self.clients.iter().enumerate();
        clients.filter(|(_, client)| has_id(client)).map(|(index, _)| index).collect()
    }

    /// With a probability that depends on the seed, an operator aborts all requests with the client id of one
    /// live request. Returns the clients whose requests must end within the tick.
    pub(crate) fn abort_by_client_id(&mut self) -> Vec<usize> {
        if !self.rng.chance_per_mille(self.config.faults.abort_by_client_id) {
            return Vec::new();
        }
        let live = || self.clients.iter().filter(|client| client.stage == ClientStage::Live);
        let count = live().count();
        if count == 0 {
            return Vec::new();
        }
        let at = self.rng.below(count as u64) as usize;
        let client_id = live().nth(at).map(|client| client.client_id.clone()).unwrap_or_default();
        let mut aborted: Vec<RequestId> = request_ids_by_client_id(
            live(),
            |client| client.id(),
            |client| client.client_id.as_str(),
            |other| other == client_id,
        );
        if self.fault_injector.injects(InjectedFault::AbortByClientIdMissesDuplicate) {
            aborted.truncate(1);
        }
        let clients_with_id = self.clients_with_id(&client_id);
        self.counts.aborts_by_client_id += u64::from(clients_with_id.len() > 1);
        for request in aborted {
            self.abort(request.0 as usize - 1, AbortCause::Operator);
        }
        clients_with_id
    }

    /// Checks F34: an abort by client id ended every request with that id.
    pub(crate) fn check_abort_by_client_id(&self, clients_with_id: &[usize]) -> CheckResult {
        for &index in clients_with_id {
            let client = &self.clients[index];
            let (id, client_id, done) =
                (client.id().0, &client.client_id, client.stage == ClientStage::Done);
            ensure!(
                "F34",
                done,
                "request {id} with the aborted client id {client_id} has not ended"
            );
        }
        Ok(())
    }
}
