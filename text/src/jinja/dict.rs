//! Dicts in insertion order. Keys are equal by Python's rules: `1`, `1.0` and `true` are one key.

use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::value::{JinjaValue, VALUE_DEPTH_MAX};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Number of entries from which a dict has a hash index of its keys; smaller dicts are searched linearly.
const INDEXED_MIN: usize = 9;

/// Maximum number of values in a key, including the values in nested tuples. A small value can be a huge key,
/// because a tuple may contain the same tuple many times.
const KEY_PARTS_MAX: usize = 10_000;

/// Dict.
#[derive(Debug, Clone, Default)]
pub(crate) struct DictValue {
    entries: Vec<DictEntry>,
    /// Position of each key in the entries; empty for a small dict.
    index: HashMap<DictKey, usize>,
    depth: u16,
}

/// Entry of a dict.
#[derive(Debug, Clone)]
pub(crate) struct DictEntry {
    /// Key as a value.
    pub(crate) key: JinjaValue,
    /// Value.
    pub(crate) value: JinjaValue,
    hashed: DictKey,
}

/// Normalised form of a key: two keys are equal if their normalised forms are equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum DictKey {
    /// `none`
    None,
    /// Undefined value; all undefined values are equal.
    Undefined,
    /// Boolean, integer, or float with an integer value.
    Int(i64),
    /// Other integer, in decimal.
    Big(String),
    /// Bits of another float.
    Float(u64),
    /// String.
    Text(Arc<str>),
    /// Bytes.
    Bytes(Rc<[u8]>),
    /// Tuple.
    Tuple(Vec<DictKey>),
    /// Range: its length, first integer and step.
    Range(u64, i64, i64),
    /// Address of a value of a type that is compared by identity, so that the value equals only itself.
    Identity(usize),
}

impl DictKey {
    /// Returns the normalised form of `value` as a key.
    ///
    /// Errors: the value is not hashable.
    pub(crate) fn new(value: &JinjaValue) -> JinjaResult<Self> {
        Self::build(value, &mut { KEY_PARTS_MAX })
    }

    fn build(value: &JinjaValue, parts_left: &mut usize) -> JinjaResult<Self> {
        *parts_left = parts_left.checked_sub(1).ok_or_else(|| {
            JinjaError::new(JinjaErrorKind::Memory, "a tuple is too large to be a key")
        })?;
        Ok(match value {
            JinjaValue::None => Self::None,
            JinjaValue::Undefined(_) => Self::Undefined,
            JinjaValue::Bool(value) => Self::Int(i64::from(*value)),
            JinjaValue::Int(number) => Self::Int(*number),
            JinjaValue::Big(number) => Self::Big(number.to_string()),
            JinjaValue::Float(number) => Self::of_float(*number),
            JinjaValue::Str(text) | JinjaValue::Markup(text) => Self::Text(Arc::clone(text)),
            JinjaValue::Bytes(bytes) => Self::Bytes(Rc::clone(bytes)),
            JinjaValue::Tuple(items) => {
                let keys: JinjaResult<Vec<Self>> =
                    items.items.iter().map(|item| Self::build(item, parts_left)).collect();
                Self::Tuple(keys?)
            }
            JinjaValue::Range(range) => match range.len() {
                0 => Self::Range(0, 0, 0),
                1 => Self::Range(1, range.start, 0),
                len => Self::Range(len, range.start, range.step),
            },
            JinjaValue::Iterator(iterator) => Self::Identity(Rc::as_ptr(iterator).addr()),
            JinjaValue::Namespace(namespace) => Self::Identity(Rc::as_ptr(namespace).addr()),
            JinjaValue::Macro(definition) => Self::Identity(Rc::as_ptr(definition).addr()),
            JinjaValue::Loop(state) => Self::Identity(Rc::as_ptr(state).addr()),
            JinjaValue::Cycler(cycler) => Self::Identity(Rc::as_ptr(cycler).addr()),
            JinjaValue::Joiner(joiner) => Self::Identity(Rc::as_ptr(joiner).addr()),
            JinjaValue::Method(method) => Self::Identity(Rc::as_ptr(method).addr()),
            JinjaValue::Function(function) => Self::Identity(*function as usize),
            JinjaValue::TemplateBlocks | JinjaValue::Block(_) => Self::Identity(usize::MAX),
            JinjaValue::List(_) | JinjaValue::Dict(_) | JinjaValue::View(_) => {
                let message = format!("unhashable type: '{}'", value.type_name());
                return Err(JinjaError::type_error(message));
            }
        })
    }

