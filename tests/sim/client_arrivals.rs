//! Request arrivals and aborts of the simulated clients.

use crate::client::{ClientStage, SimClient};
use crate::event_queue::SimEvent;
use crate::fault_injector::InjectedFault;
use crate::request_generator::{RequestArrival, draw_requests};
use crate::world::SimWorld;
use protocol::RequestId;
use scheduler::{AbortCause, SchedulerEvent, assign_request_ids};

impl SimWorld {
    /// Draws the clients, their arrival times, and the abort times of some of the requests.
    pub(crate) fn draw_clients(&mut self) {
        let requests = draw_requests(&self.config, &mut self.rng);
        let mut last_ms = 0;
        for (index, RequestArrival { at_ms, request }) in requests.into_iter().enumerate() {
            self.clients.push(SimClient::new(request, &self.config));
            self.events.add(at_ms, SimEvent::Arrive(index));
            last_ms = at_ms;
            while self.rng.chance_per_mille(self.config.faults.abort) {
                let cause = self.rng.pick(&[
                    AbortCause::StopString,
                    AbortCause::ClientDisconnected,
                    AbortCause::SlowReader,
                    AbortCause::Deadline,
                ]);
                let after_ms = self.rng.scaled(0, 2000);
                // In one of 100 cases the abort may arrive before the request that it aborts.
                let early = u64::from(self.rng.chance_per_mille(10));
                let at_ms = (at_ms + u64::from(after_ms)).saturating_sub(early * 2000);
                self.events.add(at_ms, SimEvent::Abort(index, cause));
            }
        }
        let rest_ms = self.rng.below(500);
        self.events.add(last_ms + rest_ms, SimEvent::EndFaults);
    }

    pub(crate) fn arrive(&mut self, index: usize) {
        let client = &mut self.clients[index];
        client.stage = ClientStage::Live;
        let (mut submit, client_id) = (client.submit.clone(), client.client_id.clone());
        // Usually the submitting thread computes the block keys; for some submissions, the scheduler computes
        // the block keys.
        let first = submit.id.0;
        let hasher = self.scheduler.hasher();
        assign_request_ids(std::slice::from_mut(&mut submit), first, &hasher);
        if self.fault_injector.injects(InjectedFault::ClientIdUsedAsRequestId) {
            submit.id = client_id.parse().map_or(submit.id, RequestId);
        }
        if self.rng.chance_per_mille(200) {
            submit.block_keys.clear();
        }
        self.counts.requests += 1;
        self.counts.shared_client_ids += u64::from(self.clients_with_id(&client_id).len() > 1);
        let (prompt, max_tokens) = (submit.tokens.len() as u64, u64::from(submit.max_tokens));
        self.trace.record(self.now_ms, "submit", &[submit.id.0, prompt, max_tokens]);
        self.inbox.push(SchedulerEvent::Submit(Box::new(submit)));
    }

    pub(crate) fn abort(&mut self, index: usize, cause: AbortCause) {
        let client = &mut self.clients[index];
        if client.stage == ClientStage::Live && client.allowed.aborted.is_none() {
            client.allowed.aborted = Some(cause);
            self.counts.aborts += 1;
        }
        let request = client.id();
        self.trace.record(self.now_ms, "abort", &[request.0]);
        self.inbox.push(SchedulerEvent::Abort { request, cause });
        if self.rng.chance_per_mille(100) {
            // Also aborts a request id that does not exist; this abort must have no effect.
            self.inbox.push(SchedulerEvent::Abort { request: RequestId(1 << 40), cause });
        }
    }

    /// Aborts all live requests, as in a shutdown. After that, no row may be sent (I20).
    pub(crate) fn abort_all(&mut self) {
        for index in 0..self.clients.len() {
            if self.clients[index].stage == ClientStage::Live {
                self.abort(index, AbortCause::Shutdown);
            }
        }
    }
}
