//! What the executor remembers of each running request: one seat per request.
//!
//! A seat is set up by the first row of a request's epoch and read by its later rows; nothing in it
//! is the only copy of anything, so an executor may be lost at any time. All seats and their block
//! tables are allocated at start.

use crate::BatchError;
use ops::sample::Seen;
use protocol::{RequestId, Row, Sampling, Seat, SeatInit, StepId, Token};
use std::collections::HashMap;

/// All seats, and the block tables by seat.
pub(crate) struct Seats {
    states: Vec<SeatState>,
    tables: Vec<i32>, // [seats, width]
    width: usize,
    blocks: u32,
}

/// State of one request.
pub(crate) struct SeatState {
    /// Who sits here, in which epoch; `None` before the first request.
    owner: Option<(RequestId, u32)>,
    /// How its tokens are chosen.
    pub(crate) sampling: Sampling,
    /// Key of its noise.
    pub(crate) key: u64,
    /// Positions from here on are output.
    pub(crate) prompt_len: u32,
    /// Known ids in order, if a rule reads them.
    history: Vec<Token>,
    /// The different ids of the history, in order of appearance, with their count in the output.
    seen: Vec<Seen>,
    /// Where an id stands in `seen`.
    places: HashMap<Token, u32>,
    /// The newest sampled token and the step that sampled it.
    last: Option<(StepId, Token)>,
    table_len: usize,
}

impl Seats {
    /// `seats` empty seats for tables of up to `width` blocks out of a pool of `blocks`.
    pub(crate) fn new(seats: u32, width: usize, blocks: u32) -> Self {
        let empty = || SeatState {
            owner: None,
            sampling: Sampling::greedy(),
            key: 0,
            prompt_len: 0,
            history: Vec::new(),
            seen: Vec::new(),
            places: HashMap::new(),
            last: None,
            table_len: 0,
        };
        Self {
            states: (0..seats).map(|_| empty()).collect(),
            tables: vec![0; seats as usize * width],
            width,
            blocks,
        }
    }

    /// Takes over what a row says about its seat: the occupant and the block table.
    pub(crate) fn update(&mut self, row: &Row) -> Result<(), BatchError> {
        let seat = row.seat;
        let limit = self.states.len();
        let state = self.states.get_mut(seat.0 as usize).ok_or(BatchError::Seat { seat, limit })?;
        if let Some(init) = &row.init {
            state.occupy((row.request, row.epoch), init);
        }
        if state.owner != Some((row.request, row.epoch)) {
            return Err(BatchError::Stranger { request: row.request, seat });
        }
        let table = &mut self.tables[seat.0 as usize * self.width..][..self.width];
        for update in &row.tables {
            let from = update.from as usize;
            let end = from + update.blocks.len();
            if update.group != 0 || from > state.table_len || end > table.len() {
                return Err(BatchError::Table { request: row.request });
            }
            for (entry, block) in table[from..end].iter_mut().zip(&update.blocks) {
                if block.0 >= self.blocks {
                    return Err(BatchError::Block { block: block.0, limit: self.blocks });
                }
                *entry = block.0 as i32;
            }
            state.table_len = end;
        }
        Ok(())
    }

    /// State of a seat that `update` has accepted.
    pub(crate) fn get(&self, seat: Seat) -> &SeatState {
        &self.states[seat.0 as usize]
    }

    /// As `get`, to record a sampled token.
    pub(crate) fn get_mut(&mut self, seat: Seat) -> &mut SeatState {
        &mut self.states[seat.0 as usize]
    }

    /// Blocks of a seat in order of position.
    pub(crate) fn table(&self, seat: Seat) -> &[i32] {
        let len = self.get(seat).table_len;
        &self.tables[seat.0 as usize * self.width..][..len]
    }
}

impl SeatState {
    fn occupy(&mut self, owner: (RequestId, u32), init: &SeatInit) {
        self.owner = Some(owner);
        self.sampling.clone_from(&init.sampling);
        self.key = init.key;
        self.prompt_len = init.prompt_len;
        self.last = None;
        self.table_len = 0;
        self.history.clear();
        self.seen.clear();
        self.places.clear();
        if init.sampling.reads_history() {
            for (position, &token) in (0..).zip(&init.history) {
                self.remember(token, position >= init.prompt_len);
            }
        }
    }

    fn remember(&mut self, token: Token, output: bool) {
        self.history.push(token);
        let place = *self.places.entry(token).or_insert_with(|| {
            self.seen.push(Seen { id: token, count: 0 });
            self.seen.len() as u32 - 1
        });
        self.seen[place as usize].count += u32::from(output);
    }

    /// Notes the token that `step` sampled.
    pub(crate) fn record(&mut self, step: StepId, token: Token) {
        self.last = Some((step, token));
        if self.sampling.reads_history() {
            self.remember(token, true);
        }
    }

    /// The token that `step` sampled, if it is the newest.
    pub(crate) fn sampled_at(&self, step: StepId) -> Option<Token> {
        self.last.filter(|&(at, _)| at == step).map(|(_, token)| token)
    }

    /// The different ids known, with their counts in the output; empty unless a rule reads them.
    pub(crate) fn seen(&self) -> &[Seen] {
        &self.seen
    }

