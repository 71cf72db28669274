//! Readers of question files and of token id files, which have one JSON value per line.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use protocol::Token;
use serde::Deserialize;
use serde_json::{Value, json};

/// One line of a question file.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct EvalQuestion {
    #[serde(default)]
    pub(super) id: Value,
    /// Category of the question. Scores are reported per category.
    #[serde(default = "any_kind")]
    pub(super) kind: String,
    /// Messages of a chat request. Without messages, `prompt` is sent as a completion request.
    messages: Option<Value>,
    /// Text or token ids of a completion request.
    prompt: Option<Value>,
    /// Expected answer, if there is one.
    pub(super) answer: Option<String>,
}

fn any_kind() -> String {
    "question".to_owned()
}

impl EvalQuestion {
    /// Returns the path and the body of a request for this question, with greedy sampling.
    pub(super) fn request(&self, model: &str, max_tokens: u32) -> (&'static str, Value) {
        let mut body = json!({"model": model, "max_tokens": max_tokens, "temperature": 0.0});
        if let Some(messages) = &self.messages {
            body["messages"] = messages.clone();
            ("/v1/chat/completions", body)
        } else {
            body["prompt"] = self.prompt.clone().unwrap_or(Value::Null);
            ("/v1/completions", body)
        }
    }
}

/// Returns the text of the first choice of a chat or completion reply.
pub(super) fn text_of(reply: &Value) -> Result<&str> {
    let choice = &reply["choices"][0];
    let text = choice["message"]["content"].as_str().or_else(|| choice["text"].as_str());
    text.with_context(|| format!("the reply has no text: {reply}"))
}

/// Questions for the demo model, which are not part of its training data.
const DEMO: &str = include_str!("../../tests/data/demo/questions.jsonl");

/// Reads at most `limit` questions from a file, or the questions for the demo model if `path` is `None`.
pub(super) fn read_or_demo(path: Option<&Path>, limit: Option<usize>) -> Result<Vec<EvalQuestion>> {
    match path {
        Some(path) => read(path, limit),
        None => questions(Path::new("demo questions"), DEMO, limit),
    }
}

/// Reads at most `limit` questions from a file.
pub(super) fn read(path: &Path, limit: Option<usize>) -> Result<Vec<EvalQuestion>> {
    questions(path, &text(path)?, limit)
}

fn questions(path: &Path, text: &str, limit: Option<usize>) -> Result<Vec<EvalQuestion>> {
    let questions =
        lines(path, text)?.into_iter().take(limit.unwrap_or(usize::MAX)).map(|(number, line)| {
            let location = || format!("{} line {number}", path.display());
            // A line that is a list of token ids is a prompt.
            let line = if line.is_array() { json!({ "prompt": line }) } else { line };
            let question: EvalQuestion = serde_json::from_value(line).with_context(location)?;
            if question.messages.is_none() && question.prompt.is_none() {
                bail!("{}: neither messages nor prompt", location());
            }
            Ok(question)
        });
    let questions: Vec<EvalQuestion> = questions.collect::<Result<_>>()?;
    if questions.is_empty() {
        bail!("{}: no questions", path.display());
    }
    Ok(questions)
}

/// Reads lines of token ids, in the form `[1, 2]` or `{"tokens": [1, 2]}`.
pub(super) fn read_ids(path: &Path) -> Result<Vec<Vec<Token>>> {
    let ids = lines(path, &text(path)?)?.into_iter().map(|(number, mut line)| {
        let list = if line.is_object() { line["tokens"].take() } else { line };
        let ids: Vec<Token> = serde_json::from_value(list)
            .with_context(|| format!("{} line {number}: not token ids", path.display()))?;
        if ids.len() < 2 {
            bail!("{} line {number}: at least 2 ids are needed", path.display());
        }
        Ok(ids)
    });
    ids.collect()
}

fn text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

/// Parses the non-blank lines as JSON. Returns the values with their line numbers.
fn lines(path: &Path, text: &str) -> Result<Vec<(usize, Value)>> {
    let numbered = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = numbered.map(|(index, line)| {
        let value = serde_json::from_str(line);
        Ok((index + 1, value.with_context(|| format!("{} line {}", path.display(), index + 1))?))
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn questions_and_ids_are_read_line_by_line() {
        let text =
            "{\"id\": 1, \"kind\": \"add\", \"messages\": [], \"answer\": \"2\"}\n\n[1, 2]\n";
        let questions = read(file(text).path(), None).unwrap();
        assert_eq!(questions.len(), 2);
        assert_eq!(questions[0].request("m", 4).0, "/v1/chat/completions");
        assert_eq!(questions[1].request("m", 4).1["prompt"], json!([1, 2]));
        assert_eq!(read(file(text).path(), Some(1)).unwrap().len(), 1);
        let demo = read_or_demo(None, None).unwrap();
        assert!(demo.len() == 500 && demo.iter().all(|question| question.answer.is_some()));
        let ids = read_ids(file("[1,2,3]\n{\"tokens\":[4,5]}").path()).unwrap();
        assert_eq!(ids, [vec![1, 2, 3], vec![4, 5]]);
    }

    #[test]
    fn a_bad_line_is_named() {
        for (text, expected) in [("{}", "line 1: neither"), ("\n{", "line 2"), ("", "no questions")]
        {
            let error = format!("{:#}", read(file(text).path(), None).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        assert!(read_ids(file("[1]").path()).is_err());
    }
}
