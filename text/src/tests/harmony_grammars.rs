//! Grammars of the harmony format: constraints after the reasoning, forced calls, and free messages.

use super::harmony::tokenizer;
use super::output_parsers::tools;
use super::{byte_level, load};
use crate::{HarmonyConstraintScope, ReasoningStart, Tokenizer, ToolCallSyntax, harmony_preamble};
use grammar::{GrammarCompiler, GrammarSpec, JsonWhitespace, OutputConstraint};
use serde_json::json;
use std::sync::Arc;

/// Whether the grammar of `constraint` accepts the whole `output`.
fn accepts(tokenizer: &Arc<Tokenizer>, constraint: &OutputConstraint, output: &str) -> bool {
    let compiler = GrammarCompiler::new(tokenizer.grammar_vocabulary()).unwrap();
    let report = compiler.dry_run(constraint).unwrap();
    let compiled = compiler.compile(constraint, report).unwrap();
    let mut session = compiled.session_seed(false).session();
    for token in tokenizer.encode(output, false).unwrap() {
        let is_allowed = |mask: Vec<u32>| mask[token as usize / 32] >> (token % 32) & 1 == 1;
        if !session.mask().is_some_and(is_allowed) {
            return false;
        }
        session.advance(&[token]);
    }
    session.may_end()
}

fn plain_tokenizer() -> Arc<Tokenizer> {
    Arc::new(load(&byte_level()).1)
}

/// Returns the constraint to the object `{"n": 1}` after the preamble of an output.
fn constraint_after(
    tokenizer: &Arc<Tokenizer>,
    start: ReasoningStart,
    scope: HarmonyConstraintScope,
) -> OutputConstraint {
    let schema = json!({"type": "object", "properties": {"n": {"const": 1}}});
    let spec = GrammarSpec::Json { schema, whitespace: JsonWhitespace::Any };
    let constraint = OutputConstraint::new(spec, "test");
    match harmony_preamble(start, scope, tokenizer) {
        Some(head) => constraint.start_after(head),
        None => constraint,
    }
}

#[test]
fn constraints_start_after_reasoning_and_header() {
    const ANALYSIS: &str = "<|channel|>analysis<|message|>a {\"b<|end|><|start|>assistant";
    let json = "{\"n\": 1}";
    for tokenizer in [tokenizer(), plain_tokenizer()] {
        let constraint = |start, scope| constraint_after(&tokenizer, start, scope);
        let answer = HarmonyConstraintScope::AnswerText;
        let at_start = constraint(ReasoningStart::AtMarker, answer);
        for (output, is_accepted) in [
            (format!("<|channel|>final<|message|>{json}"), true),
            (format!("{ANALYSIS}<|channel|>final<|message|>{json}"), true),
            (format!("{ANALYSIS}<|channel|>final <|constrain|>json<|message|>{json}"), true),
            (format!("{ANALYSIS}{ANALYSIS}<|channel|>final<|message|>{json}"), false),
            (format!("{ANALYSIS}<|channel|>final<|message|>no"), false),
            (format!("{ANALYSIS}<|channel|>commentary<|message|>{json}"), false),
            (json.to_owned(), false),
        ] {
            assert_eq!(accepts(&tokenizer, &at_start, &output), is_accepted, "{output}");
        }
        let inside = constraint(ReasoningStart::Inside, answer);
        let rest = format!("a<|end|><|start|>assistant<|channel|>final<|message|>{json}");
        assert!(accepts(&tokenizer, &inside, &rest) && !accepts(&tokenizer, &inside, json));
        let after = constraint(ReasoningStart::After, answer);
        assert!(accepts(&tokenizer, &after, json) && after.start_after.is_none());
        let messages = constraint(ReasoningStart::AtMarker, HarmonyConstraintScope::Messages);
        assert!(accepts(&tokenizer, &messages, json));
        assert!(accepts(&tokenizer, &messages, &format!("{ANALYSIS}{json}")));
    }
}

#[test]
fn call_grammars_accept_the_forms_of_the_model() {
    let forced = |multiple, tokenizer: &Tokenizer| {
        let grammar = ToolCallSyntax::HARMONY.grammar(tools().iter(), multiple, tokenizer).unwrap();
        let head =
            harmony_preamble(ReasoningStart::AtMarker, HarmonyConstraintScope::Messages, tokenizer);
        OutputConstraint::new(GrammarSpec::Lark(grammar), "tools").start_after(head.unwrap())
    };
    for tokenizer in [tokenizer(), plain_tokenizer()] {
        let constraint = forced(true, &tokenizer);
        for header in [
            "<|channel|>commentary to=functions.time <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.time json<|message|>",
            " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
            " to=functions.weather<|channel|>commentary json<|message|>",
        ] {
            let call = format!("{header}{{\"days\": 2}}");
            assert!(accepts(&tokenizer, &constraint, &call), "{call}");
            let reasoned =
                format!("<|channel|>analysis<|message|>a<|end|><|start|>assistant{call}");
            assert!(accepts(&tokenizer, &constraint, &reasoned), "{reasoned}");
        }
        for output in [
            "<|channel|>final<|message|>a",
            "<|channel|>commentary to=functions.x json<|message|>{}",
            "<|channel|>commentary to=functions.time json<|message|>[]",
        ] {
            assert!(!accepts(&tokenizer, &constraint, output), "{output}");
        }
        let free = ToolCallSyntax::HARMONY.free_grammar(tools().iter(), true, &tokenizer).unwrap();
        let free = OutputConstraint::new(GrammarSpec::Lark(free), "tools");
        let preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant";
        let call = " to=functions.time<|channel|>commentary json<|message|>{}";
        for (output, is_accepted) in [
            ("<|channel|>final<|message|>a".to_owned(), true),
            (format!("{preamble}<|channel|>final<|message|>a"), true),
            (format!("{preamble}{call}"), true),
            (call.to_owned(), true),
            (preamble.to_owned(), false),
            ("a".to_owned(), false),
        ] {
            assert_eq!(accepts(&tokenizer, &free, &output), is_accepted, "{output}");
        }
    }
}
