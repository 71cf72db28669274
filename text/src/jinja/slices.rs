//! Slices of sequences.

use super::arguments::integer_argument;
use super::ast::SliceExpression;
use super::error::{JinjaError, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::scope::VariableScope;
use super::value::{JinjaValue, RangeValue};

impl TemplateEvaluator {
    /// Evaluates `target[start:stop:step]`.
    pub(crate) fn evaluate_slice(
        &mut self,
        slice: &SliceExpression,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        let target = self.evaluate(&slice.target, scope)?;
        let mut bounds = [None; 3];
        let parts = [&slice.start, &slice.stop, &slice.step];
        for (bound, part) in bounds.iter_mut().zip(parts) {
            let Some(part) = part else { continue };
            let value = self.evaluate(part, scope)?;
            *bound = slice_bound(&value)?;
        }
        let [start, stop, step] = bounds;
        self.slice(&target, SliceBounds { start, stop, step: step.unwrap_or(1) })
    }

    fn slice(&mut self, target: &JinjaValue, bounds: SliceBounds) -> JinjaResult<JinjaValue> {
        if bounds.step == 0 {
            return Err(JinjaError::value_error("slice step cannot be zero"));
        }
        match target {
            JinjaValue::Undefined(cause) => Err(cause.error()),
            JinjaValue::List(items) | JinjaValue::Tuple(items) => {
                let range = bounds.over(items.items.len());
                self.charge(range.len() as usize * size_of::<JinjaValue>())?;
                let selected =
                    (0..range.len()).map(|at| items.items[range.at(at) as usize].clone());
                let selected = selected.collect();
                let is_list = matches!(target, JinjaValue::List(_));
                if is_list { JinjaValue::list(selected) } else { JinjaValue::tuple(selected) }
            }
            JinjaValue::Str(text) | JinjaValue::Markup(text) => {
                self.charge(text.len())?;
                self.spend_bytes(text.len())?;
                Ok(JinjaValue::text_like(target, slice_text(text, bounds)))
            }
            JinjaValue::Bytes(bytes) => {
                self.charge(bytes.len())?;
                let range = bounds.over(bytes.len());
                Ok(JinjaValue::Bytes(
                    (0..range.len()).map(|at| bytes[range.at(at) as usize]).collect(),
                ))
            }
            JinjaValue::Range(range) => {
                let selected = bounds.over(range.len() as usize);
                let at = |index: i64| range.start.saturating_add(range.step.saturating_mul(index));
                Ok(JinjaValue::Range(RangeValue {
                    start: at(selected.start),
                    stop: at(selected.stop),
                    step: range.step.saturating_mul(selected.step),
                }))
            }
            _ => {
                let kind = target.type_name();
                Err(JinjaError::type_error(format!(
                    "'{kind}' object is not subscriptable with a slice"
                )))
            }
        }
    }
}

/// Bounds of a slice; an absent bound is an end of the sequence.
#[derive(Clone, Copy)]
struct SliceBounds {
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
}

impl SliceBounds {
    /// Returns the indices of the slice in a sequence of `length` items.
    fn over(self, length: usize) -> RangeValue {
        let length = length as i64;
        let (low, high) = if self.step > 0 { (0, length) } else { (-1, length - 1) };
        let clamp = |bound: i64| {
            let bound = if bound < 0 { bound.saturating_add(length) } else { bound };
            bound.clamp(low, high)
        };
        let (first, last) = if self.step > 0 { (low, high) } else { (high, low) };
        let start = self.start.map_or(first, clamp);
        let stop = self.stop.map_or(last, clamp);
        RangeValue { start, stop, step: self.step }
    }
}

fn slice_bound(value: &JinjaValue) -> JinjaResult<Option<i64>> {
    match value {
        JinjaValue::None => Ok(None),
        JinjaValue::Undefined(_) | JinjaValue::Float(_) => {
            let message = "slice indices must be integers or None or have an __index__ method";
            Err(JinjaError::type_error(message))
        }
        _ => integer_argument(value).map(Some),
    }
}

fn slice_text(text: &str, bounds: SliceBounds) -> String {
    if text.is_ascii() && bounds.step == 1 {
        let range = bounds.over(text.len());
        let (start, stop) = (range.start as usize, range.stop.max(range.start) as usize);
        return text[start..stop].to_owned();
    }
    let characters: Vec<char> = text.chars().collect();
    let range = bounds.over(characters.len());
    (0..range.len()).map(|at| characters[range.at(at) as usize]).collect()
}
