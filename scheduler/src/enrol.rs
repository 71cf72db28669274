//! How requests get the ids under which the engine knows them. What their clients call them is for people: it may be
//! shared, and decides nothing but whom an order by name means.

use crate::Submit;
use kvcache::{Bug, Planted, PromptHasher};
use protocol::RequestId;

/// Enrols requests whose ids nobody else has had or will have.
#[derive(Debug, Clone, Copy, Default)]
pub struct Enrolment {
    /// Bug in force, for simulations of a build with the feature `planted`.
    pub planted: Planted,
}

impl Enrolment {
    /// Gives requests that come together, all called `name`, the ids from `first` on, and hashes their prompts.
    pub fn enrol(self, submits: &mut [Submit], first: u64, name: &str, hasher: &PromptHasher) {
        let told = self.planted.has(Bug::NameIsId).then(|| name.parse().ok()).flatten();
        let first = told.unwrap_or(first);
        for index in 0..submits.len() {
            let (before, rest) = submits.split_at_mut(index);
            let Some(submit) = rest.first_mut() else { break };
            submit.id = RequestId(first + index as u64);
            // Choices of one prompt follow each other: hash it once.
            submit.keys = match before.last().filter(|b| b.tokens == submit.tokens) {
                Some(before) => before.keys.clone(),
                None => hasher.hash(&submit.tokens, submit.extra.as_deref()),
            };
        }
    }

    /// Of the requests in flight all whose name is meant.
    pub fn meant<N: AsRef<str>>(
        self,
        in_flight: impl Iterator<Item = (RequestId, N)>,
        is_meant: impl Fn(&str) -> bool,
    ) -> Vec<RequestId> {
        let most = if self.planted.has(Bug::OrderMissesNamesake) { 1 } else { usize::MAX };
        let meant = in_flight.filter(|(_, name)| is_meant(name.as_ref()));
        meant.map(|(id, _)| id).take(most).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcache::KvConfig;
    use protocol::Sampling;
    use protocol::{KvGroup, KvKind, KvSpec};

    fn submit(tokens: &[u32]) -> Submit {
        Submit {
            id: RequestId(0),
            tokens: tokens.to_vec(),
            max_tokens: 1,
            sampling: Sampling::greedy(),
            masked_from: None,
            key: 0,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            priority: 0,
            extra: None,
            replica: None,
            keys: Vec::new(),
        }
    }

    #[test]
    fn a_name_decides_no_id_and_means_all_who_bear_it() {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 2, groups: vec![group] };
        let hasher = PromptHasher::new(KvConfig::new(spec, 8, [1, 2]).hasher(), true);
        let mut two = [submit(&[5, 6, 7]), submit(&[5, 6, 7])];
        Enrolment::default().enrol(&mut two, 8, "3", &hasher);
        assert_eq!(two.each_ref().map(|submit| submit.id), [RequestId(8), RequestId(9)]);
        assert!(two[0].keys.len() == 1 && two[0].keys == two[1].keys);
        let mut apart = [submit(&[5, 6, 7]), submit(&[6, 6, 7])];
        Enrolment::default().enrol(&mut apart, 10, "3", &hasher);
        assert_eq!(apart[0].keys, two[0].keys);
        assert_ne!(apart[1].keys, two[0].keys);
        let in_flight = || [(RequestId(8), "3"), (RequestId(9), "3"), (RequestId(10), "4")];
        let meant = |name: &str| Enrolment::default().meant(in_flight().into_iter(), |n| n == name);
        assert_eq!(meant("3"), [RequestId(8), RequestId(9)]);
        assert_eq!(meant("8"), []);
    }
}
