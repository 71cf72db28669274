//! What clients call their requests: a number of their own, or what somebody else has called theirs. F34: whoever shares a
//! name gets the right tokens and the end they asked for, and an order by name means all who bear it.

use crate::client::{ClientStage, SimClient};
use crate::invariant::{CheckResult, ensure};
use crate::rng::SimRng;
use crate::world::SimWorld;
use protocol::RequestId;
use scheduler::{AbortCause, RequestIdAssigner};

/// How far back whoever shares a name looks for one: both are to be there at once.
const SHARED_ID_DISTANCE: u64 = 4;

impl SimWorld {
    /// Draws what clients call their requests.
    pub(crate) fn assign_client_ids(&mut self, chance: &mut SimRng) {
        for index in 1..self.clients.len() {
            if chance.chance_per_mille(self.config.load.shared_client_ids) {
                let before = 1 + chance.below(SHARED_ID_DISTANCE) as usize;
                self.clients[index].client_id =
                    self.clients[index.saturating_sub(before)].client_id.clone();
            }
        }
    }

    /// Enrols requests as a server does.
    pub(crate) fn request_id_assigner(&self) -> RequestIdAssigner {
        RequestIdAssigner { fault_injection: self.config.scheduler.fault_injection }
    }

    /// Clients whose requests are in flight under a name.
    pub(crate) fn clients_with_id(&self, name: &str) -> Vec<usize> {
        let bears =
            |client: &SimClient| client.stage == ClientStage::Live && client.client_id == name;
        let clients = self.clients.iter().enumerate();
        clients.filter(|(_, client)| bears(client)).map(|(index, _)| index).collect()
    }

    /// With bad luck an operator takes back a name. Returns those who must have ended when the tick is over.
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
        let meant: Vec<RequestId> =
            self.request_id_assigner().ids_by_client_id(in_flight, |other| other == name);
        let bearers = self.clients_with_id(&name);
        self.counts.aborts_by_client_id += u64::from(bearers.len() > 1);
        for request in meant {
            self.abort(request.0 as usize - 1, AbortCause::Operator);
        }
        bearers
    }

    /// F34: an order by name was carried out for all who bear it.
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
