//! The table of facts about rows: how each is read from a row of a batch.

use ops::RowFact;
use protocol::BatchRow;

/// The facts about a row.
pub(super) fn row_facts(row: &BatchRow) -> [i32; RowFact::COUNT] {
    RowFact::ALL.map(|fact| match fact {
        RowFact::SequenceSlot => row.seq_slot.0 as i32,
    })
}