    /// Ids that may not stand at `position`: the ends of bad words, and stop ids that come too early.
    pub(crate) fn banned(&self, position: u32, banned: &mut Vec<Token>) {
        banned.clear();
        for word in &self.sampling.bad_words {
            if let Some((&end, start)) = word.split_last()
                && self.history.ends_with(start)
            {
                banned.push(end);
            }
        }
        if position.saturating_sub(self.prompt_len) < self.sampling.min_tokens {
            banned.extend_from_slice(&self.sampling.stop_ids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{BlockId, Input, TableUpdate};

    fn row(seat: u32, tables: &[(u32, &[u32])], init: Option<SeatInit>) -> Row {
        let update = |&(from, blocks): &(u32, &[u32])| TableUpdate {
            group: 0,
            from,
            blocks: blocks.iter().map(|&b| BlockId(b)).collect(),
        };
        Row {
            request: RequestId(7),
            epoch: 1,
            seat: Seat(seat),
            start: 0,
            len: 1,
            drafts: 0,
            samples: true,
            input: Input::Tokens(vec![1].into()),
            tables: tables.iter().map(update).collect(),
            next: None,
            init: init.map(Box::new),
        }
    }

    fn init(sampling: Sampling, prompt_len: u32, history: &[Token]) -> SeatInit {
        SeatInit { sampling, key: 9, prompt_len, history: history.to_vec() }
    }

    #[test]
    fn tables_grow_and_are_replaced_from_any_entry() {
        let mut seats = Seats::new(2, 4, 10);
        seats.update(&row(1, &[(0, &[3, 4])], Some(init(Sampling::greedy(), 1, &[])))).unwrap();
        assert_eq!(seats.table(Seat(1)), [3, 4]);
        seats.update(&row(1, &[(2, &[9])], None)).unwrap();
        seats.update(&row(1, &[(1, &[8, 7, 6])], None)).unwrap();
        assert_eq!(seats.table(Seat(1)), [3, 8, 7, 6]);
        seats.update(&row(1, &[(0, &[5])], Some(init(Sampling::greedy(), 1, &[])))).unwrap();
        assert_eq!(seats.table(Seat(1)), [5]);
    }

    #[test]
    fn impossible_rows_are_refused() {
        let mut seats = Seats::new(2, 4, 10);
        let fresh = || Some(init(Sampling::greedy(), 1, &[]));
        let refused = |seats: &mut Seats, row: Row| seats.update(&row).unwrap_err();
        let error = refused(&mut seats, row(2, &[], fresh()));
        assert!(matches!(error, BatchError::Seat { limit: 2, .. }));
        assert!(matches!(refused(&mut seats, row(0, &[], None)), BatchError::Stranger { .. }));
        let error = refused(&mut seats, row(0, &[(1, &[1])], fresh()));
        assert!(matches!(error, BatchError::Table { .. }), "a gap");
        let error = refused(&mut seats, row(0, &[(0, &[1, 2, 3, 4, 5])], fresh()));
        assert!(matches!(error, BatchError::Table { .. }), "too long");
        let error = refused(&mut seats, row(0, &[(0, &[10])], fresh()));
        assert!(matches!(error, BatchError::Block { block: 10, limit: 10 }));
    }

    #[test]
    fn counts_cover_output_and_presence_covers_all() {
        let mut seats = Seats::new(1, 4, 10);
        let sampling = Sampling { frequency: 0.5, ..Sampling::greedy() };
        seats.update(&row(0, &[], Some(init(sampling, 3, &[5, 6, 5, 6, 7])))).unwrap();
        let seat = seats.get_mut(Seat(0));
        seat.record(StepId(1), 6);
        let seen = seat.seen().iter().map(|s| (s.id, s.count)).collect::<Vec<_>>();
        assert_eq!(seen, [(5, 0), (6, 2), (7, 1)]);
        assert_eq!((seat.sampled_at(StepId(1)), seat.sampled_at(StepId(2))), (Some(6), None));
    }

    #[test]
    fn bad_words_end_where_their_beginning_stands() {
        let mut seats = Seats::new(1, 4, 10);
        let words = vec![vec![1], vec![2, 3, 4], vec![3, 5], vec![], vec![9, 9, 9, 9]];
        let sampling = Sampling { bad_words: words, ..Sampling::greedy() };
        seats.update(&row(0, &[], Some(init(sampling, 2, &[2, 3])))).unwrap();
        let mut banned = Vec::new();
        seats.get(Seat(0)).banned(2, &mut banned);
        assert_eq!(banned, [1, 4, 5]);
        seats.get_mut(Seat(0)).record(StepId(1), 6);
        seats.get(Seat(0)).banned(3, &mut banned);
        assert_eq!(banned, [1]);
    }

    #[test]
    fn stop_ids_are_banned_until_the_output_is_long_enough() {
        let mut seats = Seats::new(1, 4, 10);
        let sampling = Sampling { min_tokens: 2, stop_ids: vec![8, 9], ..Sampling::greedy() };
        seats.update(&row(0, &[], Some(init(sampling, 5, &[])))).unwrap();
        let mut banned = Vec::new();
        for (position, expected) in [(5, &[8, 9][..]), (6, &[8, 9]), (7, &[])] {
            seats.get(Seat(0)).banned(position, &mut banned);
            assert_eq!(banned, expected, "position {position}");
        }
    }
}