    fn of_float(number: f64) -> Self {
        // Floats below 9e18 without a fraction convert to `i64` and back without loss.
        if number.fract() == 0.0 && number.abs() < 9e18 {
            return Self::Int(number as i64);
        }
        if number.fract() == 0.0 {
            return Self::Big(format!("{number:.0}"));
        }
        Self::Float(number.to_bits())
    }
}

impl DictValue {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nesting of the values.
    pub(crate) fn depth(&self) -> u16 {
        self.depth.max(1)
    }

    /// Entries in order of insertion.
    pub(crate) fn entries(&self) -> &[DictEntry] {
        &self.entries
    }

    fn position(&self, key: &DictKey) -> Option<usize> {
        if self.entries.len() < INDEXED_MIN {
            return self.entries.iter().position(|entry| entry.hashed == *key);
        }
        self.index.get(key).copied()
    }

    /// Returns the value of a key.
    ///
    /// Errors: the value cannot be a key.
    pub(crate) fn get(&self, key: &JinjaValue) -> JinjaResult<Option<&JinjaValue>> {
        if let Some(text) = key.as_text() {
            return Ok(self.get_text(text));
        }
        let key = DictKey::new(key)?;
        Ok(self.position(&key).map(|position| &self.entries[position].value))
    }

    /// Returns the value of a string key.
    pub(crate) fn get_text(&self, key: &Arc<str>) -> Option<&JinjaValue> {
        let position = if self.entries.len() < INDEXED_MIN {
            self.entries
                .iter()
                .position(|entry| matches!(&entry.hashed, DictKey::Text(text) if text == key))
        } else {
            self.index.get(&DictKey::Text(Arc::clone(key))).copied()
        };
        position.map(|position| &self.entries[position].value)
    }

    /// Sets the value of a key. An existing key keeps its position.
    ///
    /// Errors: the value cannot be a key, or is nested too deeply.
    pub(crate) fn insert(&mut self, key: JinjaValue, value: JinjaValue) -> JinjaResult<()> {
        let hashed = DictKey::new(&key)?;
        let depth = key.depth().max(value.depth()) + 1;
        if depth > VALUE_DEPTH_MAX {
            return Err(JinjaError::new(JinjaErrorKind::Depth, "values are nested too deeply"));
        }
        self.depth = self.depth.max(depth);
        if let Some(position) = self.position(&hashed) {
            self.entries[position].value = value;
            return Ok(());
        }
        let position = self.entries.len();
        if position + 1 == INDEXED_MIN {
            let keys = self.entries.iter().enumerate();
            self.index = keys.map(|(at, entry)| (entry.hashed.clone(), at)).collect();
        }
        if position + 1 >= INDEXED_MIN {
            self.index.insert(hashed.clone(), position);
        }
        self.entries.push(DictEntry { key, value, hashed });
        Ok(())
    }

    /// Removes and returns all entries.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::take(self)
    }
}

/// Part of a dict that a view contains: the keys, the values or the items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DictViewKind {
    /// `keys()`
    Keys,
    /// `values()`
    Values,
    /// `items()`
    Items,
}

/// View of a dict: its keys, values or items.
#[derive(Debug)]
pub(crate) struct DictView {
    /// Dict.
    pub(crate) dict: Rc<DictValue>,
    /// What is shown.
    pub(crate) kind: DictViewKind,
}

impl DictView {
    /// Name of the Python type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self.kind {
            DictViewKind::Keys => "dict_keys",
            DictViewKind::Values => "dict_values",
            DictViewKind::Items => "dict_items",
        }
    }
}
