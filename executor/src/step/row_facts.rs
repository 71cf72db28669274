//! Per-row values that kernels read, such as the sequence slot.

use ops::RowMetadataField;
use protocol::BatchRow;

/// One of the staged rows of a batch row. A batch row is staged as a single row, or as one row per token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StagedRowPart {
    /// Index of the staged row within the batch row.
    pub(super) index: u32,
    /// Number of staged rows of the batch row after this one.
    pub(super) later: u32,
    /// Index of the batch row among those whose recurrent state is updated after sampling, plus 1; 0 = the forward pass
    /// writes the state, or the model has none.
    pub(super) replay: u32,
}

/// Returns the values for one staged row of a batch row. The first staged row has the state slots of the batch row.
pub(super) fn row_facts(row: &BatchRow, part: StagedRowPart) -> [i32; RowMetadataField::COUNT] {
    let states = row.state_slots.first().filter(|_| part.index == 0);
    RowMetadataField::ALL.map(|fact| match fact {
        RowMetadataField::SequenceSlot => row.seq_slot.0 as i32,
        RowMetadataField::ContinuesSequence => i32::from(row.start > 0 || part.index > 0),
        RowMetadataField::StateRead => {
            let read = states.and_then(|access| access.read);
            read.map_or(0, |slot| slot.0 as i32 + 1)
        }
        RowMetadataField::StateWrite => states.map_or(0, |access| access.write.0 as i32 + 1),
        RowMetadataField::LaterTokens if row.state_slots.is_empty() => 0,
        RowMetadataField::LaterTokens => part.later as i32,
        RowMetadataField::Replay if part.index == 0 => part.replay as i32,
        RowMetadataField::Replay => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{RequestId, RowInput, SequenceSlot, StateSlot, StateSlotAccess, ThinVec};

    fn row(start: u32) -> BatchRow {
        BatchRow {
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
        }
    }

    /// Parts of a row with one draft token.
    const FIRST: StagedRowPart = StagedRowPart { index: 0, later: 1, replay: 0 };
    const DRAFT: StagedRowPart = StagedRowPart { index: 1, later: 0, replay: 0 };

    #[test]
    fn rows_after_the_first_continue_their_sequence() {
        assert_eq!(row_facts(&row(0), FIRST), [7, 0, 0, 0, 0, 0]);
        assert_eq!(row_facts(&row(0), DRAFT), [7, 1, 0, 0, 0, 0], "its first draft token");
        assert_eq!(row_facts(&row(4), FIRST), [7, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn only_the_first_part_of_a_replayed_row_has_state_slots() {
        let access = |read| StateSlotAccess { group: 1, read, write: StateSlot(5) };
        let with_states = |read| BatchRow { state_slots: [access(read)].into(), ..row(4) };
        let alone = StagedRowPart::default();
        assert_eq!(row_facts(&with_states(None), alone), [7, 1, 0, 6, 0, 0]);
        assert_eq!(row_facts(&with_states(Some(StateSlot(0))), alone), [7, 1, 1, 6, 0, 0]);
        let replayed = with_states(Some(StateSlot(0)));
        let part = |part| StagedRowPart { replay: 3, ..part };
        assert_eq!(row_facts(&replayed, part(FIRST)), [7, 1, 1, 6, 1, 3]);
        assert_eq!(row_facts(&replayed, part(DRAFT)), [7, 1, 0, 0, 0, 0], "no slots");
    }
}
