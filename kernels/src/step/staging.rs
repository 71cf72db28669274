//! The staged inputs of a step on the host: `StagingBuffer` collects them and writes them as one contiguous
//! buffer, `StagingReader` reads that buffer in the CPU backend.

use device::{DeviceError, MatRef};

use super::{
    ReplayShape, RowMetadataField, StagedDraftRow, StagedLogitEdit, StagedLogitsRow, StagedRecord,
    StagedSequenceInit, StagedStepRow, StagedTableChange, StagingHeader,
};

/// Alignment of the regions of a stage, in bytes.
const ALIGN: usize = 16;

/// Staged inputs of one step, one vector per region. Every step clears and refills it.
#[derive(Debug, Default)]
pub struct StagingBuffer {
    /// Rows region: one record for each row of the step.
    pub rows: Vec<StagedStepRow>,
    /// Sampling requests for logits rows.
    pub logits_rows: Vec<StagedLogitsRow>,
    /// Initialisations of sequence slots for new requests.
    pub inits: Vec<StagedSequenceInit>,
    /// 32-bit words to which the records of the other regions refer by index: token ids, block ids, token
    /// histories and bitmasks of allowed tokens.
    pub words: Vec<i32>,
    /// Conditional or unconditional changes of logits before sampling.
    pub edits: Vec<StagedLogitEdit>,
    /// Input rows of draft models.
    pub drafts: Vec<StagedDraftRow>,
    /// Row facts: the values of all [`RowMetadataField`]s of row 0, then those of row 1, and so on. Missing
    /// values are written as zeros.
    pub facts: Vec<i32>,
    /// Block table changes of the KV groups from 1 on: those of row 0 by group, then those of row 1, and so on.
    /// Empty for a model with one KV group.
    pub table_changes: Vec<StagedTableChange>,
    /// Number of tokens of the step.
    pub tokens: usize,
    /// Sizes of the updates of recurrent states after sampling. Not part of the stage.
    pub replay: ReplayShape,
}

impl StagingBuffer {
    /// Empties all regions and keeps their allocations.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.logits_rows.clear();
        self.inits.clear();
        self.words.clear();
        self.edits.clear();
        self.drafts.clear();
        self.facts.clear();
        self.table_changes.clear();
        self.tokens = 0;
        self.replay = ReplayShape::default();
    }

    /// Appends words to the words region and returns the index of the first.
    pub fn push_words(&mut self, words: impl IntoIterator<Item = i32>) -> i32 {
        let at = self.words.len() as i32;
        self.words.extend(words);
        at
    }

    fn header(&self) -> (StagingHeader, usize) {
        let mut end = size_of::<StagingHeader>();
        let mut region = |bytes: usize| {
            let at = end.next_multiple_of(ALIGN);
            end = at + bytes;
            at as u32
        };
        let header = StagingHeader {
            rows: self.rows.len() as u32,
            logits_rows: self.logits_rows.len() as u32,
            inits: self.inits.len() as u32,
            words: self.words.len() as u32,
            edits: self.edits.len() as u32,
            rows_at: region(size_of_val(&self.rows[..])),
            logits_rows_at: region(size_of_val(&self.logits_rows[..])),
            inits_at: region(size_of_val(&self.inits[..])),
            words_at: region(size_of_val(&self.words[..])),
            edits_at: region(size_of_val(&self.edits[..])),
            tokens: self.tokens as u32,
            drafts: self.drafts.len() as u32,
            drafts_at: region(size_of_val(&self.drafts[..])),
            facts_at: region(self.rows.len() * RowMetadataField::COUNT * size_of::<i32>()),
            facts_per_row: RowMetadataField::COUNT as u32,
            table_changes_at: region(size_of_val(&self.table_changes[..])),
        };
        (header, end.next_multiple_of(ALIGN))
    }

    /// Size in bytes of the stage that `write` writes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.header().1
    }

    /// Writes the stage to the start of `to` and returns its size in bytes.
    ///
    /// # Panics
    /// If `to` is shorter than [`StagingBuffer::bytes`].
    pub fn write(&self, to: &mut [u8]) -> usize {
        debug_assert!(self.table_changes.len().is_multiple_of(self.rows.len().max(1)));
        let (header, bytes) = self.header();
        let mut put = |at: u32, from: &[u8]| {
            to[at as usize..][..from.len()].copy_from_slice(from);
        };
        put(0, bytes_of(&[header]));
        put(header.rows_at, bytes_of(&self.rows));
        put(header.logits_rows_at, bytes_of(&self.logits_rows));
        put(header.inits_at, bytes_of(&self.inits));
        put(header.words_at, bytes_of(&self.words));
        put(header.edits_at, bytes_of(&self.edits));
        put(header.drafts_at, bytes_of(&self.drafts));
        let facts = self.facts.iter().copied().chain(std::iter::repeat(0));
        let facts: Vec<i32> = facts.take(self.rows.len() * RowMetadataField::COUNT).collect();
        put(header.facts_at, bytes_of(&facts));
        put(header.table_changes_at, bytes_of(&self.table_changes));
        bytes
    }
}

