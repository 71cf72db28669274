//! Formats batch rows, token events and KV events for the readable trace of a replayed seed.

use protocol::{BatchRow, KvEvent, RowInput};
use scheduler::{FirstAdmission, TokenEvent};
use std::fmt::Write as _;

/// Formats one row of a batch with its interval of positions.
pub(crate) fn format_row(row: &BatchRow) -> String {
    let BatchRow { request, epoch, seq_slot, start, len, drafts, samples, .. } = row;
    let end = start + len;
    let mut line =
        format!("    row  request {}.{epoch} slot {} [{start}, {end})", request.0, seq_slot.0);
    if *drafts > 0 {
        let _ = write!(line, " +{drafts} drafts");
    }
    line.push_str(if *samples { " samples" } else { "" });
    match &row.input {
        RowInput::Tokens(ids) => {
            let _ = write!(line, " ids {ids:?}");
        }
        RowInput::SampledAt { step, draft_slack } => {
            let _ = write!(line, " id of step {}, draft slack {draft_slack}", step.0);
        }
    }
    for update in &row.table_updates {
        let blocks: Vec<u32> = update.blocks.iter().map(|block| block.0).collect();
        let _ = write!(line, " table {}.. = {blocks:?}", update.first_entry);
    }
    if let Some(init) = &row.seq_init {
        let _ = write!(line, " first row, prompt {}", init.prompt_len);
    }
    line
}

/// Formats a token event of a request.
pub(crate) fn format_token_event(event: &TokenEvent) -> String {
    let TokenEvent { request, tokens, preemptions, first_admission, .. } = event;
    let mut line = format!("    tokens request {} {tokens:?}", request.0);
    if let Some(FirstAdmission { cached_tokens: cached, .. }) = first_admission {
        let _ = write!(line, " cached {cached}");
    }
    if !event.prompt_logprobs().is_empty() {
        let _ = write!(line, " {} prompt ids scored", event.prompt_logprobs().len());
    }
    if *preemptions > 0 {
        let _ = write!(line, " preempted {preemptions} times");
    }
    if let Some(finish) = &event.finish_reason {
        let _ = write!(line, " END {finish:?}");
    }
    line
}

/// Formats a KV event of a replica.
pub(crate) fn format_kv_event(replica: u16, event: &KvEvent) -> String {
    let short = |hashes: &[protocol::BlockHash]| -> Vec<String> {
        hashes.iter().map(|hash| format!("{:x}", hash.0)).collect()
    };
    match event {
        KvEvent::Stored { hashes, parent, tokens, .. } => {
            let parent = parent.map_or("none".to_owned(), |parent| format!("{:x}", parent.0));
            format!("    r{replica} stored {:?} after {parent}: {tokens:?}", short(hashes))
        }
        KvEvent::Removed { hashes, .. } => format!("    r{replica} removed {:?}", short(hashes)),
        KvEvent::Cleared => format!("    r{replica} cleared"),
    }
}
