//! Checks of the invariants of the scheduler.

use super::Scheduler;
use crate::replica_router::ReplicaLoad;
use crate::request_index::RequestLocation;

impl Scheduler {
    /// Recomputes the block reference counts from the block tables, and the counters from the requests;
    /// panics on a difference. Visits every block of every KV pool.
    pub fn check(&self) {
        for replica in &self.replicas {
            replica.kv.check(replica.state.block_tables());
            replica.kv.check_states(replica.state.state_slots());
            let in_flight = self.config.limits.request_tokens_in_flight();
            let spec = &self.config.kv.spec;
            replica.state.check_reserves(|len| spec.blocks_of_request(len, in_flight));
        }
        self.check_requests();
    }

    /// Recomputes the counters of requests and sequence slots; panics on a difference. The check runs in the
    /// tick in which the scheduler becomes idle and delays requests that arrive then, so its cost must not
    /// depend on the number of blocks.
    pub(super) fn check_requests(&self) {
        let mut live = 0;
        for (index, replica) in self.replicas.iter().enumerate() {
            replica.state.check(&replica.kv, self.config.limits.max_num_seqs);
            let mut load = ReplicaLoad::default();
            for (slot, request) in replica.state.requests.iter() {
                let location = self.request_index.get(&request.id);
                assert_eq!(
                    location,
                    Some(&RequestLocation { replica: index, slot }),
                    "{:?} is not in the request index",
                    request.id
                );
                load.charge(request.cold_fields.params.load_tokens);
                live += 1;
            }
            assert_eq!(load, replica.load, "load of replica {index} miscounted");
        }
        assert_eq!(live, self.request_index.len(), "a finished request is still indexed");
    }
}
