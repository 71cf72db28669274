//! Objects within a request body: fields that are not extracted from them are recorded, with their paths, as
//! having no effect.

use super::RequestFields;
use super::field_values::printable;
use crate::api_error::ApiError;
use crate::ignored_parts::IgnoredRequestParts;
use crate::strict_json::JsonValue;

impl RequestFields {
    /// Returns the fields of the object `value` at `path` within this object. Fields that are not extracted
    /// before the result is dropped are recorded as having no effect.
    pub(crate) fn nested(&self, path: String, value: JsonValue) -> Result<Self, ApiError> {
        Self::nested_in(&self.hints, path, value)
    }

    /// Returns the fields of the object `value` at `path` in a request body whose values without effect are
    /// added to `hints`.
    pub(crate) fn nested_in(
        hints: &IgnoredRequestParts,
        path: String,
        value: JsonValue,
    ) -> Result<Self, ApiError> {
        let mut fields = Self::of(path, value)?;
        fields.hints = hints.clone();
        fields.records_rest = true;
        Ok(fields)
    }

    /// Removes the fields `names`, which have no meaning in a request, such as the ids and states of items in
    /// earlier replies.
    pub(crate) fn omit(&mut self, names: &[&str]) {
        self.pairs.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    /// Removes all remaining fields of an object that is used as a whole.
    pub(crate) fn omit_rest(&mut self) {
        self.pairs.clear();
    }

    /// Records that this whole object has no effect.
    pub(crate) fn accept_whole(&mut self) {
        self.pairs.clear();
        self.hints.add(self.path.as_str());
    }
}

impl Drop for RequestFields {
    fn drop(&mut self) {
        if !self.records_rest {
            return;
        }
        self.pairs.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        for (name, _) in &self.pairs {
            self.hints.add_with(|| self.path(&printable(name)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> RequestFields {
        RequestFields::of_body(JsonValue::parse(text.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn unread_fields_of_nested_objects_are_recorded() {
        let mut fields =
            body(r#"{"a": {"z": 1, "x": {"y": 2, "n\u00e4me,": 3}, "w": null}, "b": 4}"#);
        let value = fields.take("a").unwrap();
        let mut outer = fields.nested("a".to_owned(), value).unwrap();
        let value = outer.take("x").unwrap();
        let mut inner = outer.nested("a.x".to_owned(), value).unwrap();
        assert_eq!(inner.int("y", 0..=9).unwrap(), Some(2));
        drop((inner, outer));
        assert_eq!(fields.hints().names(), ["a.x.n?me?", "a.z"]);
        assert_eq!(fields.ignored_names(), ["b"]);
    }

    #[test]
    fn omitted_fields_and_parts_of_ignored_objects_are_not_named() {
        let mut fields = body(r#"{"a": {"id": 1, "x": 2}, "b": {"y": 3}}"#);
        let path = |name: &str| name.to_owned();
        let value = fields.take("a").unwrap();
        fields.nested(path("a"), value).unwrap().omit(&["id"]);
        let value = fields.take("b").unwrap();
        fields.nested(path("b"), value).unwrap().accept_whole();
        assert_eq!(fields.hints().names(), ["a.x", "b"]);
    }
}
