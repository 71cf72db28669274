//! The simulated users of a world: when they come, and when they change their minds.

use crate::client::{Client, Stage};
use crate::happening::Happening;
use crate::requests;
use crate::world::World;
use protocol::RequestId;
use scheduler::{AbortCause, Event};

impl World {
    /// Draws the clients, when they come and when some of them leave.
    pub(crate) fn people(&mut self) {
        let asked = requests::draw(&self.setup, &mut self.chance);
        let mut last_ms = 0;
        for (index, (at_ms, submit)) in asked.into_iter().enumerate() {
            self.clients.push(Client::new(submit, &self.setup));
            self.agenda.add(at_ms, Happening::Arrive(index));
            last_ms = at_ms;
            while self.chance.hits(self.setup.faults.abort) {
                let cause = self.chance.pick(&[
                    AbortCause::StopText,
                    AbortCause::ClientGone,
                    AbortCause::SlowReader,
                    AbortCause::Deadline,
                ]);
                let after_ms = self.chance.scaled(0, 2000);
                // One in a hundred overtakes its own request.
                let early = u64::from(self.chance.hits(10));
                let at_ms = (at_ms + u64::from(after_ms)).saturating_sub(early * 2000);
                self.agenda.add(at_ms, Happening::Abort(index, cause));
            }
        }
        let rest_ms = self.chance.below(500);
        self.agenda.add(last_ms + rest_ms, Happening::Heal);
    }

    pub(crate) fn arrive(&mut self, index: usize) {
        let client = &mut self.clients[index];
        client.stage = Stage::Live;
        let (mut submit, name) = (client.submit.clone(), client.name.clone());
        // The keys come from the submitting thread; some submitters leave that to the engine.
        let first = submit.id.0;
        let hasher = self.engine.hasher();
        self.enrolment().enrol(std::slice::from_mut(&mut submit), first, &name, &hasher);
        if self.chance.hits(200) {
            submit.keys.clear();
        }
        self.tally.requests += 1;
        self.tally.namesakes += u64::from(self.bearers(&name).len() > 1);
        let (prompt, max_tokens) = (submit.tokens.len() as u64, u64::from(submit.max_tokens));
        self.trace.note(self.now_ms, "submit", &[submit.id.0, prompt, max_tokens]);
        self.inbox.push(Event::Submit(Box::new(submit)));
    }

    pub(crate) fn abort(&mut self, index: usize, cause: AbortCause) {
        let client = &mut self.clients[index];
        if client.stage == Stage::Live && client.excuses.abort.is_none() {
            client.excuses.abort = Some(cause);
            self.tally.aborts += 1;
        }
        let request = client.id();
        self.trace.note(self.now_ms, "abort", &[request.0]);
        self.inbox.push(Event::Abort { request, cause });
        if self.chance.hits(100) {
            // Nobody has this id.
            self.inbox.push(Event::Abort { request: RequestId(1 << 40), cause });
        }
    }

    /// I20: the server shuts down and takes back what is still live; nothing may run behind that.
    pub(crate) fn drain(&mut self) {
        for index in 0..self.clients.len() {
            if self.clients[index].stage == Stage::Live {
                self.abort(index, AbortCause::Drain);
            }
        }
    }
}
