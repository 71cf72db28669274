//! `hadron eval equal`: checks that two servers, or two configurations of a server, return equal outputs.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::questions::{EvalQuestion, read, text_of};
use crate::client::{OpenAiClient, run_limited};
use crate::config::{EvalEqualArgs, ProcessEnvironment};
use crate::progress::{ProgressReporter, ProgressUnit};

/// Maximum number of prompts for which the difference between the outputs of the two servers is printed.
const SHOWN_MAX: usize = 5;

/// Output of one server for a prompt: text, and token ids if the server reports them.
#[derive(Debug, PartialEq)]
struct EvalServerOutput {
    text: String,
    ids: Option<Vec<u64>>,
}

/// Sends all prompts to both servers and prints the differences. Returns false if any output differs.
pub(super) async fn run(args: &EvalEqualArgs, environment: &ProcessEnvironment) -> Result<bool> {
    let questions = read(&args.data, args.limit)?;
    let first_client = OpenAiClient::new(&args.client.base_url, &args.client, environment)?;
    let second_client = OpenAiClient::new(&args.other_url, &args.client, environment)?;
    let first = complete_all(&first_client, args, questions.clone(), args.concurrency).await?;
    let second =
        complete_all(&second_client, args, questions.clone(), args.other_concurrency).await?;

    let mut out = std::io::stdout().lock();
    let mut differences = 0;
    for (question, (a, b)) in questions.iter().zip(first.iter().zip(&second)) {
        let Some(difference) = difference(a, b) else { continue };
        differences += 1;
        if differences <= SHOWN_MAX {
            writeln!(out, "question {}: {difference}", question.id)?;
        }
    }
    let ids = first.iter().chain(&second).all(|output| output.ids.is_some());
    let compared = if ids { "token ids and text" } else { "text" };
    writeln!(out, "{} of {} equal ({compared})", questions.len() - differences, questions.len())?;
    Ok(differences == 0)
}

async fn complete_all(
    client: &OpenAiClient,
    args: &EvalEqualArgs,
    questions: Vec<EvalQuestion>,
    concurrency: usize,
) -> Result<Vec<EvalServerOutput>> {
    let model = client.model(args.client.model.as_deref()).await.context("/v1/models")?;
    let progress = ProgressReporter::new("prompts", questions.len() as u64, ProgressUnit::Items);
    let work = async |question: EvalQuestion| {
        let (path, mut body) = question.request(&model, args.max_tokens);
        body["return_token_ids"] = true.into();
        let reply = client.post(path, &body).await;
        parse_output(&reply.with_context(|| format!("question {}", question.id))?)
    };
    let outputs = run_limited(questions, concurrency, &progress, work).await;
    progress.finish();
    outputs.into_iter().collect()
}

fn parse_output(reply: &Value) -> Result<EvalServerOutput> {
    let ids = reply["choices"][0]["token_ids"].as_array();
    let ids = ids.map(|ids| ids.iter().filter_map(Value::as_u64).collect());
    Ok(EvalServerOutput { text: text_of(reply)?.to_owned(), ids })
}

/// Describes the first difference between two outputs.
fn difference(a: &EvalServerOutput, b: &EvalServerOutput) -> Option<String> {
    if let (Some(a), Some(b)) = (&a.ids, &b.ids) {
        if a == b {
            return None;
        }
        let at = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        return Some(format!("token {at} is {:?} and {:?}", a.get(at), b.get(at)));
    }
    (a.text != b.text).then(|| format!("{:?} and {:?}", a.text, b.text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_decide_where_both_report_them() {
        let output =
            |text: &str, ids: Option<Vec<u64>>| EvalServerOutput { text: text.to_owned(), ids };
        assert_eq!(difference(&output("a", Some(vec![1])), &output("b", Some(vec![1]))), None);
        let difference_text =
            difference(&output("a", Some(vec![1, 2])), &output("a", Some(vec![1, 3])));
        assert_eq!(difference_text.unwrap(), "token 1 is Some(2) and Some(3)");
        assert!(difference(&output("a", None), &output("b", Some(vec![]))).is_some());
        let reply = json!({"choices": [{"text": "x", "token_ids": [4]}]});
        assert_eq!(super::parse_output(&reply).unwrap(), output("x", Some(vec![4])));
    }
}
