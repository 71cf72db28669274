//! How many tokens each expert gets, counted where routers choose.

use crate::Config;
use ops::{OpError, Ops, Routing};
use std::cell::RefCell;

/// Tokens by layer and expert since the last look. For devices whose memory is the host's: others would be waited for.
#[derive(Debug)]
pub struct ExpertLoad {
    experts: usize,
    /// `[layers, experts]`
    tokens: RefCell<Vec<u32>>,
}

impl ExpertLoad {
    /// For the experts of a model; `None` = it has none.
    #[must_use]
    pub fn new(config: &Config) -> Option<Self> {
        let experts = config.moe.as_ref()?.experts;
        Some(Self { experts, tokens: RefCell::new(vec![0; config.layers * experts]) })
    }

    /// Counts the choices of a layer.
    pub(crate) fn count(&self, ops: &Ops, layer: usize, routing: &Routing) -> Result<(), OpError> {
        let mut tokens = self.tokens.borrow_mut();
        ops.count_experts(routing, &mut tokens[layer * self.experts..][..self.experts])
    }

    /// Layer, expert and tokens of all that got any, in order; the count begins anew.
    pub fn take(&self) -> Vec<(usize, usize, u32)> {
        let mut tokens = self.tokens.borrow_mut();
        let places = tokens.iter_mut().enumerate().filter(|(_, tokens)| **tokens > 0);
        let taken = |(at, tokens): (usize, &mut u32)| {
            (at / self.experts, at % self.experts, std::mem::take(tokens))
        };
        places.map(taken).collect()
    }
}
