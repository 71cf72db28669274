//! Grammar bitmasks of the test scheduler, which depend on the newest token only.

use super::model_configs::VOCAB;
use executor::{ExecutorError, TokenBitmaskSource};
use protocol::{BitmaskRow, RequestId, StepDrafts, StepId, Token, TokenBitmask};

/// Whether the grammar bitmask after the token `last` allows `id`. It allows half of the ids.
pub(super) fn allows(last: Token, id: Token) -> bool {
    (id.wrapping_mul(2_654_435_761) ^ last.wrapping_mul(40_503)).count_ones().is_multiple_of(2)
}

/// Returns the grammar bitmask after the token `last`.
fn bitmask_after(last: Token) -> TokenBitmask {
    let mut words = vec![0; VOCAB as usize / 32];
    for id in (0..VOCAB).filter(|&id| allows(last, id)) {
        words[id as usize / 32] |= 1 << (id % 32);
    }
    words.into()
}

/// Row of a step that needs grammar bitmasks.
#[derive(Clone, Copy)]
pub(super) struct ConstrainedRow {
    pub(super) row: u32,
    pub(super) request: RequestId,
    /// Newest token of the request, from which its first bitmask is computed.
    pub(super) last: Token,
    pub(super) awaits_drafts: bool,
}

/// Bitmask source of a test step: computes each bitmask from the newest token or draft token.
#[derive(Clone)]
pub(super) struct ScriptedBitmaskSource {
    pub(super) step: StepId,
    pub(super) rows: Vec<ConstrainedRow>,
    pub(super) drafts: Option<StepDrafts>,
    /// Maximum number of bitmasks of a row; 0 = all bitmasks are overdue.
    pub(super) masks_max: usize,
}

impl ScriptedBitmaskSource {
    /// Returns the bitmasks of a row: for its first sample position, and for the position after each allowed
    /// draft token.
    fn of(&self, row: ConstrainedRow) -> BitmaskRow {
        let mut bitmasks = vec![bitmask_after(row.last)];
        let reported = self.drafts.iter().flat_map(|drafts| &drafts.rows);
        let mut reported = reported.filter(|drafts| drafts.request == row.request);
        let drafts = reported.next();
        assert!(drafts.is_some() == row.awaits_drafts && reported.next().is_none());
        let mut last = row.last;
        for &draft in drafts.iter().flat_map(|drafts| &drafts.tokens[..]) {
            if !allows(last, draft) {
                break;
            }
            bitmasks.push(bitmask_after(draft));
            last = draft;
        }
        bitmasks.truncate(self.masks_max);
        BitmaskRow { row: row.row, bitmasks }
    }
}

impl TokenBitmaskSource for ScriptedBitmaskSource {
    fn report_drafts(&mut self, drafts: StepDrafts) -> Result<(), ExecutorError> {
        assert_eq!(drafts.step, self.step);
        assert!(self.drafts.replace(drafts).is_none(), "one report per step");
        Ok(())
    }

    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        assert_eq!((self.step, self.rows.len()), (step, rows));
        Ok(self.rows.iter().map(|&row| self.of(row)).collect())
    }
}
