//! What clients call their requests: a number of their own, or what somebody else has called theirs. F34: whoever shares a
//! name gets the right tokens and the end they asked for, and an order by name means all who bear it.

use crate::broken::{Checked, ensure};
use crate::chance::Chance;
use crate::client::{Client, Stage};
use crate::world::World;
use protocol::RequestId;
use scheduler::{AbortCause, Enrolment};

/// How far back whoever shares a name looks for one: both are to be there at once.
const NEIGHBOURS: u64 = 4;

impl World {
    /// Draws what clients call their requests.
    pub(crate) fn name_people(&mut self, chance: &mut Chance) {
        for index in 1..self.clients.len() {
            if chance.hits(self.setup.load.namesakes) {
                let before = 1 + chance.below(NEIGHBOURS) as usize;
                self.clients[index].name = self.clients[index.saturating_sub(before)].name.clone();
            }
        }
    }

    /// Enrols requests as a server does.
    pub(crate) fn enrolment(&self) -> Enrolment {
        Enrolment { planted: self.setup.engine.planted }
    }

    /// Clients whose requests are in flight under a name.
    pub(crate) fn bearers(&self, name: &str) -> Vec<usize> {
        let bears = |client: &Client| client.stage == Stage::Live && client.name == name;
        let clients = self.clients.iter().enumerate();
        clients.filter(|(_, client)| bears(client)).map(|(index, _)| index).collect()
    }

    /// With bad luck an operator takes back a name. Returns those who must have ended when the tick is over.
    pub(crate) fn order(&mut self) -> Vec<usize> {
        if !self.chance.hits(self.setup.faults.order) {
            return Vec::new();
        }
        let live = || self.clients.iter().filter(|client| client.stage == Stage::Live);
        let count = live().count();
        if count == 0 {
            return Vec::new();
        }
        let at = self.chance.below(count as u64) as usize;
        let name = live().nth(at).map(|client| client.name.clone()).unwrap_or_default();
        let in_flight = live().map(|client| (client.id(), client.name.as_str()));
        let meant: Vec<RequestId> = self.enrolment().meant(in_flight, |other| other == name);
        let bearers = self.bearers(&name);
        self.tally.orders += u64::from(bearers.len() > 1);
        for request in meant {
            self.abort(request.0 as usize - 1, AbortCause::Operator);
        }
        bearers
    }

    /// F34: an order by name was carried out for all who bear it.
    pub(crate) fn check_order_by_name(&self, bearers: &[usize]) -> Checked {
        for &index in bearers {
            let client = &self.clients[index];
            let (id, name, over) = (client.id().0, &client.name, client.stage == Stage::Done);
            ensure!("F34", over, "request {id}, called {name}, lives on though its name was meant");
        }
        Ok(())
    }
}
