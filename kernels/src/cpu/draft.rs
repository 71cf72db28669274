//! Around a model's draft layer on the CPU. The device twin is `csrc/draft`.

use super::CpuDevice;
use super::device::for_float;
use super::step::index;
use crate::check::{check_dtype, check_size};
use crate::step::{DraftPass, DraftRow, DraftStates, PassArrays, StageRead};
use crate::{DType, DeviceError, Element, Gather, Mat, MatMut, VocabPart};

impl CpuDevice {
    pub(super) fn lay_out_pass(
        stage: Mat<'_>,
        to: &mut PassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError> {
        let read = StageRead::new(stage)?;
        to.cu_q.row_mut::<i32>(0)[0] = 0;
        for r in 0..pass.rows {
            let row = read.drafts.get(r).copied().unwrap_or_default();
            let mut laid = (0, 0, -1, 0); // Padding.
            if (pass.pass as i32) < row.drafts {
                let start = start_of(&row, pass.positions)?;
                let position = (start + row.len - 1) as usize + pass.pass;
                let newest = (row.token + row.len - 1) as usize;
                let id = match pass.pass.checked_sub(1) {
                    None => pass.ids.row::<i32>(0)[newest],
                    Some(before) => pass.drafts.row::<i32>(before)[r],
                };
                let slot = slot(&row, position, (pass.tables, pass.block_tokens))?;
                laid = (id, position as i32, slot, position as i32 + 1);
            }
            to.ids.row_mut::<i32>(0)[r] = laid.0;
            to.positions.row_mut::<i32>(0)[r] = laid.1;
            to.slots.row_mut::<i64>(0)[r] = laid.2;
            to.context_lens.row_mut::<i32>(0)[r] = laid.3;
            to.row_seats.row_mut::<i32>(0)[r] = row.seat;
            to.cu_q.row_mut::<i32>(0)[r + 1] = r as i32 + 1;
        }
        Ok(())
    }

    pub(super) fn states_before(
        (stage, positions, rows): (Mat<'_>, Mat<'_>, usize),
        mut y: MatMut<'_>,
        (hidden, states): (Option<Mat<'_>>, &DraftStates<'_>),
    ) -> Result<(), DeviceError> {
        check_states(y.dtype(), y.cols(), states)?;
        let read = StageRead::new(stage)?;
        for (r, row) in read.drafts.iter().take(rows).enumerate() {
            let first = if hidden.is_some() { row.token as usize } else { r };
            let start = start_of(row, positions)?;
            for_float!(KERNEL, y.dtype(), T => {
                y.row_mut::<T>(first).copy_from_slice(&before::<T>((row, start), states)?);
            });
            let Some(hidden) = hidden else { continue };
            for t in first + 1..first + (row.len + row.drafts) as usize {
                for_float!(KERNEL, y.dtype(), T => {
                    y.row_mut::<T>(t).copy_from_slice(hidden.row(t - 1));
                });
            }
        }
        Ok(())
    }

    pub(super) fn carry_states(
        (stage, positions): (Mat<'_>, Mat<'_>),
        states: &mut DraftStates<'_>,
        (hidden, rows): (Mat<'_>, usize),
        tables: (Mat<'_>, usize),
    ) -> Result<(), DeviceError> {
        check_states(hidden.dtype(), hidden.cols(), states)?;
        let read = StageRead::new(stage)?;
        for row in read.drafts.iter().take(rows) {
            let row = (row, start_of(row, positions)?);
            for_float!(KERNEL, hidden.dtype(), T => carry::<T>(row, states, hidden, tables)?);
        }
        Ok(())
    }

    pub(super) fn choose_drafts(
        mut drafts: MatMut<'_>,
        (pass, first): (usize, usize),
        logits: Mat<'_>,
    ) -> Result<(), DeviceError> {
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        let to = &mut drafts.row_mut::<i32>(pass)[first..][..logits.rows()];
        for (r, to) in to.iter_mut().enumerate() {
            *to = likeliest(logits.row::<f32>(r)) as i32;
        }
        Ok(())
    }

    /// The same of a rank's part of the logits, together with those who have the others.
    pub(super) fn choose_drafts_of_parts(
        mut drafts: MatMut<'_>,
        (pass, first): (usize, usize),
        (logits, part): (Mat<'_>, &VocabPart),
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        let rows = logits.rows();
        let tell = |r: usize| {
            let own = &logits.row::<f32>(r)[..part.ids];
            let best = likeliest(own);
            // Of no ids the least there is.
            let value = own.get(best).copied().unwrap_or(f32::NEG_INFINITY);
            [value.to_bits() as i32, (part.first + best) as i32]
        };
        let told: Vec<i32> = (0..rows).flat_map(tell).collect();
        let mut all = vec![0; told.len() * part.ranks];
        let cols = all.len();
        if !gather(Mat::of(&told, 1, told.len())?, MatMut::of(&mut all, 1, cols)?) {
            return Err(DeviceError::Peers);
        }
        let to = &mut drafts.row_mut::<i32>(pass)[first..][..rows];
        for (r, to) in to.iter_mut().enumerate() {
            let of_ranks = all.chunks(2).skip(r).step_by(rows);
            let (values, ids): (Vec<f32>, Vec<i32>) =
                of_ranks.map(|told| (f32::from_bits(told[0] as u32), told[1])).unzip();
            *to = ids[likeliest(&values)];
        }
        Ok(())
    }

    pub(super) fn name_drafts(
        mut drafts: MatMut<'_>,
        (pass, rows): (usize, usize),
        names: Mat<'_>,
    ) -> Result<(), DeviceError> {
        for x in [drafts.dtype(), names.dtype()] {
            check_dtype(KERNEL, "names", x, DType::I32)?;
        }
        for draft in &mut drafts.row_mut::<i32>(pass)[..rows] {
            *draft = names.row::<i32>(0)[index("draft", *draft, names.cols())?];
        }
        Ok(())
    }

    pub(super) fn place_drafts(
        (stage, positions, rows): (Mat<'_>, Mat<'_>, usize),
        (mut ids, mut history): (MatMut<'_>, MatMut<'_>),
        drafts: Mat<'_>,
    ) -> Result<(), DeviceError> {
        let read = StageRead::new(stage)?;
        for (r, row) in read.drafts.iter().take(rows).enumerate() {
            let behind = start_of(row, positions)? + row.len;
            let known = history.row_mut::<i32>(row.seat as usize);
            for i in 0..row.drafts as usize {
                let id = drafts.row::<i32>(i)[r];
                ids.row_mut::<i32>(0)[(row.token + row.len) as usize + i] = id;
                if let Some(place) = known.get_mut(behind as usize + i) {
                    *place = id;
                }
            }
        }
        Ok(())
    }
}

const KERNEL: &str = "draft";

fn check_states(
    dtype: DType,
    channels: usize,
    states: &DraftStates<'_>,
) -> Result<(), DeviceError> {
    for x in [&states.held, &states.edges] {
        check_dtype(KERNEL, "states", x.dtype(), dtype)?;
        check_size(KERNEL, "channels", x.cols(), channels)?;
    }
    Ok(())
}

/// Position of a row's first token.
fn start_of(row: &DraftRow, positions: Mat<'_>) -> Result<i32, DeviceError> {
    Ok(positions.row::<i32>(0)[index("token", row.token, positions.cols())?])
}

fn slot(
    row: &DraftRow,
    position: usize,
    (tables, block_tokens): (Mat<'_>, usize),
) -> Result<i64, DeviceError> {
    let table = tables.row::<i32>(index("seat", row.seat, tables.rows())?);
    let block = table[index("table", (position / block_tokens) as i32, table.len())?];
    Ok(i64::from(block) * block_tokens as i64 + (position % block_tokens) as i64)
}

/// The state before the first token of a row that begins at `start`.
fn before<T: Element + Default>(
    (row, start): (&DraftRow, i32),
    states: &DraftStates<'_>,
) -> Result<Vec<T>, DeviceError> {
    if row.edge >= 0 {
        let block = index("edge", row.edge, states.edges.rows())?;
        return Ok(states.edges.as_ref().row::<T>(block).to_vec());
    }
    if row.held == 0 {
        return Ok(vec![T::default(); states.held.cols()]);
    }
    let seat = index("seat", row.seat, states.firsts.cols())?;
    let place = start - 1 - states.firsts.as_ref().row::<i32>(0)[seat];
    let place = seat * states.depth + index("held state", place, states.depth)?;
    Ok(states.held.as_ref().row::<T>(place).to_vec())
}

fn carry<T: Element + Default>(
    (row, start): (&DraftRow, i32),
    states: &mut DraftStates<'_>,
    hidden: Mat<'_>,
    tables: (Mat<'_>, usize),
) -> Result<(), DeviceError> {
    let (first, last) = (row.token as usize, row.len as usize - 1);
    let tokens = (row.len + row.drafts) as usize;
    let newest = start + last as i32;
    let mut kept = Vec::with_capacity(states.depth);
    if newest > 0 {
        kept.push(match last.checked_sub(1) {
            None => before::<T>((row, start), states)?,
            Some(i) => hidden.row::<T>(first + i).to_vec(),
        });
    }
    kept.extend((last..tokens).map(|i| hidden.row::<T>(first + i).to_vec()));
    check_size(KERNEL, "held states", kept.len().max(states.depth), states.depth)?;
    for (i, state) in kept.iter().enumerate() {
        states.held.row_mut::<T>(row.seat as usize * states.depth + i).copy_from_slice(state);
    }
    states.firsts.row_mut::<i32>(0)[row.seat as usize] = (newest - 1).max(0);
    for i in 0..tokens {
        let position = start as usize + i;
        if (position + 1).is_multiple_of(tables.1) {
            let block = slot(row, position, tables)? as usize / tables.1;
            states.edges.row_mut::<T>(block).copy_from_slice(hidden.row(first + i));
        }
    }
    Ok(())
}

/// The first of the largest numbers; 0 of none.
fn likeliest(logits: &[f32]) -> usize {
    let larger = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, larger)
}
