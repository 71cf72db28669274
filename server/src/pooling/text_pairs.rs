//! Text pairs of score and rerank requests.

use super::PROMPTS_MAX;
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;

/// Names of the two request fields that contain the texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PairFieldNames {
    pub(super) queries: &'static str,
    pub(super) documents: &'static str,
}

/// Texts to be scored in pairs: one query for all documents, or one query per document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextPairs {
    /// Names of the request fields that contain the texts, for error messages.
    pub(super) fields: PairFieldNames,
    pub(super) queries: Vec<String>,
    pub(super) documents: Vec<String>,
}

/// Pairs of field names for the texts of a score request, as in vLLM.
const SCORE_FIELDS: [PairFieldNames; 4] = [
    PairFieldNames { queries: "text_1", documents: "text_2" },
    PairFieldNames { queries: "queries", documents: "documents" },
    PairFieldNames { queries: "queries", documents: "items" },
    PairFieldNames { queries: "data_1", documents: "data_2" },
];

/// Names of the fields that contain the texts of a rerank request.
const RERANK_FIELDS: PairFieldNames = PairFieldNames { queries: "query", documents: "documents" };

impl PairFieldNames {
    /// Returns the field names used by a score request: the first pair with both fields present. If there
    /// is none, a pair with one field present, so that the error names the missing field.
    fn of_score(fields: &RequestFields) -> Self {
        let has = |names: &Self, field: fn(&Self) -> &'static str| fields.contains(field(names));
        let has_both = |names: &Self| has(names, |n| n.queries) && has(names, |n| n.documents);
        let has_one = |names: &Self| has(names, |n| n.queries) || has(names, |n| n.documents);
        let used = SCORE_FIELDS.into_iter().find(has_both);
        used.or_else(|| SCORE_FIELDS.into_iter().find(has_one)).unwrap_or(SCORE_FIELDS[0])
    }
}

impl TextPairs {
    /// Parses the texts of a score request, under any of the supported field names.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        let names = PairFieldNames::of_score(fields);
        let PairFieldNames { queries, documents } = names;
        let pairs = Self {
            fields: names,
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
        let query = fields.required(RERANK_FIELDS.queries)?;
        let query = text(fields, RERANK_FIELDS.queries.to_owned(), query)?;
        let documents = take_texts(fields, RERANK_FIELDS.documents)?;
        Ok(Self { fields: RERANK_FIELDS, queries: vec![query], documents })
    }

    /// Rejects pairs whose prompts have more than `bytes_max` bytes in total. A query shared by all documents
    /// is tokenised once per document, so a short body can cause much work.
    pub(super) fn check_prompt_bytes(&self, bytes_max: usize) -> Result<(), ApiError> {
        let bytes: usize = self.iter().map(|pair| pair.query.len() + pair.document.len()).sum();
        if bytes <= bytes_max {
            return Ok(());
        }
        let message = format!(
            "the prompts of {} pairs have {bytes} bytes in total, of which each repeats its query; the limit is \
             {bytes_max} bytes",
            self.documents.len()
        );
        Err(ApiError::invalid(self.fields.queries, message))
    }

    /// Returns one pair of query and document per document, in document order.
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

/// Parses the field `name`: one text or a list of texts.
fn take_texts(fields: &mut RequestFields, name: &str) -> Result<Vec<String>, ApiError> {
    match fields.required(name)? {
        JsonValue::List(list) if list.is_empty() || list.len() > PROMPTS_MAX => {
            let message = format!("must have 1 to {PROMPTS_MAX} texts, got {}", list.len());
            Err(ApiError::invalid(name, message))
        }
        JsonValue::List(list) => {
            let texts = list.into_iter().enumerate();
            texts.map(|(index, value)| text(fields, format!("{name}[{index}]"), value)).collect()
        }
        one => Ok(vec![text(fields, name.to_owned(), one)?]),
    }
}

/// Parses one text: a string, or an object with the member `text`, which clients of rerank services send.
fn text(fields: &RequestFields, path: String, value: JsonValue) -> Result<String, ApiError> {
    match value {
        JsonValue::Str(text) => Ok(text),
        value @ JsonValue::Object(_) => {
            let mut object = fields.nested(path, value)?;
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
        for names in SCORE_FIELDS {
            let PairFieldNames { queries, documents } = names;
            let body = format!(r#"{{"{queries}": "q", "{documents}": ["a", {{"text": "b"}}]}}"#);
            let pairs = TextPairs::take(&mut fields(&body)).unwrap();
            assert_eq!(pairs.fields, names);
            let found: Vec<_> = pairs.iter().map(|pair| (pair.query, pair.document)).collect();
            assert_eq!(found, [("q", "a"), ("q", "b")], "{body}");
        }
    }

    #[test]
    fn queries_and_documents_must_pair() {
        let error = |body: &str| TextPairs::take(&mut fields(body)).unwrap_err().param.unwrap();
        assert_eq!(error(r#"{"text_1": ["a", "b"], "text_2": ["c"]}"#), "text_1");
        assert_eq!(error("{}"), "text_1");
        assert_eq!(error(r#"{"text_1": "a"}"#), "text_2");
        assert_eq!(error(r#"{"queries": "a"}"#), "documents");
        assert_eq!(error(r#"{"items": "a"}"#), "queries");
        assert_eq!(error(r#"{"data_2": "a"}"#), "data_1");
        assert_eq!(error(r#"{"text_1": [], "text_2": "a"}"#), "text_1");
        assert_eq!(error(r#"{"text_1": "a", "text_2": ["b", 1]}"#), "text_2[1]");
        assert_eq!(error(r#"{"text_1": "a", "text_2": [{"content": []}]}"#), "text_2[0].content");
        let pairs = TextPairs::take(&mut fields(r#"{"text_1": ["a", "b"], "text_2": ["c", "d"]}"#));
        let pairs = pairs.unwrap();
        let last = pairs.iter().last().unwrap();
        assert_eq!((last.query, last.document), ("b", "d"));
    }

    #[test]
    fn bytes_of_a_repeated_query_are_limited() {
        let body = r#"{"query": "abc", "documents": ["d", "ef"]}"#;
        let pairs = TextPairs::take_query(&mut fields(body)).unwrap();
        assert!(pairs.check_prompt_bytes(9).is_ok());
        let error = pairs.check_prompt_bytes(8).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("query"));
        assert!(error.message.contains("9 bytes"), "{}", error.message);
    }
}
