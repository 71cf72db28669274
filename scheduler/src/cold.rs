//! What most steps leave alone of a request: its tokens, blocks and keys, and what the user asked.

use crate::line::Key;
use crate::stats::Requeue;
use crate::{FirstRun, Submit};
use kvcache::{BlockKey, Content, ExtraKeys, Table};
use protocol::{Sampling, Token};
use std::sync::Arc;

/// Output tokens that a request has room for from the start; longer outputs grow by doubling.
const TOKENS_AHEAD: u32 = 1_024;

/// The part of a request that most steps leave alone. In this order: filling a block needs the first
/// four fields, thus two cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Cold {
    /// Committed tokens, but for the newest ones, which may so far lie in the tail of `Request` only.
    pub(crate) tokens: Vec<Token>,
    pub(crate) table: Table,
    pub(crate) keys: Vec<BlockKey>,
    /// What else the request's blocks depend on.
    pub(crate) extra: Option<Arc<ExtraKeys>>,
    pub(crate) key: Key,
    pub(crate) prompt_len: u32,
    /// Prompt position whose log-probability is delivered next.
    pub(crate) scored: u32,
    /// Ids of `Request::stops` that mean end of text.
    pub(crate) eos: u32,
    pub(crate) asked: Asked,
}

/// What the user asked and what became of it.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) sampling: Sampling,
    /// Key of the request's random numbers.
    pub(crate) key: u64,
    /// Position of the first token that a mask limits.
    pub(crate) masked_from: u32,
    /// The replica was chosen by the user: the request moves to no other.
    pub(crate) pinned: bool,
    /// Tokens this request adds to its replica's outstanding load.
    pub(crate) charge: u64,
    pub(crate) submitted_ms: u64,
    /// Why its blocks were last taken back, and the positions that were computed then.
    pub(crate) setback: Option<(Requeue, u32)>,
    pub(crate) first_run: Option<FirstRun>,
}

impl Cold {
    pub(crate) fn new(submit: Submit, arrival: u64, now_ms: u64) -> Self {
        let mut tokens = submit.tokens;
        tokens.reserve_exact(submit.max_tokens.min(TOKENS_AHEAD) as usize);
        let asked = Asked {
            sampling: submit.sampling,
            key: submit.key,
            masked_from: submit
                .masked_from
                .map_or(u32::MAX, |from| from.saturating_add(tokens.len() as u32)),
            pinned: submit.replica.is_some(),
            charge: tokens.len() as u64,
            submitted_ms: now_ms,
            setback: None,
            first_run: None,
        };
        Self {
            prompt_len: tokens.len() as u32,
            tokens,
            table: Table::default(),
            keys: submit.keys,
            extra: submit.extra,
            key: Key { priority: submit.priority, arrival },
            scored: 1,
            eos: submit.eos_ids.len() as u32,
            asked,
        }
    }

    /// The table, and what its full blocks hold.
    pub(crate) fn table_and_content(&mut self) -> (&mut Table, Content<'_>) {
        let Self { tokens, table, keys, extra, .. } = self;
        (table, Content { tokens, keys, extra: extra.as_ref() })
    }
}
