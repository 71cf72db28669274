//! Endpoints of executors that start together on several hosts.

use protocol::RankEndpoint;

/// Endpoints received so far, by the index of the executor.
pub(super) struct EndpointCollector(Vec<Option<RankEndpoint>>);

impl EndpointCollector {
    /// Creates a collector for `count` executors.
    pub(super) fn new(count: usize) -> Self {
        Self(vec![None; count])
    }

    /// Adds the endpoint of an executor. Returns all endpoints once every executor has sent one.
    pub(super) fn add(
        &mut self,
        index: usize,
        endpoint: RankEndpoint,
    ) -> Option<Vec<RankEndpoint>> {
        self.0[index] = Some(endpoint);
        self.0.iter().cloned().collect()
    }

    /// Whether the executor waits for the endpoints of others.
    pub(super) fn is_waiting(&self, index: usize) -> bool {
        self.0[index].is_some() && self.0.iter().any(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::Rank;

    #[test]
    fn executors_wait_until_the_last_endpoint() {
        let endpoint = |rank| RankEndpoint {
            rank: Rank(rank),
            address: format!("10.0.0.{rank}:7"),
            token: [rank as u8; 32],
        };
        let mut collector = EndpointCollector::new(3);
        assert_eq!(collector.add(2, endpoint(2)), None);
        assert_eq!(collector.add(0, endpoint(0)), None);
        assert_eq!([0, 1, 2].map(|index| collector.is_waiting(index)), [true, false, true]);
        assert_eq!(collector.add(1, endpoint(1)), Some([0, 1, 2].map(endpoint).to_vec()));
        assert_eq!([0, 1, 2].map(|index| collector.is_waiting(index)), [false; 3]);
    }
}
