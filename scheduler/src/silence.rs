//! When somebody who gives a sign of life every second is taken for gone.

use kvcache::{Bug, Planted};
use std::time::Duration;

/// Time without a sign of life.
pub const SILENCE: Duration = Duration::from_secs(5);
/// Had whoever listens been paused, what arrived meanwhile is there at once.
pub const SECOND_LOOK: Duration = Duration::from_secs(1);

/// What somebody who waits for the next sign of life has seen of the silence so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silence {
    /// Whether it has lasted too long once.
    looked: bool,
    /// Bug in force, for simulations of a build with the feature `planted`.
    pub planted: Planted,
}

impl Silence {
    /// How long to wait for the next sign of life.
    pub fn patience(self) -> Duration {
        if self.looked { SECOND_LOOK } else { SILENCE }
    }

    /// There was one.
    pub fn is_broken(&mut self) {
        self.looked = false;
    }

    /// There was none for as long as that. Whether whoever is silent counts as gone: one look is not enough, because
    /// time passes while a paused process cannot look.
    pub fn lasts(&mut self) -> bool {
        std::mem::replace(&mut self.looked, true) || self.planted.has(Bug::PauseIsSilence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_looks_in_a_row_make_a_loss() {
        let mut silence = Silence::default();
        assert_eq!(silence.patience(), SILENCE);
        assert!(!silence.lasts(), "this process may have been paused");
        assert_eq!(silence.patience(), SECOND_LOOK);
        silence.is_broken();
        assert_eq!(silence.patience(), SILENCE);
        assert!(!silence.lasts() && silence.lasts());
    }
}
