//! What a rank finds in its part of a row.

use super::brought::{Brought, Candidate, Report};
use super::shape::Shape;
use crate::cpu::sample::row::{Edge, Ranked, Scratch, edit, first_of_largest, leading, noisiest};
use crate::cpu::sample::rules::{Draw, Pick, RowRequest, Rules};
use crate::cpu::sample::vector;

/// Looks at the raw logits of a part that begins with id `first`.
pub(super) fn bring(
    raw: &[f32],
    first: usize,
    row: &RowRequest<'_>,
    shape: &Shape,
    scratch: &mut Scratch,
) -> Brought {
    if raw.is_empty() {
        return Brought::default();
    }
    if !vector::maxima(raw, scratch.maxima_for(raw)) {
        return Brought { strange: true, ..Brought::default() };
    }
    let report = shape.top.map(|top| report(raw, first, top, scratch)).unwrap_or_default();
    let brought = match &row.pick {
        Pick::Known(id) => known(raw, first, *id),
        Pick::Choose(rules) => {
            let mut l = std::mem::take(&mut scratch.edited);
            let brought = choices((raw, first), rules, shape, &mut l, scratch);
            scratch.edited = l;
            brought
        }
    };
    Brought { report, ..brought }
}

fn known(raw: &[f32], first: usize, id: u32) -> Brought {
    match raw.get((id as usize).wrapping_sub(first)) {
        Some(&value) => Brought::one(Candidate { at: Ranked { id, value }, raw: value }),
        None => Brought::default(), // Another rank's.
    }
}

/// `scratch` holds the maxima of `raw`.
fn report(raw: &[f32], first: usize, top: usize, scratch: &mut Scratch) -> Report {
    let max = first_of_largest(raw, &scratch.maxima).value;
    let sum = vector::exp_sum(raw, max);
    let top = leading(raw, top, scratch).iter();
    Report { max, sum, top: top.map(|at| Ranked { id: at.id + first as u32, ..*at }).collect() }
}

/// `scratch` holds the maxima of `raw`.
fn choices(
    (raw, first): (&[f32], usize),
    rules: &Rules<'_>,
    shape: &Shape,
    l: &mut Vec<f32>,
    scratch: &mut Scratch,
) -> Brought {
    let candidate = |at: &Ranked| Candidate {
        at: Ranked { id: at.id + first as u32, ..*at },
        raw: raw[at.id as usize],
    };
    let edited = rules.edits.change_anything();
    if edited {
        edit(l, raw, first, &rules.edits);
        vector::maxima(l, scratch.maxima_for(l));
    }
    let Some(draw) = &rules.draw else {
        let best = first_of_largest(if edited { l } else { raw }, &scratch.maxima);
        return Brought::one(candidate(&best));
    };
    if !edited {
        l.clear();
        l.extend_from_slice(raw);
    }
    let l = &mut l[..];
    vector::scale(l, draw.temperature.recip(), scratch.maxima_for(l));
    let best = first_of_largest(l, &scratch.maxima);
    if !shape.cut {
        return Brought::one(candidate(&noisiest(
            (l, first),
            draw,
            best,
            Edge::NONE,
            &scratch.maxima,
        )));
    }
    likeliest(l, best, draw, shape, scratch, candidate)
}

/// The first of the part, in order, as far as min-p may keep them; `scratch` holds the maxima of `l`.
fn likeliest(
    l: &[f32],
    best: Ranked,
    draw: &Draw,
    shape: &Shape,
    scratch: &mut Scratch,
    candidate: impl Fn(&Ranked) -> Candidate,
) -> Brought {
    let masked = best.value == f32::NEG_INFINITY;
    let mass = if shape.mass && !masked { vector::exp_sum(l, best.value) } else { 0.0 };
    let floor = draw.floor(best.value);
    let found = leading(l, shape.candidates + 1, scratch);
    let found = &found[..found.partition_point(|at| at.value >= floor)];
    Brought {
        more: found.len() > shape.candidates,
        candidates: found.iter().take(shape.candidates).map(candidate).collect(),
        mass,
        ..Brought::default()
    }
}