fn bytes_of<R: StagedRecord>(records: &[R]) -> &[u8] {
    // SAFETY: records have no padding, so all their bytes are initialised.
    unsafe { std::slice::from_raw_parts(records.as_ptr().cast(), size_of_val(records)) }
}

/// View of a stage (the staged inputs of a step) for the CPU backend: the records of each region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StagingReader<'a> {
    pub(crate) rows: &'a [StagedStepRow],
    pub(crate) logits_rows: &'a [StagedLogitsRow],
    pub(crate) inits: &'a [StagedSequenceInit],
    pub(crate) words: &'a [i32],
    pub(crate) edits: &'a [StagedLogitEdit],
    pub(crate) drafts: &'a [StagedDraftRow],
    /// Row facts: `facts_per_row` words for each row.
    pub(crate) facts: &'a [i32],
    pub(crate) facts_per_row: usize,
    /// The whole stage.
    all: &'a [i32],
    /// Offset of the table changes region in bytes.
    table_changes_at: u32,
}

impl<'a> StagingReader<'a> {
    /// Locates the regions of a stage. Returns an error if a region ends after the buffer or is misaligned.
    pub(crate) fn new(stage: MatRef<'a>) -> Result<Self, DeviceError> {
        let words = stage.row::<i32>(0);
        let header: StagingHeader = region(words, 0, 1)?[0];
        Ok(Self {
            rows: region(words, header.rows_at, header.rows)?,
            logits_rows: region(words, header.logits_rows_at, header.logits_rows)?,
            inits: region(words, header.inits_at, header.inits)?,
            words: region(words, header.words_at, header.words)?,
            edits: region(words, header.edits_at, header.edits)?,
            drafts: region(words, header.drafts_at, header.drafts)?,
            facts: region(words, header.facts_at, header.rows * header.facts_per_row)?,
            facts_per_row: header.facts_per_row as usize,
            all: words,
            table_changes_at: header.table_changes_at,
        })
    }

    /// Returns the block table changes of all rows in the KV groups from 1 to, but not including, `groups`:
    /// those of row 0 by group, then those of row 1, and so on.
    pub(crate) fn table_changes(
        &self,
        groups: usize,
    ) -> Result<&'a [StagedTableChange], DeviceError> {
        region(self.all, self.table_changes_at, (self.rows.len() * (groups - 1)) as u32)
    }

    /// Returns `len` words of the words region from index `at` on. A negative `at` counts as 0; a negative
    /// `len` returns no words.
    pub(crate) fn words(&self, at: i32, len: i32) -> Result<&'a [i32], DeviceError> {
        let (from, len) = (at.max(0) as usize, len.max(0) as usize);
        let limit = self.words.len();
        let error = DeviceError::Index {
            kernel: "stage",
            what: "words",
            index: (from + len) as i64,
            limit,
        };
        self.words.get(from..from + len).ok_or(error)
    }
}

