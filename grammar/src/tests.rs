//! Tests of compilation, rejection and masks with a vocabulary of single-byte tokens.

mod faulty_grammars;
mod mask_workers;

use super::cache::GrammarCache;
use super::compile::{CompiledGrammar, DryRunReport, GrammarCompiler, GrammarError};
use super::limits::MASK_SLOW_IN_DRY_RUN;
use super::mask_session::MaskSession;
use super::{
    DecodingGuide, GrammarSession, GrammarSpec, GrammarTimings, GrammarVocabulary, JsonWhitespace,
    MaskEvent, MaskWorkers, MaskedRow, OutputConstraint, ReasoningState, ReasoningTracker,
    ThinkingBudget,
};
pub(super) use mask_workers::{MaskWorkerHarness, budget};
use protocol::{ExecutorCommand, RequestId, StepId, Token};
use scheduler::{FinishReason, SchedulerEffect, TokenEvent};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) const END: Token = 256;

/// Returns a vocabulary with one token per byte and one end-of-text token.
pub(super) fn vocabulary() -> GrammarVocabulary {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    GrammarVocabulary { tokens, special: vec![END], end_ids: vec![END], encode }
}

fn compile(spec: GrammarSpec) -> Result<CompiledGrammar, GrammarError> {
    compile_with(&GrammarCompiler::new(vocabulary()).unwrap(), &OutputConstraint::new(spec, "test"))
}

/// Performs the dry run (test compilation) of a constraint in this process, and then compiles the
/// constraint.
pub(super) fn compile_with(
    compiler: &GrammarCompiler,
    constraint: &OutputConstraint,
) -> Result<CompiledGrammar, GrammarError> {
    let report = compiler.dry_run(constraint)?;
    compiler.compile(constraint, report)
}

pub(super) fn json_spec(schema: Value) -> GrammarSpec {
    GrammarSpec::Json { schema, whitespace: JsonWhitespace::None }
}

/// Returns the allowed tokens as text; `$` represents the end-of-text token.
fn allowed(session: &mut GrammarSession) -> String {
    let Some(mask) = session.mask() else { return "nothing".to_owned() };
    let ids = (0..=END).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
    ids.map(|id| if id == END { '$' } else { char::from(id as u8) }).collect()
}

fn advance(session: &mut GrammarSession, text: &str) {
    for byte in text.bytes() {
        session.advance(&[Token::from(byte)]);
    }
}

/// Whether each byte of a text is allowed and the text may end after the last byte.
pub(super) fn accepts(compiled: &CompiledGrammar, text: &str) -> bool {
    let mut session = compiled.session_seed(false).session();
    for byte in text.bytes() {
        let fits =
            session.mask().is_some_and(|m| m[usize::from(byte) / 32] >> (byte % 32) & 1 == 1);
        if !fits {
            return false;
        }
        session.advance(&[Token::from(byte)]);
    }
    session.may_end()
}

