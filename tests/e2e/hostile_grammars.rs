//! Grammars designed to be expensive: each is rejected within its time limit, or its bitmasks are built fast
//! enough.

use crate::test_server::grammar_worker;
use grammar::{
    GrammarCompilePool, GrammarSession, GrammarSpec, GrammarTimings, GrammarVocabulary,
    JsonWhitespace, OutputConstraint, TEXT_BYTES_MAX,
};
use protocol::Token;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const END: Token = 256;

/// A vocabulary with one token per byte and one end-of-sequence token.
pub(crate) fn vocabulary() -> GrammarVocabulary {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    GrammarVocabulary { tokens, special: vec![END], end_ids: vec![END], encode }
}

pub(crate) fn json_spec(schema: Value) -> GrammarSpec {
    GrammarSpec::Json { schema, whitespace: JsonWhitespace::None }
}

#[test]
fn hostile_grammars_are_rejected_or_cheap_in_a_second() {
    let deep =
        |open: &str, close: &str, n: usize| format!("{}a{}", open.repeat(n), close.repeat(n));
    let words: Vec<Value> =
        (0..3_000).map(|i| json!({"pattern": format!("^x{i}(a|b)*c{{1,{i}}}$")})).collect();
    let links = (0..3_000).map(|i| format!("a{i}: a{} a{}\n", i + 1, i + 1));
    let chain = format!("start: a0\n{}a3000: \"x\"\n", links.collect::<String>());
    let mut all_of = json!({"type": "string"});
    for _ in 0..40 {
        all_of = json!({"allOf": [all_of, {"anyOf": [{"minLength": 1}, {"maxLength": 9}]}]});
    }
    let forms = [
        GrammarSpec::Regex(deep("(", ")", 20_000)),
        GrammarSpec::Regex("(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}".to_owned()),
        GrammarSpec::Regex(format!("({})*x{{1000}}", "a?".repeat(2_000))),
        GrammarSpec::Regex(r"(\p{L}|\p{N}){1,5000}[^\p{L}]{5000}".to_owned()),
        GrammarSpec::Lark(format!("start: {}", deep("(", ")", 20_000).replace('a', "\"a\""))),
        GrammarSpec::Lark(format!("start: {}", "\"a\"? ".repeat(9_000))),
        GrammarSpec::Lark("start: a\na: a a | \"x\"{1,400000}".to_owned()),
        GrammarSpec::Lark("x".repeat(TEXT_BYTES_MAX + 1)),
        GrammarSpec::Lark(chain),
        json_spec(json!({"allOf": words[..60]})),
        json_spec(json!({"type": "integer", "multipleOf": 999_983})),
        json_spec(json!({"anyOf": words})),
        json_spec(json!({"type": "string", "minLength": 1_000_000, "pattern": "^(a|b|ab)*$"})),
        json_spec(json!({"type": "array", "minItems": 2_000_000_000, "items": {"type": "null"}})),
        json_spec(all_of),
    ];
    let (told, results) = channel();
    let mut rejected = 0;
    let timings = Arc::new(GrammarTimings::default());
    let grammars = GrammarCompilePool::start(vocabulary, &grammar_worker(), timings).unwrap();
    for form in forms {
        let (since, told) = (Instant::now(), told.clone());
        let shown: String = format!("{form:?}").chars().take(80).collect();
        grammars
            .compile(OutputConstraint::new(form, "test"), move |result| told.send(result).unwrap());
        let result = results.recv_timeout(Duration::from_mins(1)).unwrap();
        let took = since.elapsed();
        println!("{took:?} {shown}: {:?}", result.as_ref());
        rejected += u32::from(result.is_err());
        if let Ok(compiled) = result {
            let mut session = compiled.session_seed(false).session();
            let mut made = 0;
            while made < 50 && session.mask().is_some_and(|mask| take_first(&mut session, &mask)) {
                made += 1;
            }
            println!("accepted, {made} masks in {:?}", since.elapsed());
        }
        // On an idle machine a grammar takes at most about one second; the limit is larger for busy machines.
        assert!(took < Duration::from_secs(30), "{shown}: {took:?}");
        assert!(since.elapsed() < Duration::from_mins(1), "{shown}: its masks are slow");
    }
    assert!(rejected >= 6, "only {rejected} are rejected");
}

/// Advances the session by the first token id that `mask` allows. Returns false if `mask` allows only the
/// end-of-sequence token.
pub(crate) fn take_first(session: &mut GrammarSession, mask: &[u32]) -> bool {
    let first = (0..END).find(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
    session.advance(first.as_slice());
    first.is_some()
}
