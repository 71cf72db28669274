//! Stored form of conversation items, and pages of items.

use super::item_sequence::ConversationItem;
use crate::api_error::ApiError;
use crate::query_parameters::{ExtractedQuery, QueryParameter, query_parameters};
use serde_json::{Value, json};

/// Default and maximum number of items in a page, as in OpenAI's API.
const LIMIT_DEFAULT: usize = 20;
const LIMIT_MAX: usize = 100;

/// Returns a user message as an item.
pub(crate) fn user_message(text: &str) -> Value {
    stored_form(json!({"role": "user", "content": text}))
}

/// Returns an input item in the form in which conversations return it: with a type, a status, content as a
/// list of parts, and without an id, which the conversation assigns.
pub(crate) fn stored_form(mut item: Value) -> Value {
    let Some(fields) = item.as_object_mut() else { return item };
    fields.remove("id");
    fields.retain(|_, value| !value.is_null());
    let kind = fields.entry("type").or_insert_with(|| json!("message")).clone();
    if kind == "message" {
        let is_output = fields.get("role").is_some_and(|role| role == "assistant");
        let content = fields.entry("content").or_insert_with(|| json!([]));
        if let Value::String(text) = content {
            let text = std::mem::take(text);
            *content = if is_output {
                json!([{"type": "output_text", "text": text, "annotations": [], "logprobs": []}])
            } else {
                json!([{"type": "input_text", "text": text}])
            };
        }
    }
    let with_status = ["message", "function_call", "function_call_output", "custom_tool_call"];
    if kind.as_str().is_some_and(|kind| with_status.contains(&kind)) {
        fields.entry("status").or_insert_with(|| json!("completed"));
    }
    item
}

/// Query parameters that select a page of items.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ItemPageQuery {
    /// Id of the item before the first item of the page.
    after: Option<String>,
    limit: usize,
    is_ascending: bool,
}

impl ItemPageQuery {
    /// Parses the query of a request.
    ///
    /// Errors: HTTP status 400; the error names the parameter.
    pub(crate) fn of_request(query: ExtractedQuery) -> Result<Self, ApiError> {
        Self::of(&query_parameters(query)?)
    }

    fn of(parameters: &[QueryParameter]) -> Result<Self, ApiError> {
        let mut query = Self { after: None, limit: LIMIT_DEFAULT, is_ascending: false };
        for QueryParameter { name, value } in parameters {
            match (name.as_str(), value.as_str()) {
                ("after", id) => query.after = Some(id.to_owned()),
                ("limit", text) => {
                    let limit = text.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    let message = format!("must be an integer from 1 to {LIMIT_MAX}");
                    query.limit = limit.ok_or_else(|| ApiError::invalid("limit", message))?;
                }
                ("order", "asc") => query.is_ascending = true,
                ("order", "desc") => query.is_ascending = false,
                ("order", _) => return Err(ApiError::invalid("order", "must be asc or desc")),
                // `include` requests additional item data; items are always returned completely.
                ("include" | "include[]", _) => {}
                _ => return Err(ApiError::unsupported(name, "unknown parameter")),
            }
        }
        Ok(query)
    }

    /// Returns the page of `items` as JSON text.
    ///
    /// Errors: HTTP status 400 if there is no item with the id in `after`.
    pub(crate) fn page(&self, items: &[&ConversationItem]) -> Result<String, ApiError> {
        let mut ordered = items.to_vec();
        if !self.is_ascending {
            ordered.reverse();
        }
        let start = match &self.after {
            None => 0,
            Some(id) => {
                let at = ordered.iter().position(|item| item.id == *id);
                at.ok_or_else(|| ApiError::invalid("after", "no item has this id"))? + 1
            }
        };
        let end = ordered.len().min(start + self.limit);
        Ok(list(&ordered[start..end], end < ordered.len()))
    }
}

/// Returns an OpenAI list object with these items as JSON text.
pub(super) fn list(items: &[&ConversationItem], has_more: bool) -> String {
    let id = |item: Option<&&ConversationItem>| json!(item.map_or("", |item| item.id.as_str()));
    let (first, last) = (id(items.first()), id(items.last()));
    let bodies: Vec<&str> = items.iter().map(|item| item.body.as_str()).collect();
    let data = bodies.join(",");
    format!(
        "{{\"object\":\"list\",\"data\":[{data}],\"first_id\":{first},\"last_id\":{last},\
         \"has_more\":{has_more}}}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_have_types_parts_and_statuses() {
        let text = json!([{"type": "input_text", "text": "hi"}]);
        let message =
            json!({"type": "message", "role": "user", "content": text, "status": "completed"});
        assert_eq!(user_message("hi"), message);
        let output = stored_form(json!({"id": "x", "role": "assistant", "content": "a"}));
        assert_eq!(output["content"][0]["type"], "output_text");
        assert_eq!(output.get("id"), None);
        let reasoning = json!({"type": "reasoning", "summary": []});
        assert_eq!(stored_form(reasoning.clone()), reasoning);
    }

    /// Returns the ids of the items of a page, joined by spaces.
    fn item_ids(page: &Value) -> String {
        let items = page["data"].as_array().unwrap().iter();
        let ids: Vec<&str> = items.map(|item| item["id"].as_str().unwrap()).collect();
        ids.join(" ")
    }

    #[test]
    fn pages_follow_each_other() {
        let item = |index: usize| {
            let id = format!("i{index}");
            ConversationItem { body: json!({"id": id}).to_string(), id }
        };
        let items: Vec<ConversationItem> = (0..5).map(item).collect();
        let page = |pairs: &[(&str, &str)]| {
            let parameter = |(name, value): &(&str, &str)| QueryParameter {
                name: (*name).to_owned(),
                value: (*value).to_owned(),
            };
            let parameters: Vec<_> = pairs.iter().map(parameter).collect();
            let text = ItemPageQuery::of(&parameters)?.page(&items.iter().collect::<Vec<_>>())?;
            let list: Value = serde_json::from_str(&text).unwrap();
            Ok::<_, ApiError>((item_ids(&list), list["has_more"].as_bool().unwrap()))
        };
        assert_eq!(page(&[]).unwrap(), ("i4 i3 i2 i1 i0".to_owned(), false));
        let two = [("order", "asc"), ("limit", "2")];
        assert_eq!(page(&two).unwrap(), ("i0 i1".to_owned(), true));
        let next = [two[0], two[1], ("after", "i1")];
        assert_eq!(page(&next).unwrap(), ("i2 i3".to_owned(), true));
        assert_eq!(page(&[("after", "i1")]).unwrap(), ("i0".to_owned(), false));
        for (name, value) in
            [("limit", "0"), ("limit", "101"), ("order", "up"), ("after", "x"), ("z", "")]
        {
            assert_eq!(page(&[(name, value)]).unwrap_err().param.as_deref(), Some(name));
        }
    }
}
