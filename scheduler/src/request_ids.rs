//! Assigns internal request ids. Several requests may have the same client id; client ids are used only to
//! select requests, for example for an abort.

use crate::RequestSubmission;
use kvcache::PromptHasher;
use protocol::RequestId;

/// Assigns ids from `first` on to requests that are submitted together, and hashes their prompts. The caller
/// ensures that the ids are unique for the life of the process.
pub fn assign_request_ids(submits: &mut [RequestSubmission], first: u64, hasher: &PromptHasher) {
    for index in 0..submits.len() {
        let (before, rest) = submits.split_at_mut(index);
        let Some(submit) = rest.first_mut() else { break };
        submit.id = RequestId(first + index as u64);
        // The choices (`n`) of a prompt are adjacent submissions, so the prompt is hashed once.
        submit.block_keys = match before.last().filter(|b| b.tokens == submit.tokens) {
            Some(before) => before.block_keys.clone(),
            None => hasher.hash_prompt(&submit.tokens, submit.extra_keys.as_deref()),
        };
    }
}

/// Returns the ids of all requests in flight with a client id for which `matches` returns true. `id` and
/// `client_id` return the id and the client id of a request in flight.
pub fn request_ids_by_client_id<T>(
    in_flight: impl Iterator<Item = T>,
    id: impl Fn(&T) -> RequestId,
    client_id: impl Fn(&T) -> &str,
    matches: impl Fn(&str) -> bool,
) -> Vec<RequestId> {
    in_flight.filter(|request| matches(client_id(request))).map(|request| id(&request)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcache::KvConfig;
    use protocol::SamplingParams;
    use protocol::{KvGroup, KvKind, KvSpec};

    fn submit(tokens: &[u32]) -> RequestSubmission {
        RequestSubmission {
            id: RequestId(0),
            tokens: tokens.to_vec(),
            max_tokens: 1,
            sampling: SamplingParams::greedy(),
            first_masked_token: None,
            rng_key: 0,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            priority: 0,
            extra_keys: None,
            replica: None,
            block_keys: Vec::new(),
        }
    }

    #[test]
    fn client_ids_may_repeat_and_select_every_match() {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 2, groups: vec![group] };
        let hasher = PromptHasher::new(KvConfig::new(spec, 8, [1, 2]).block_hasher(), true);
        let mut two = [submit(&[5, 6, 7]), submit(&[5, 6, 7])];
        assign_request_ids(&mut two, 8, &hasher);
        assert_eq!(two.each_ref().map(|submit| submit.id), [RequestId(8), RequestId(9)]);
        assert!(two[0].block_keys.len() == 1 && two[0].block_keys == two[1].block_keys);
        let mut different = [submit(&[5, 6, 7]), submit(&[6, 6, 7])];
        assign_request_ids(&mut different, 10, &hasher);
        assert_eq!(different[0].block_keys, two[0].block_keys);
        assert_ne!(different[1].block_keys, two[0].block_keys);
        let in_flight = || [(RequestId(8), "3"), (RequestId(9), "3"), (RequestId(10), "4")];
        let matching = |name: &str| {
            let in_flight = in_flight().into_iter();
            request_ids_by_client_id(in_flight, |(id, _)| *id, |(_, name)| name, |id| id == name)
        };
        assert_eq!(matching("3"), [RequestId(8), RequestId(9)]);
        assert_eq!(matching("8"), []);
    }
}
