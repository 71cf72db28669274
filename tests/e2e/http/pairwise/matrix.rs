//! Greedily chooses combinations of field values, so that few requests cover all pairs of values of two
//! different fields.

use std::collections::BTreeSet;

/// A combination of values, one per field: the index of each field's value, or `None` if the field is absent.
pub(super) type FieldChoices = Vec<Option<usize>>;

/// One field's value: the index of the field, and the index of its value or `None` if the field is absent.
type FieldChoice = (usize, Option<usize>);

/// Number of values that the tests try for one request field.
#[derive(Clone, Copy)]
pub(super) struct FieldValueCount {
    pub(super) count: usize,
    /// Whether every request must contain the field.
    pub(super) is_required: bool,
}

/// The pairs of field values that no accepted request has covered yet.
pub(super) struct PairCoverage {
    fields: Vec<FieldValueCount>,
    open: BTreeSet<(FieldChoice, FieldChoice)>,
    /// Pairs for which a combination was returned, whether or not its request was accepted.
    tried: BTreeSet<(FieldChoice, FieldChoice)>,
    pairs: usize,
}

impl PairCoverage {
    pub(super) fn new(fields: Vec<FieldValueCount>) -> Self {
        let mut open = BTreeSet::new();
        for first in 0..fields.len() {
            for second in first + 1..fields.len() {
                for a in values(fields[first]) {
                    open.extend(values(fields[second]).map(|b| ((first, a), (second, b))));
                }
            }
        }
        Self { fields, pairs: open.len(), open, tried: BTreeSet::new() }
    }

    /// Returns a combination that contains an uncovered pair that was not tried before. The values of the
    /// other fields are chosen greedily to cover further uncovered pairs.
    pub(super) fn next(&mut self) -> Option<FieldChoices> {
        let pair = *self.open.iter().find(|pair| !self.tried.contains(pair))?;
        self.tried.insert(pair);
        let mut cells = vec![pair.0, pair.1];
        for field in 0..self.fields.len() {
            if cells.iter().any(|cell| cell.0 == field) {
                continue;
            }
            let gain = |value: &Option<usize>| {
                let is_open =
                    |cell: &&FieldChoice| self.open.contains(&ordered(**cell, (field, *value)));
                cells.iter().filter(is_open).count()
            };
            let best = values(self.fields[field]).max_by_key(gain);
            cells.push((field, best.flatten()));
        }
        cells.sort_unstable();
        Some(cells.into_iter().map(|cell| cell.1).collect())
    }

    /// Removes the pairs of an accepted combination from the uncovered pairs.
    pub(super) fn cover(&mut self, row: &FieldChoices) {
        let cells: Vec<FieldChoice> = row.iter().copied().enumerate().collect();
        for (at, &first) in cells.iter().enumerate() {
            for &second in &cells[at + 1..] {
                self.open.remove(&(first, second));
            }
        }
    }

    /// Number of covered pairs, and number of all pairs.
    pub(super) fn covered(&self) -> (usize, usize) {
        (self.pairs - self.open.len(), self.pairs)
    }
}

fn values(field: FieldValueCount) -> impl Iterator<Item = Option<usize>> {
    (0..field.count).map(Some).chain((!field.is_required).then_some(None))
}

fn ordered(a: FieldChoice, b: FieldChoice) -> (FieldChoice, FieldChoice) {
    if a.0 < b.0 { (a, b) } else { (b, a) }
}

#[test]
fn greedy_rows_cover_all_pairs() {
    let mut matrix = PairCoverage::new(vec![FieldValueCount { count: 3, is_required: false }; 12]);
    let mut rows = 0;
    while let Some(row) = matrix.next() {
        matrix.cover(&row);
        rows += 1;
    }
    assert_eq!(matrix.covered(), (66 * 16, 66 * 16));
    assert!((16..70).contains(&rows), "{rows}");
}
