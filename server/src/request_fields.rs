//! Extracts typed fields from a JSON object. Each extracted ("taken") field is removed; the fields that
//! remain at the end are reported to the client as ignored, with their paths for objects within the body.
//!
//! `null` always means that the field is absent. Every error names the field and its allowed values.

mod field_lookups;
mod field_values;
mod nested_fields;

use super::api_error::ApiError;
use super::ignored_parts::IgnoredRequestParts;
use super::strict_json::JsonValue;
pub(crate) use field_lookups::{FieldKind, FieldLookupRecord};
use field_values::{as_float, as_int, out_of_range};
pub(crate) use field_values::{int_list, printable, string_list, wrong_type};
use std::ops::RangeInclusive;

/// Limits of the ignored field names in the reply header: number of names, and bytes per name.
const IGNORED_MAX: usize = 10;

/// Fields of one JSON object that have not been extracted yet.
pub struct RequestFields {
    path: String,
    pairs: Vec<(String, JsonValue)>,
    /// Fields looked up so far; `None` if lookups are not recorded.
    lookups: Option<Vec<FieldLookupRecord>>,
    /// Accepted values that have no effect on the reply, of all objects of the request body.
    hints: IgnoredRequestParts,
    /// Whether the fields that remain when this object is dropped are added to `hints`.
    records_rest: bool,
}

impl RequestFields {
    /// Returns the fields of an object; fields whose value is null are dropped. A value of another type is
    /// returned as the error.
    fn of_object(value: JsonValue) -> Result<Self, JsonValue> {
        let JsonValue::Object(mut pairs) = value else { return Err(value) };
        pairs.retain(|(_, value)| *value != JsonValue::Null);
        let (path, hints) = (String::new(), IgnoredRequestParts::default());
        Ok(Self { path, pairs, lookups: None, hints, records_rest: false })
    }

    /// Returns the fields of a request body, which must be an object.
    pub fn of_body(body: JsonValue) -> Result<Self, ApiError> {
        Self::of_object(body).map_err(|other| {
            let message = format!("the body must be a JSON object, not {}", other.kind());
            ApiError::invalid("", message)
        })
    }

    /// Returns the fields of the object `value`, which is the value of the field `path`. Fields that are not
    /// extracted are not reported.
    pub fn of(path: String, value: JsonValue) -> Result<Self, ApiError> {
        match Self::of_object(value) {
            Ok(mut fields) => {
                fields.path = path;
                Ok(fields)
            }
            Err(other) => Err(wrong_type(path, "an object", &other)),
        }
    }

    /// Returns the full path of a field of this object, for error messages.
    pub fn path(&self, name: &str) -> String {
        match self.path.as_str() {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        }
    }

    /// Returns the path of the object itself; empty for a request body.
    pub fn own_path(&self) -> &str {
        &self.path
    }

    /// Whether the field `name` is present and has not been removed by an earlier call.
    pub fn contains(&self, name: &str) -> bool {
        self.pairs.iter().any(|(key, _)| key == name)
    }

    /// Records that the value at `path` is accepted but has no effect on the reply. The path must be printable
    /// ASCII.
    pub fn accept_without_effect(&self, path: String) {
        self.hints.add(path);
    }

    /// Removes and returns the string field `name`, and records that the field has no effect. Its value must be
    /// one of `values`.
    pub fn accept_keyword(
        &mut self,
        name: &str,
        values: &[&str],
    ) -> Result<Option<String>, ApiError> {
        let Some(value) = self.string(name, 64)? else { return Ok(None) };
        if !values.contains(&value.as_str()) {
            let message = format!("must be one of {}", values.join(", "));
            return Err(ApiError::invalid(self.path(name), message));
        }
        self.hints.add(self.path(name));
        Ok(Some(value))
    }

    /// Returns the accepted values of the request that have no effect on the reply.
    pub(crate) fn hints(&self) -> &IgnoredRequestParts {
        &self.hints
    }

    /// Enables the recording of field lookups.
    #[must_use]
    pub fn recording_lookups(mut self) -> Self {
        self.lookups = Some(Vec::new());
        self
    }

    /// Returns the recorded lookups; each field name occurs once.
    pub fn into_lookups(mut self) -> Vec<FieldLookupRecord> {
        self.lookups.take().unwrap_or_default()
    }

    fn record_lookup(&mut self, name: &str, kind: impl FnOnce() -> FieldKind) {
        let Some(lookups) = &mut self.lookups else { return };
        if lookups.iter().all(|lookup| lookup.name != name) {
            lookups.push(FieldLookupRecord { name: name.to_owned(), kind: kind() });
        }
    }

    /// Removes and returns the field `name`, of any type.
    pub fn take(&mut self, name: &str) -> Option<JsonValue> {
        self.record_lookup(name, || FieldKind::Any);
        let index = self.pairs.iter().position(|(key, _)| key == name)?;
        Some(self.pairs.swap_remove(index).1)
    }

    /// Adds a field, for example a field that was removed before, so that later code can read it.
    pub fn put_back(&mut self, name: &str, value: JsonValue) {
        self.pairs.push((name.to_owned(), value));
    }

    /// Removes and returns the field `name`, of any type; an error if it is absent.
    pub fn required(&mut self, name: &str) -> Result<JsonValue, ApiError> {
        self.take(name).ok_or_else(|| ApiError::invalid(self.path(name), "is missing"))
    }

