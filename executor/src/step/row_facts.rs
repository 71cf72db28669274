//! Per-row values that kernels read, such as the sequence slot.

use ops::RowMetadataField;
use protocol::BatchRow;

/// Returns the values for one staged row of a batch row. A batch row is staged as a single row, or as one row
/// per token; `token_index` is the index of the staged row within the batch row.
pub(super) fn row_facts(row: &BatchRow, token_index: u32) -> [i32; RowMetadataField::COUNT] {
    RowMetadataField::ALL.map(|fact| match fact {
        RowMetadataField::SequenceSlot => row.seq_slot.0 as i32,
        RowMetadataField::ContinuesSequence => i32::from(row.start > 0 || token_index > 0),
        RowMetadataField::StateRead => {
            let read = row.state_slots.first().and_then(|access| access.read);
            read.map_or(0, |slot| slot.0 as i32 + 1)
        }
        RowMetadataField::StateWrite => {
            row.state_slots.first().map_or(0, |access| access.write.0 as i32 + 1)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{RequestId, RowInput, SequenceSlot, StateSlot, StateSlotAccess, ThinVec};

    #[test]
    fn rows_after_the_first_continue_their_sequence() {
        let row = |start| BatchRow {
            request: RequestId(1),
            epoch: 0,
            seq_slot: SequenceSlot(7),
            start,
            len: 1,
            drafts: 2,
            samples: true,
            masked: false,
            input: RowInput::Tokens([5].as_slice().into()),
            table_updates: ThinVec::new(),
            state_slots: protocol::ThinVec::new(),
            next_token: None,
            seq_init: None,
        };
        assert_eq!(row_facts(&row(0), 0), [7, 0, 0, 0]);
        assert_eq!(row_facts(&row(0), 1), [7, 1, 0, 0], "its first draft token");
        assert_eq!(row_facts(&row(4), 0), [7, 1, 0, 0]);
        let access = |read| StateSlotAccess { group: 1, read, write: StateSlot(5) };
        let with_states = |read| BatchRow { state_slots: [access(read)].into(), ..row(4) };
        assert_eq!(row_facts(&with_states(None), 0), [7, 1, 0, 6]);
        assert_eq!(row_facts(&with_states(Some(StateSlot(0))), 0), [7, 1, 1, 6]);
    }
}
