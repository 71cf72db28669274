//! Why a collective failed.

/// A collective that did not complete. All but `Shape` mean that the group is of no further use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A matrix does not divide among the ranks.
    #[error("{collective}: {what} is {got}, not a multiple of {size} ranks")]
    Shape {
        /// The collective that refused.
        collective: &'static str,
        /// The size in question.
        what: &'static str,
        /// Its value.
        got: usize,
        /// Ranks of the group.
        size: usize,
    },
    /// A rank did not arrive.
    #[error("rank {rank} left the group")]
    Lost {
        /// The rank.
        rank: usize,
    },
}
