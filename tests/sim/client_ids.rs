//! Request ids chosen by clients: unique ones, or that of another client's request. F34: requests that share
//! a client id get their own tokens and finish reasons, and an abort by client id ends every request with
//! that id.

use crate::client::{ClientStage, SimClient};
use crate::fault_injector::InjectedFault;
use crate::invariant::{CheckResult, ensure};
use crate::rng::SimRng;
use crate::world::SimWorld;
use protocol::RequestId;
use scheduler::{AbortCause, request_ids_by_client_id};

/// Maximum distance, in arrival order, between two requests that share a client id: both should be in flight
/// together.
const SHARED_ID_DISTANCE: u64 = 4;

impl SimWorld {
    /// Draws the client ids of all requests.
    pub(crate) fn assign_client_ids(&mut self, chance: &mut SimRng) {
        for index in 1..self.clients.len() {
            if chance.chance_per_mille(self.config.load.shared_client_ids) {
                let before = 1 + chance.below(SHARED_ID_DISTANCE) as usize;
                self.clients[index].client_id =
                    self.clients[index.saturating_sub(before)].client_id.clone();
            }
        }
    }

    /// Live clients with a client id.
    pub(crate) fn clients_with_id(&self, name: &str) -> Vec<usize> {
        let bears =
            |client: &SimClient| client.stage == ClientStage::Live && client.client_id == name;
        let clients = self.clients.iter().enumerate();
        clients.filter(|(_, client)| bears(client)).map(|(index, _)| index).collect()
    }

    /// With a drawn probability an operator aborts a client id. Returns the clients with requests that must
    /// end within the tick.
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
        let name = live().nth(at).map(|client| client.client_id.clone()).unwrap_or_default();
        let in_flight = live().map(|client| (client.id(), client.client_id.as_str()));
        let mut meant: Vec<RequestId> = request_ids_by_client_id(in_flight, |other| other == name);
        if self.fault_injector.injects(InjectedFault::AbortByNameMissesDuplicate) {
            meant.truncate(1);
        }
        let bearers = self.clients_with_id(&name);
        self.counts.aborts_by_client_id += u64::from(bearers.len() > 1);
        for request in meant {
            self.abort(request.0 as usize - 1, AbortCause::Operator);
        }
        bearers
    }

    /// F34: checks that an abort by client id ended every request with that id.
    pub(crate) fn check_abort_by_client_id(&self, bearers: &[usize]) -> CheckResult {
        for &index in bearers {
            let client = &self.clients[index];
            let (id, name, over) =
                (client.id().0, &client.client_id, client.stage == ClientStage::Done);
            ensure!("F34", over, "request {id}, called {name}, lives on though its name was meant");
        }
        Ok(())
    }
}
