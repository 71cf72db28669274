//! Tests of structural tags: accepted and rejected texts of each format, and errors.

use super::structural_tag_grammar;
use crate::tests::{accepts, compile_with, vocabulary};
use crate::{CompiledGrammar, GrammarCompiler, GrammarSpec, OutputConstraint};
use serde_json::{Value, json};

fn compiled(tag: &Value) -> CompiledGrammar {
    let grammar = structural_tag_grammar(tag).unwrap();
    let constraint = OutputConstraint::new(GrammarSpec::Lark(grammar.clone()), "test");
    compile_with(&GrammarCompiler::new(vocabulary()).unwrap(), &constraint)
        .unwrap_or_else(|error| panic!("{error}\n{grammar}"))
}

/// Checks which texts a structural tag accepts.
fn check(tag: &Value, accepted: &[&str], rejected: &[&str]) {
    let compiled = compiled(tag);
    for text in accepted {
        assert!(accepts(&compiled, text), "{text:?} is accepted by {tag}");
    }
    for text in rejected {
        assert!(!accepts(&compiled, text), "{text:?} is rejected by {tag}");
    }
}

fn tag_of(format: impl Into<Value>) -> Value {
    let format: Value = format.into();
    json!({"type": "structural_tag", "format": format})
}

fn function(name: &str, schema: &Value) -> Value {
    json!({"type": "tag", "begin": format!("<f={name}>"), "end": "</f>",
        "content": {"type": "json_schema", "json_schema": schema}})
}

#[test]
fn triggered_tags_constrain_the_text_after_a_trigger() {
    let integer = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let tags = json!([function("a", &integer), function("b", &json!({"type": "null"}))]);
    let format = |at_least_one: bool, stop_after_first: bool| {
        tag_of(json!({"type": "triggered_tags", "triggers": ["<f="], "tags": tags,
            "at_least_one": at_least_one, "stop_after_first": stop_after_first}))
    };
    let one = "<f=a>7</f>";
    check(
        &format(false, false),
        &["", "hi <", "x <f=a>7</f> y <f=b>null</f>", "<f=a>7</f><f=a>8</f>", "é\n</f>"],
        &["<f=", "<f=c>", "<f=a>null</f>", "x <f=a>7", "<f=a>7</f><f=x"],
    );
    check(
        &format(true, false),
        &[one, "<f=a>7</f> y", "<f=a>7</f><f=b>null</f>"],
        &["", "x", "x<f=a>7</f>"],
    );
    check(&format(false, true), &["", "text", "x<f=a>7</f>"], &["<f=a>7</f> ", "<f=a>77</f>"]);
    check(&format(true, true), &[one, "<f=b>null</f>"], &["", "x<f=a>7</f>", "<f=a>7</f>x"]);
}

#[test]
fn older_form_is_equal_to_triggered_tags() {
    let structure = json!({"begin": "<f=a>", "schema": {"enum": [1, 2]}, "end": "</f>"});
    let tag = json!({"type": "structural_tag", "structures": [structure], "triggers": ["<f="]});
    check(&tag, &["", "a <f=a>1</f> b <f=a>2</f>"], &["<f=b>1</f>", "<f=a>3</f>", "<f=a>1"]);
}

#[test]
fn free_text_within_a_tag_ends_at_its_end() {
    let any = json!({"type": "any_text"});
    let think = json!({"type": "tag", "begin": "<t>", "content": any, "end": ["</t>", "</u>"]});
    let answer = json!({"type": "json_schema", "json_schema": {"enum": ["x"]}});
    check(
        &tag_of(json!({"type": "sequence", "elements": [think, answer]})),
        &["<t></t>\"x\"", "<t>a < </ b</u>\"x\""],
        &["", "<t>a", "<t>a</t>b</t>\"x\"", "<t>a</t>\"y\""],
    );
    let excluding = json!({"type": "any_text", "excludes": ["bad"]});
    check(&tag_of(excluding.clone()), &["", "ba d"], &["a bad b"]);
    let within = json!({"type": "tag", "begin": "(", "content": excluding, "end": ")"});
    check(&tag_of(within), &["()", "(ba d)"], &["(bad)", "(a", "(a)b"]);
    let ended = json!([{"type": "any_text"}, {"type": "const_string", "value": "END"}]);
    check(
        &tag_of(json!({"type": "sequence", "elements": ended})),
        &["END", "a EN END"],
        &["a", "aENDb"],
    );
    let dispatch =
        json!({"type": "triggered_tags", "triggers": ["<f="], "tags": [function("a", &json!({}))]});
    let outer = json!({"type": "tag", "begin": "[", "content": dispatch, "end": "]"});
    check(&tag_of(outer), &["[]", "[a <f=a>[1]</f> b]"], &["[a", "[]b", "[<f=a>1</f>"]);
}

