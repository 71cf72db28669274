//! `hadron eval tasks`: sends questions that have one correct answer, with greedy sampling, and counts the
//! answers that match exactly.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::questions::{EvalQuestion, read_or_demo, text_of};
use crate::client::{OpenAiClient, run_limited};
use crate::config::{EvalTasksArgs, ProcessEnvironment};
use crate::progress::{ProgressReporter, ProgressUnit};

/// Maximum number of wrong answers that are printed.
const SHOWN_MAX: usize = 3;

/// A question with the server's output for it.
struct EvalAnswer {
    question: EvalQuestion,
    output: String,
    is_correct: bool,
    reply: Value,
}

/// Sends all questions and prints the score. Returns false if the score is below `--min-score`.
pub(super) async fn run(args: &EvalTasksArgs, environment: &ProcessEnvironment) -> Result<bool> {
    let questions = read_or_demo(args.data.as_deref(), args.limit)?;
    if let Some(question) = questions.iter().find(|q| q.answer.is_none()) {
        bail!("question {} has no answer", question.id);
    }
    let client = OpenAiClient::new(&args.client.base_url, &args.client, environment)?;
    let model = client.model(args.client.model.as_deref()).await.context("/v1/models")?;
    let progress = ProgressReporter::new("questions", questions.len() as u64, ProgressUnit::Items);
    let ask_question = async |question: EvalQuestion| {
        let (path, body) = question.request(&model, args.max_tokens);
        let reply = client.post(path, &body).await.with_context(|| question_label(&question))?;
        let output = text_of(&reply)?.trim().to_owned();
        let is_correct = question.answer.as_deref().map(str::trim) == Some(&output);
        anyhow::Ok(EvalAnswer { question, output, is_correct, reply })
    };
    let answers = run_limited(questions, args.concurrency, &progress, ask_question).await;
    progress.finish();
    let answers: Vec<EvalAnswer> = answers.into_iter().collect::<Result<_>>()?;
    let score = print(&answers)?;
    if let Some(path) = &args.output {
        let text = serde_json::to_string_pretty(&report(&answers, score, args))? + "\n";
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(args.min_score.is_none_or(|min| score >= min))
}

fn question_label(question: &EvalQuestion) -> String {
    format!("question {}", question.id)
}

/// Returns, for each category, the number of correct outputs and the number of all outputs.
fn by_kind(answers: &[EvalAnswer]) -> BTreeMap<&str, (usize, usize)> {
    let mut kinds = BTreeMap::new();
    for answer in answers {
        let (correct, all) = kinds.entry(answer.question.kind.as_str()).or_insert((0, 0));
        *correct += usize::from(answer.is_correct);
        *all += 1;
    }
    kinds
}

fn share(correct: usize, all: usize) -> f64 {
    correct as f64 / all.max(1) as f64
}

/// Prints the score of each category and returns the total score.
fn print(answers: &[EvalAnswer]) -> Result<f64> {
    let mut out = std::io::stdout().lock();
    for answer in answers.iter().filter(|answer| !answer.is_correct).take(SHOWN_MAX) {
        let expected = answer.question.answer.as_deref().unwrap_or_default();
        writeln!(
            out,
            "{}: expected {expected:?}, got {:?}",
            question_label(&answer.question),
            answer.output
        )?;
    }
    let mut total = (0, 0);
    for (kind, (correct, all)) in by_kind(answers) {
        writeln!(out, "{kind:12} {correct:5} of {all:5}  {:6.2} %", share(correct, all) * 100.0)?;
        total = (total.0 + correct, total.1 + all);
    }
    let score = share(total.0, total.1);
    writeln!(out, "{:12} {:5} of {:5}  {:6.2} %", "total", total.0, total.1, score * 100.0)?;
    Ok(score)
}

fn report(answers: &[EvalAnswer], score: f64, args: &EvalTasksArgs) -> Value {
    let sum = |path: &str| {
        let counts = answers.iter().filter_map(|answer| answer.reply.pointer(path)?.as_u64());
        counts.sum::<u64>()
    };
    let kinds = by_kind(answers).into_iter().map(|(kind, (correct, all))| {
        (kind.to_owned(), json!({"right": correct, "all": all, "score": share(correct, all)}))
    });
    let each = answers.iter().map(|answer| {
        json!({
            "id": answer.question.id,
            "kind": answer.question.kind,
            "expected": answer.question.answer,
            "given": answer.output,
            "right": answer.is_correct,
            "finish_reason": answer.reply["choices"][0]["finish_reason"],
        })
    });
    json!({
        "kind": "tasks",
        "version": env!("CARGO_PKG_VERSION"),
        "concurrency": args.concurrency,
        "score": score,
        "kinds": kinds.collect::<serde_json::Map<_, _>>(),
        "prompt_tokens": sum("/usage/prompt_tokens"),
        "cached_tokens": sum("/usage/prompt_tokens_details/cached_tokens"),
        "completion_tokens": sum("/usage/completion_tokens"),
        "answers": each.collect::<Vec<_>>(),
    })
}