#[test]
fn every_spec_accepts_exactly_its_language() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}},
        "required": ["a"], "additionalProperties": false});
    let spaced = GrammarSpec::Json { schema: schema.clone(), whitespace: JsonWhitespace::Any };
    let cases = [
        (
            json_spec(schema),
            vec![r#"{"a":3}"#, r#"{"a":17}"#],
            vec![r#"{"a":2}"#, "{}", r#"{"a": 3}"#],
        ),
        (spaced, vec!["{\n \"a\" : 3 }"], vec![r#"{"b":3}"#]),
        (
            GrammarSpec::json_object(JsonWhitespace::None),
            vec!["{}", r#"{"x":[1,null]}"#],
            vec!["[]", "1"],
        ),
        (
            GrammarSpec::Regex("a[bc]{2}|d/e".to_owned()),
            vec!["abc", "d/e"],
            vec!["ab", "abcd", "xabc"],
        ),
        (
            GrammarSpec::Choice(vec!["yes \"x\"".into(), "no\n".into()]),
            vec!["yes \"x\"", "no\n"],
            vec!["yes"],
        ),
        (
            GrammarSpec::Lark("start: \"<\" x \">\"\nx: /[0-9]/ | start".into()),
            vec!["<<7>>"],
            vec!["<7", "7"],
        ),
        (json_spec(json!(true)), vec!["1", "\"a\""], vec!["a"]),
    ];
    for (spec, good, bad) in cases {
        let compiled = compile(spec.clone()).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        for text in good {
            assert!(accepts(&compiled, text), "{spec:?} rejects {text}");
        }
        for text in bad {
            assert!(!accepts(&compiled, text), "{spec:?} accepts {text}");
        }
    }
}

#[test]
fn eos_is_allowed_exactly_where_the_grammar_may_end() {
    let compiled = compile(GrammarSpec::Regex("a(b|bb)?".to_owned())).unwrap();
    let mut session = compiled.session_seed(false).session();
    assert_eq!(allowed(&mut session), "a");
    advance(&mut session, "a");
    assert_eq!(allowed(&mut session), "b$");
    advance(&mut session, "b");
    assert_eq!(allowed(&mut session), "b$");
    advance(&mut session, "b");
    assert_eq!(allowed(&mut session), "$");
    let mut session = compiled.session_seed(true).session();
    advance(&mut session, "a");
    assert_eq!(allowed(&mut session), "b", "the end is ignored");
    advance(&mut session, "bb");
    assert_eq!(allowed(&mut session), "$", "an ignored end is allowed if no other token is");
    advance(&mut session, "c");
    assert_eq!(allowed(&mut session), "nothing", "a token outside the grammar");
}

#[test]
fn a_choice_may_have_thousands_of_texts() {
    let texts: Vec<String> = (0..4_000).map(|i| format!("w{}", i * 7_919)).collect();
    let compiled = compile(GrammarSpec::Choice(texts)).unwrap();
    for good in ["w0", "w7919", "w31668081"] {
        assert!(accepts(&compiled, good), "{good} is rejected");
    }
    for bad in ["w", "w1", "w79190000", "x"] {
        assert!(!accepts(&compiled, bad), "{bad} is accepted");
    }
}

#[test]
fn sessions_of_one_grammar_are_independent() {
    let compiled = compile(GrammarSpec::Choice(vec!["ab".into(), "cd".into()])).unwrap();
    let (mut first, mut second) =
        (compiled.session_seed(false).session(), compiled.session_seed(false).session());
    advance(&mut first, "a");
    advance(&mut second, "c");
    assert_eq!((allowed(&mut first), allowed(&mut second)), ("b".into(), "d".into()));
    assert_eq!(allowed(&mut compiled.session_seed(false).session()), "ac");
}

#[test]
fn constraint_may_start_after_a_marker() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    for spec in [
        GrammarSpec::Choice(vec!["yes".into()]),
        GrammarSpec::Regex("yes".into()),
        json_spec(json!({"const": "yes"})),
    ] {
        let quoted = matches!(spec, GrammarSpec::Json { .. });
        let constraint = OutputConstraint::new(spec, "test").start_after("</think>");
        let compiled = compile_with(&compiler, &constraint).unwrap();
        let output = if quoted { "\"yes\"" } else { "yes" };
        assert!(accepts(&compiled, &format!("so: no </thin or </think>{output}")));
        assert!(!accepts(&compiled, output));
        assert!(!accepts(&compiled, "</think>no"));
    }
}

#[test]
fn unenforceable_constraints_are_rejected() {
    let specs = [
        json_spec(json!({"type": "array", "uniqueItems": true})),
        json_spec(json!({"not": {"type": "string"}})),
        json_spec(json!({"type": "object", "x-guidance": {"lenient": true}, "uniqueItems": true})),
        json_spec(json!({"$ref": "http://127.0.0.1:1/schema"})),
        json_spec(json!({"$ref": "#/nowhere"})),
        json_spec(json!({"type": "text"})),
        json_spec(json!(false)),
        GrammarSpec::Regex("(".to_owned()),
        GrammarSpec::Regex(r"(a)\1".to_owned()),
        GrammarSpec::Regex(r"(?=a)b".to_owned()),
        GrammarSpec::Lark("start: missing".to_owned()),
        GrammarSpec::Lark("start: \"a".to_owned()),
        GrammarSpec::Lark(String::new()),
    ];
    for spec in specs {
        let result = compile(spec.clone());
        assert!(matches!(result, Err(GrammarError::Invalid(_))), "{spec:?}: {result:?}");
    }
}

#[test]
fn whitespace_pattern_errors_differ_from_schema_errors() {
    let spaced = |schema: Value, regex: &str| {
        compile(GrammarSpec::Json { schema, whitespace: JsonWhitespace::Pattern(regex.to_owned()) })
    };
    assert!(spaced(json!({}), "[ ]?").is_ok());
    for regex in ["(", "(?=a) ", &"(".repeat(200)] {
        let result = spaced(json!({}), regex);
        assert!(matches!(result, Err(GrammarError::InvalidSpaces(_))), "{regex}: {result:?}");
    }
    let result = spaced(json!({"not": {}}), " *");
    assert!(matches!(result, Err(GrammarError::Invalid(_))), "{result:?}");
}

#[test]
fn cache_evicts_lru_within_its_byte_limit() {
    let compiled = |text: &str, bytes: usize| {
        let mut compiled = compile(GrammarSpec::Regex(text.to_owned())).unwrap();
        compiled.bytes = bytes;
        compiled
    };
    let mut cache = GrammarCache::new(310);
    for name in ["a", "b", "c"] {
        cache.put(name.to_owned(), compiled(name, 100));
    }
    assert!(cache.get("a").is_some());
    cache.put("d".to_owned(), compiled("d", 100));
    assert!(cache.get("b").is_none(), "the least recently used entry is evicted");
    assert!(cache.get("a").is_some() && cache.get("c").is_some() && cache.get("d").is_some());
    assert_eq!(cache.usage(), (3, 303));
    cache.put("large".to_owned(), compiled("x", 400));
    assert_eq!(cache.usage(), (3, 303));
}