#[test]
fn compositions_accept_their_parts_in_order() {
    let text = |value: &str| json!({"type": "const_string", "value": value});
    let regex = |pattern: &str| json!({"type": "regex", "pattern": pattern});
    let of = |kind: &str, elements: Value| json!({"type": kind, "elements": elements});
    let repeated = |kind: &str| tag_of(json!({"type": kind, "content": text("ab")}));
    check(&tag_of(of("or", json!([text("yes"), text("no/")]))), &["yes", "no/"], &["", "yesno/"]);
    check(
        &tag_of(of("sequence", json!([regex("[a-z/]+"), text("x1"), regex("[0-9]*")]))),
        &["ax1", "xxx1", "a/x123"],
        &["x1", "a", "ax"],
    );
    check(&repeated("optional"), &["", "ab"], &["abab"]);
    check(&repeated("star"), &["", "ab", "abab"], &["a"]);
    check(&repeated("plus"), &["ab", "abab"], &["", "aba"]);
    let item = json!({"type": "tag", "begin": "<", "content": regex("[a-z]*"), "end": ">"});
    let list = |at_least_one: bool| {
        tag_of(json!({"type": "tags_with_separator", "tags": [item], "separator": ", ",
            "at_least_one": at_least_one}))
    };
    check(&list(false), &["", "<a>", "<a>, <>"], &["<a>,", "<a><b>", "x"]);
    check(&list(true), &["<a>"], &[""]);
    let rules = json!([["call:", {"type": "json_schema", "json_schema": {"enum": [1]}}]]);
    check(
        &tag_of(json!({"type": "dispatch", "rules": rules})),
        &["", "a call:1 b call:1"],
        &["call:", "call:2"],
    );
}