    /// Removes and returns the field `name`, a string of any length; an error if it is absent.
    pub fn required_string(&mut self, name: &str) -> Result<String, ApiError> {
        let text = self.string(name, usize::MAX)?;
        text.ok_or_else(|| ApiError::invalid(self.path(name), "is missing"))
    }

    /// Removes and returns a field under its name or its alias. Rejects a request that contains both names.
    pub fn take_alias(&mut self, name: &str, alias: &str) -> Result<Option<JsonValue>, ApiError> {
        match (self.take(name), self.take(alias)) {
            (Some(_), Some(_)) => {
                let message = format!("`{alias}` is an alias of `{name}`: give only one of them");
                Err(ApiError::invalid(self.path(alias), message))
            }
            (value, None) | (None, value) => Ok(value),
        }
    }

    /// Removes and returns a field under its name or its alias, together with the name that the request
    /// uses, for errors about the value.
    pub fn take_with_alias<'a>(
        &mut self,
        name: &'a str,
        alias: &'a str,
    ) -> Result<Option<(&'a str, JsonValue)>, ApiError> {
        let is_alias = self.pairs.iter().any(|(key, _)| key == alias);
        let value = self.take_alias(name, alias)?;
        Ok(value.map(|value| (if is_alias { alias } else { name }, value)))
    }

    /// Returns the names of the remaining fields that begin with `prefix`.
    pub fn names_with_prefix(&self, prefix: &str) -> Vec<String> {
        let names = self.pairs.iter().map(|(name, _)| name);
        names.filter(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Removes and returns the field `name`, a boolean.
    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.record_lookup(name, || FieldKind::Bool);
        match self.take(name) {
            None => Ok(None),
            Some(JsonValue::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(self.path(name), "a boolean", &other)),
        }
    }

    /// Removes and returns the field `name`, an integer within `range`.
    pub fn int(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.record_lookup(name, || FieldKind::Int(range.clone()));
        let (low, high) = (*range.start(), *range.end());
        let expected = match (low, high) {
            (i64::MIN, i64::MAX) => "a 64-bit integer".to_owned(),
            (low, i64::MAX) => format!("an integer of at least {low}"),
            _ => format!("an integer from {low} to {high}"),
        };
        match self.take(name) {
            None => Ok(None),
            Some(value) => match as_int(&value).filter(|int| range.contains(int)) {
                Some(int) => Ok(Some(int)),
                None => Err(out_of_range(self.path(name), &expected, &value)),
            },
        }
    }

    /// Removes and returns the field `name`, a number within `range`; `low_open` excludes the lower bound.
    pub fn float(
        &mut self,
        name: &str,
        range: RangeInclusive<f32>,
        low_open: bool,
    ) -> Result<Option<f32>, ApiError> {
        self.record_lookup(name, || FieldKind::Float { range: range.clone(), low_open });
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = as_float(&value);
        let inside = |x: &f32| range.contains(x) && !(low_open && x == range.start());
        number.filter(inside).map(Some).ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            let above = if low_open { "above" } else { "from" };
            let expected = if *high == f32::MAX {
                format!("a finite number {above} {low}")
            } else {
                format!("a number {above} {low} to {high}")
            };
            out_of_range(self.path(name), &expected, &value)
        })
    }

    /// Removes and returns the field `name`, a string of at most `bytes_max` bytes.
    pub fn string(&mut self, name: &str, bytes_max: usize) -> Result<Option<String>, ApiError> {
        self.record_lookup(name, || FieldKind::Str(bytes_max));
        match self.take(name) {
            None => Ok(None),
            Some(JsonValue::Str(value)) if value.len() <= bytes_max => Ok(Some(value)),
            Some(JsonValue::Str(value)) => {
                let message = format!("at most {bytes_max} bytes, got {}", value.len());
                Err(ApiError::invalid(self.path(name), message))
            }
            Some(other) => Err(wrong_type(self.path(name), "a string", &other)),
        }
    }

    /// Removes and returns the field `name`, a list of at most `len_max` integers within `range`.
    pub fn ints(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
        len_max: usize,
    ) -> Result<Option<Vec<i64>>, ApiError> {
        self.record_lookup(name, || FieldKind::Ints { range: range.clone(), len_max });
        let path = self.path(name);
        match self.take(name) {
            None => Ok(None),
            Some(value) => int_list(&path, value, range, len_max).map(Some),
        }
    }

    /// Removes and returns the field `name`, a list of at most `len_max` strings of 1 to `bytes_max` bytes.
    pub fn strings(
        &mut self,
        name: &str,
        bytes_max: usize,
        len_max: usize,
    ) -> Result<Option<Vec<String>>, ApiError> {
        self.record_lookup(name, || FieldKind::Strings { bytes_max, len_max });
        let path = self.path(name);
        match self.take(name) {
            None => Ok(None),
            Some(value) => string_list(&path, value, bytes_max, len_max).map(Some),
        }
    }

    /// Returns the remaining fields as JSON.
    #[cfg(test)]
    pub fn into_values(mut self) -> serde_json::Map<String, serde_json::Value> {
        std::mem::take(&mut self.pairs)
            .into_iter()
            .map(|(key, value)| (key, value.into_value()))
            .collect()
    }

    /// Returns the number of remaining fields.
    pub fn remaining(&self) -> usize {
        self.pairs.len()
    }

    /// Returns the names of the remaining fields, shortened and escaped for the reply header.
    pub fn ignored_names(&self) -> Vec<String> {
        let mut names: Vec<&str> = self.pairs.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.into_iter().take(IGNORED_MAX).map(printable).collect()
    }
}
