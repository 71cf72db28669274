//! Time and memory of the dry run of a grammar: a worker process compiles the grammar and runs it on sample
//! tokens to measure its cost. Measured are the first dry run, which starts the process, and later dry runs.
//! The vocabulary has a realistic size.

use crate::bounded_child::CHILD_TIMEOUT;
use crate::test_server::grammar_worker;
use grammar::{
    GrammarCompilePool, GrammarSpec, GrammarTimings, GrammarVocabulary, JsonWhitespace,
    OutputConstraint,
};
use protocol::Token;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const TOKENS: Token = 151_000;
const ROUNDS: u32 = 200;

/// A vocabulary of all single bytes and words of two to nine letters. Half of the words start with a space.
fn vocabulary() -> GrammarVocabulary {
    let mut state = 1_u64;
    let mut draw = |sides: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % sides
    };
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    while (tokens.len() as Token) < TOKENS {
        let letters = 2 + draw(8);
        let mut word = if draw(2) == 0 { b" ".to_vec() } else { Vec::new() };
        word.extend((0..letters).map(|_| b"etaoinshrdlucmfw"[draw(16) as usize]));
        tokens.push(word);
    }
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    GrammarVocabulary { tokens, special: vec![TOKENS], end_ids: vec![TOKENS], encode }
}

/// A grammar of the given kind, which contains `number`, so that it is not in a cache of earlier grammars.
fn form(kind: usize, number: u32) -> GrammarSpec {
    let json = |schema: Value| GrammarSpec::Json { schema, whitespace: JsonWhitespace::Any };
    let name = format!("p{number}");
    match kind {
        0 => json(json!({"type": "object", "required": ["a"], "additionalProperties": false,
            "properties": {"a": {"type": "integer"}, name: {"type": "string"}}})),
        1 => {
            let property = |i: u32| (format!("{name}_{i}"), json!({"type": ["string", "null"]}));
            let properties: serde_json::Map<_, _> = (0..40).map(property).collect();
            json(json!({"type": "object", "properties": properties}))
        }
        _ => GrammarSpec::Regex(format!("{name}-[0-9]{{4}}-[a-z]+")),
    }
}

fn compile(grammars: &GrammarCompilePool, form: GrammarSpec) -> Duration {
    let (told, compiled) = channel();
    let since = Instant::now();
    grammars.compile(OutputConstraint::new(form, "test"), move |result| {
        told.send(result.map(drop)).unwrap();
    });
    compiled.recv_timeout(CHILD_TIMEOUT).unwrap().unwrap();
    since.elapsed()
}

/// Resident memory of each child process, from `/proc`.
fn memory() -> Vec<String> {
    let mine = std::process::id().to_string();
    let statuses = std::fs::read_dir("/proc").unwrap().flatten();
    let statuses =
        statuses.filter_map(|entry| std::fs::read_to_string(entry.path().join("status")).ok());
    let value = |status: &str, name: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(name));
        found.unwrap_or_default().trim().to_owned()
    };
    statuses
        .filter(|status| value(status, "PPid:") == mine)
        .map(|status| format!("{} resident", value(&status, "VmRSS:")))
        .collect()
}

#[test]
#[ignore = "measures times: `just trials`"]
fn latency_of_grammar_dry_runs() {
    let timings = Arc::new(GrammarTimings::default());
    let grammars = GrammarCompilePool::start(vocabulary, &grammar_worker(), timings).unwrap();
    println!("{TOKENS} tokens");
    println!("| grammar | first | p50 | p99 |");
    println!("|---|--:|--:|--:|");
    let names = ["object of 2 properties", "object of 40 properties", "regex"];
    for (kind, name) in names.into_iter().enumerate() {
        let first = compile(&grammars, form(kind, 0));
        let mut took: Vec<_> =
            (1..=ROUNDS).map(|number| compile(&grammars, form(kind, number))).collect();
        took.sort_unstable();
        let at = |share: f64| took[(share * f64::from(ROUNDS - 1)) as usize];
        println!("| {name} | {first:.1?} | {:.2?} | {:.2?} |", at(0.5), at(0.99));
    }
    println!("processes: {:?}", memory());
}