#[test]
fn invalid_and_unsupported_formats_are_named() {
    let text = json!({"type": "const_string", "value": "a"});
    let any = json!({"type": "any_text"});
    let triggered =
        |tags: Value| json!({"type": "triggered_tags", "triggers": ["<a", "<ab"], "tags": tags});
    let tag = |begin: &str| json!({"begin": begin, "content": text, "end": ">"});
    let mut deep = any.clone();
    for _ in 0..40 {
        deep = json!({"type": "or", "elements": [deep]});
    }
    for (tag, path) in [
        (json!([]), ""),
        (json!({"type": "x", "format": text}), "type"),
        (json!({"triggers": ["a"]}), "structures"),
        (
            json!({"structures": [{"begin": "b", "end": "c"}], "triggers": ["b"]}),
            "structures[0].schema",
        ),
        (tag_of(json!({"type": "grammar", "grammar": "root ::= x"})), "format.grammar"),
        (tag_of(json!({"type": "any_tokens", "exclude_tokens": [1]})), "format.type"),
        (
            tag_of(json!({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"})),
            "format.style",
        ),
        (tag_of(json!({"type": "json_schema", "json_schema": 1})), "format.json_schema"),
        (tag_of(json!({"type": "any_text", "max_tokens": 3})), "format.max_tokens"),
        (tag_of(json!({"type": "const_string", "value": "a", "x": 1})), "format.x"),
        (
            tag_of(
                json!({"type": "json_schema", "json_schema": {"x-guidance": {"lenient": true}}}),
            ),
            "format.json_schema.x-guidance",
        ),
        (
            tag_of(json!({"type": "sequence", "elements": [
                {"type": "tag", "begin": "<", "content": any, "end": []},
                {"type": "regex", "pattern": "a"}]})),
            "format.elements[0]",
        ),
        (
            tag_of(
                json!({"type": "sequence", "elements": [any, {"type": "regex", "pattern": "a"}]}),
            ),
            "format.elements[0]",
        ),
        (tag_of(json!({"type": "star", "content": any})), "format.content"),
        (tag_of(json!({"type": "or", "elements": []})), "format.elements"),
        (tag_of(triggered(json!([tag("<b")]))), "format.tags[0].begin"),
        (tag_of(triggered(json!([tag("<abc")]))), "format.tags[0].begin"),
        (
            tag_of(triggered(json!([tag("<ac"), {"begin": {"type": "token", "token": 1}}]))),
            "format.tags[1].begin",
        ),
    ] {
        assert_eq!(structural_tag_grammar(&tag).unwrap_err().path, path, "{tag}");
    }
    assert!(structural_tag_grammar(&tag_of(deep)).unwrap_err().message.contains("depth"));
}

/// Returns a dispatch with `count` patterns of `bytes` bytes; each pattern must be followed by `1`.
fn dispatch_of(count: usize, bytes: usize) -> Value {
    let one = json!({"type": "const_string", "value": "1"});
    let rule = |at: usize| json!([format!("<{at:04}{}>", "x".repeat(bytes - 6)), one]);
    tag_of(json!({"type": "dispatch", "rules": (0..count).map(rule).collect::<Vec<_>>()}))
}

#[test]
fn grammar_of_many_triggers_grows_linearly() {
    let grammar_bytes = |count| structural_tag_grammar(&dispatch_of(count, 30)).unwrap().len();
    assert!(grammar_bytes(300) < 11 * grammar_bytes(30));
    check(
        &dispatch_of(30, 7),
        &["", "a <0003x b", "a <0003x>1 <0029x>1 b", "<0000x>1"],
        &["<0003x>", "<0003x>2", "a <0003x>1 <0029x> b"],
    );
}

#[test]
fn long_structural_tags_are_rejected() {
    for tag in [dispatch_of(512, 8 << 10), dispatch_of(512, 90)] {
        let error = structural_tag_grammar(&tag).unwrap_err();
        assert!(error.message.contains("bytes"), "{error}");
    }
    // The end texts are repeated in each alternative.
    let ends = vec!["x".repeat(1_000); 30];
    let any = json!({"type": "any_text"});
    let content = json!({"type": "or", "elements": vec![any; 500]});
    let tag = json!({"type": "tag", "begin": "<", "content": content, "end": ends});
    assert!(structural_tag_grammar(&tag_of(tag)).unwrap_err().path.contains("elements["));
}

#[test]
fn repetitions_are_counted() {
    let repeat = |min: i64, max: i64, content: Value| {
        tag_of(json!({"type": "repeat", "min": min, "max": max, "content": content}))
    };
    let text = json!({"type": "const_string", "value": "ab"});
    check(&repeat(1, 2, text.clone()), &["ab", "abab"], &["", "a", "ababab"]);
    check(&repeat(2, -1, text.clone()), &["abab", "ababab"], &["", "ab"]);
    let number = json!({"type": "json_schema", "json_schema": {"enum": [1, 22]}});
    check(&repeat(0, 2, number), &["", "1", "221"], &["2", "1221"]);
    for (min, max, path) in [(2, 1, "max"), (-1, 1, "min"), (0, 5_000, "max"), (-2, -1, "min")] {
        let error = structural_tag_grammar(&repeat(min, max, text.clone())).unwrap_err();
        assert_eq!(error.path, format!("format.{path}"));
    }
}

#[test]
fn grammars_are_parts_of_structural_tags() {
    let grammar = |text: &str| json!({"type": "grammar", "grammar": text});
    let around = |text: &str| {
        let tag = json!({"type": "tag", "begin": "<", "content": grammar(text), "end": ">"});
        let end = json!({"type": "const_string", "value": "."});
        tag_of(json!({"type": "sequence", "elements": [tag, end]}))
    };
    let lark = "start: \"{\" sum \"}\"\nsum: /[0-9]/ (\"+\" sum)?";
    for text in ["root ::= \"{\" sum \"}\"\nsum ::= [0-9] (\"+\" sum)?", lark] {
        check(&around(text), &["<{1}>.", "<{1+2}>."], &["<{1}>", "<{}>.", "<{1+}>.", "{1}."]);
    }
    check(&around("root ::= [^>]*"), &["<>.", "<a.>."], &["<>", "<a>>."]);
    let error = structural_tag_grammar(&around("root ::= x")).unwrap_err();
    assert_eq!(error.path, "format.elements[0].content.grammar");
    assert!(error.message.contains("x is not defined"), "{}", error.message);
}

#[test]
fn tokens_are_parts_of_structural_tags() {
    let token = |id: u64| json!({"type": "token", "token": id});
    let text = json!({"type": "any_text"});
    let last = json!({"type": "const_string", "value": "!"});
    let elements = [token(u64::from(b'<')), text, token(u64::from(b'|')), last];
    check(
        &tag_of(json!({"type": "sequence", "elements": elements})),
        &["<|!", "<a b|!"],
        &["", "|!", "<a!", "<a|"],
    );
    for invalid in [json!("<think>"), json!(-1), json!(1.5), json!(null)] {
        let error = structural_tag_grammar(&tag_of(json!({"type": "token", "token": invalid})));
        assert_eq!(error.unwrap_err().path, "format.token");
    }
}
