//! Text pairs of score and rerank requests.

use super::PROMPTS_MAX;
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;

/// Texts to be scored in pairs: one query for all documents, or one query per document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextPairs {
    pub(super) queries: Vec<String>,
    pub(super) documents: Vec<String>,
}

/// Names of the two fields that contain the texts of a score request, as in vLLM.
const FIELD_PAIRS: [[&str; 2]; 4] =
    [["text_1", "text_2"], ["queries", "documents"], ["queries", "items"], ["data_1", "data_2"]];

impl TextPairs {
    /// Parses the texts of a score request, under any of their names.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        let used =
            FIELD_PAIRS.into_iter().find(|pair| pair.iter().all(|name| fields.contains(name)));
        let [queries, documents] = used.unwrap_or(FIELD_PAIRS[0]);
        let pairs = Self {
            queries: take_texts(fields, queries)?,
            documents: take_texts(fields, documents)?,
        };
        let (first, second) = (pairs.queries.len(), pairs.documents.len());
        if first > 1 && first != second {
            let message = format!(
                "{first} texts for {second} of {documents}; there must be one text, or one per text of {documents}"
            );
            return Err(ApiError::invalid(queries, message));
        }
        Ok(pairs)
    }

    /// Parses the query and the documents of a rerank request.
    pub(super) fn take_query(fields: &mut RequestFields) -> Result<Self, ApiError> {
        let query = fields.required("query")?;
        let query = text("query".to_owned(), query)?;
        Ok(Self { queries: vec![query], documents: take_texts(fields, "documents")? })
    }

    /// Returns the pairs in the order of the documents.
    pub(super) fn iter(&self) -> impl Iterator<Item = TextPair<'_>> {
        let queries = self.queries.iter().map(String::as_str).cycle();
        let documents = self.documents.iter().map(String::as_str);
        queries.zip(documents).map(|(query, document)| TextPair { query, document })
    }
}

/// Query and document to be scored together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextPair<'a> {
    pub(super) query: &'a str,
    pub(super) document: &'a str,
}

/// Parses the field `name`: a text, or a list of texts.
fn take_texts(fields: &mut RequestFields, name: &str) -> Result<Vec<String>, ApiError> {
    match fields.required(name)? {
        JsonValue::List(list) if list.is_empty() || list.len() > PROMPTS_MAX => {
            let message = format!("must have 1 to {PROMPTS_MAX} texts, got {}", list.len());
            Err(ApiError::invalid(name, message))
        }
        JsonValue::List(list) => {
            let texts = list.into_iter().enumerate();
            texts.map(|(index, value)| text(format!("{name}[{index}]"), value)).collect()
        }
        one => Ok(vec![text(name.to_owned(), one)?]),
    }
}

/// Parses one text: a string, or an object with the member `text`, as clients of rerank services send it.
fn text(path: String, value: JsonValue) -> Result<String, ApiError> {
    match value {
        JsonValue::Str(text) => Ok(text),
        value @ JsonValue::Object(_) => {
            let mut object = RequestFields::of(path, value)?;
            if object.take("content").is_some() {
                let path = object.path("content");
                return Err(ApiError::unsupported(path, "only text is supported"));
            }
            object.required_string("text")
        }
        other => Err(wrong_type(path, "a string", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> RequestFields {
        RequestFields::of_body(JsonValue::parse(body.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn score_fields_have_four_spellings() {
        for [first, second] in FIELD_PAIRS {
            let body = format!(r#"{{"{first}": "q", "{second}": ["a", {{"text": "b"}}]}}"#);
            let pairs = TextPairs::take(&mut fields(&body)).unwrap();
            let found: Vec<_> = pairs.iter().map(|pair| (pair.query, pair.document)).collect();
            assert_eq!(found, [("q", "a"), ("q", "b")], "{body}");
        }
    }

    #[test]
    fn queries_and_documents_must_pair() {
        let error = |body: &str| TextPairs::take(&mut fields(body)).unwrap_err().param.unwrap();
        assert_eq!(error(r#"{"text_1": ["a", "b"], "text_2": ["c"]}"#), "text_1");
        assert_eq!(error(r#"{"text_1": "a"}"#), "text_2");
        assert_eq!(error(r#"{"text_1": [], "text_2": "a"}"#), "text_1");
        assert_eq!(error(r#"{"text_1": "a", "text_2": ["b", 1]}"#), "text_2[1]");
        assert_eq!(error(r#"{"text_1": "a", "text_2": [{"content": []}]}"#), "text_2[0].content");
        let pairs = TextPairs::take(&mut fields(r#"{"text_1": ["a", "b"], "text_2": ["c", "d"]}"#));
        let pairs = pairs.unwrap();
        let last = pairs.iter().last().unwrap();
        assert_eq!((last.query, last.document), ("b", "d"));
    }
}