fn region<R: StagedRecord>(words: &[i32], at: u32, records: u32) -> Result<&[R], DeviceError> {
    let (at, bytes) = (at as usize, records as usize * size_of::<R>());
    let expected = size_of_val(words);
    if !at.is_multiple_of(ALIGN) || at + bytes > expected {
        let (kernel, what) = ("stage", "end of a region");
        return Err(DeviceError::Shape { kernel, what, got: at + bytes, expected });
    }
    let first = words.as_ptr().wrapping_byte_add(at).cast::<R>();
    if !first.is_aligned() {
        // Device buffers are aligned to 64 bytes; other buffers of 32-bit words may be aligned to only 4.
        let (kernel, what, expected) = ("stage", "address of a region modulo its alignment", 0);
        let got = first.addr() % align_of::<R>();
        return Err(DeviceError::Shape { kernel, what, got, expected });
    }
    // SAFETY: the records are inside the words and aligned, and every bit pattern is a record.
    Ok(unsafe { std::slice::from_raw_parts(first, records as usize) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_round_trips_through_the_buffer() {
        let mut stage = StagingBuffer::default();
        let at = stage.push_words([5, 6, 7]);
        stage.rows.push(StagedStepRow { seq_slot: 3, len: 2, ids: at, ..StagedStepRow::default() });
        stage.logits_rows.push(StagedLogitsRow { token: 1, top: -1, ..StagedLogitsRow::default() });
        stage.inits.push(StagedSequenceInit {
            seq_slot: 3,
            mask_at: -1,
            ..StagedSequenceInit::default()
        });
        stage.edits.push(StagedLogitEdit { id: 9, value: -1.5, when_at: 1, when_len: 2 });
        stage.drafts.push(StagedDraftRow {
            seq_slot: 3,
            state_in_slot: 1,
            boundary_block: 4,
            ..StagedDraftRow::default()
        });
        let change = StagedTableChange { from: 2, len: 3, at };
        stage.table_changes.extend([change, StagedTableChange::default()]);
        stage.tokens = 2;
        let mut memory = vec![u64::MAX; stage.bytes() / 8 + 2];
        // SAFETY: the slice covers exactly the 64-bit words of `memory`, as bytes; all are initialised.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), size_of_val(&memory[..]))
        };
        assert_eq!(stage.write(bytes), stage.bytes());
        // SAFETY: the slice covers exactly the 64-bit words of `memory`, as twice as many 32-bit words.
        let words: &[i32] =
            unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), memory.len() * 2) };
        let cols = words.len();
        let read = StagingReader::new(MatRef::of(words, 1, cols).unwrap()).unwrap();
        assert_eq!(read.rows, stage.rows);
        assert_eq!(read.logits_rows, stage.logits_rows);
        assert_eq!((read.inits, read.edits), (&stage.inits[..], &stage.edits[..]));
        assert_eq!(read.drafts, stage.drafts);
        assert_eq!(read.table_changes(1).unwrap(), []);
        assert_eq!(read.table_changes(3).unwrap(), stage.table_changes);
        assert_eq!(read.words(at, 3).unwrap(), [5, 6, 7]);
        assert!(read.words(2, 2).is_err());
        let truncated = &words[..(stage.bytes() - ALIGN) / 4];
        let truncated = StagingReader::new(MatRef::of(truncated, 1, truncated.len()).unwrap());
        assert!(truncated.and_then(|read| read.table_changes(3)).is_err());
        // Copies the stage to an address that is 4 bytes after a multiple of 8, so that records with 8-byte
        // alignment are misaligned.
        let shifted: Vec<u64> = [-1].iter().chain(words).copied().collect::<Vec<i32>>()[..cols]
            .chunks_exact(2)
            .map(|pair| u64::from(pair[0] as u32) | u64::from(pair[1] as u32) << 32)
            .collect();
        // SAFETY: the slice covers `shifted` without its first 32-bit word; every bit pattern is an i32.
        let shifted: &[i32] =
            unsafe { std::slice::from_raw_parts(shifted.as_ptr().cast::<i32>().add(1), cols - 2) };
        let error = StagingReader::new(MatRef::of(shifted, 1, cols - 2).unwrap()).unwrap_err();
        assert!(error.to_string().contains("alignment"), "{error}");
    }
}
