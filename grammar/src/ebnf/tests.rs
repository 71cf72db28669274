//! Tests of EBNF grammars.

use super::{ebnf_to_lark, is_ebnf};
use crate::tests::{accepts, compile_with, vocabulary};
use crate::{CompiledGrammar, GrammarCompiler, GrammarSpec, OutputConstraint};

fn compiled(text: &str) -> CompiledGrammar {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let lark = ebnf_to_lark(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let constraint = OutputConstraint::new(GrammarSpec::Lark(lark.clone()), "grammar");
    compile_with(&compiler, &constraint).unwrap_or_else(|error| panic!("{error}: {lark}"))
}

/// Checks that the grammar `text` accepts the texts `good` and rejects the texts `bad`.
fn check_texts(text: &str, good: &[&str], bad: &[&str]) {
    assert!(is_ebnf(text));
    let compiled = compiled(text);
    for good in good {
        assert!(accepts(&compiled, good), "{good:?} of {text}");
    }
    for bad in bad {
        assert!(!accepts(&compiled, bad), "{bad:?} of {text}");
    }
}

#[test]
fn grammars_accept_exactly_their_texts() {
    for (text, good, bad) in [
        (
            "root ::= select \" FROM \" table\nselect ::= \"SELECT \" column\n\
             column ::= \"col_1 \" | \"col_2 \"\ntable ::= \"table_1\" | \"table_2\"",
            &["SELECT col_1  FROM table_2"][..],
            &["SELECT col_3  FROM table_1", "SELECT col_1 "][..],
        ),
        ("root ::= x \"b\"\nx ::= \"a\" | \"ab\"", &["ab", "abb"], &["a", "abbb"]),
        ("root ::= \"a\"+ \"a\" [^a-y\\n]?", &["aa", "aaaz", "aaé"], &["a", "aay", "aa\n"]),
        (
            "# Sums\nroot ::= term (\"+\" term)* # more\nterm ::= [0-9]+ | \"(\" root\n  \")\"\n",
            &["1", "12+3", "(1+(2+34))+5"],
            &["", "1+", "(1", "()"],
        ),
        (
            "root ::= (\"x\" | ) item{2,3} . \"\\u00e9\\x21\\\"\"\nitem::=\"-\" [\\]\\-a]",
            &["---]x\u{e9}!\"", "x-a--?é!\"", "-]-]-]\né!\""],
            &["-a-aé!\"", "-b-b?é!\"", "-a-a-a-a?é!\""],
        ),
        ("root-1 ::= \"b\"\nroot ::= \"a\" root-1{0} root-1{1,}", &["ab", "abbb"], &["a", "aab"]),
        ("root ::= \"<\" (root | \"\") \">\"", &["<>", "<<>>"], &["<", "<>>"]),
    ] {
        check_texts(text, good, bad);
    }
}

#[test]
fn space_rules_of_recursive_grammars_may_be_empty() {
    let json = compiled(
        "root ::= object\nobject ::= \"{\" ws (member (\",\" ws member)*)? \"}\" ws\n\
         member ::= string \":\" ws value\nvalue ::= object | string | number\n\
         string ::= \"\\\"\" ([^\"\\\\] | \"\\\\\" [\"\\\\n])* \"\\\"\" ws\n\
         number ::= \"-\"? [0-9]+ ws\nws ::= [ \\t\\n]*",
    );
    for text in ["{}", "{ \"a\" : {\"b\":-12 ,\n\"c\\n\": \"d\"}}\n", "{\"\":\"\"}"] {
        assert!(accepts(&json, text), "{text}");
    }
    for text in ["{", "{\"a\"}", "{\"a\":-}", "{\"a\":\"\\x\"}", " {}"] {
        assert!(!accepts(&json, text), "{text}");
    }
}

#[test]
fn long_sequences_are_converted_in_linear_time() {
    let begin = std::time::Instant::now();
    let dots = format!("root ::= {}", ".".repeat(60_000));
    assert!(ebnf_to_lark(&dots).unwrap().len() > 60_000);
    // With quadratic time, the conversion would take minutes.
    assert!(begin.elapsed().as_secs() < 20);
}

#[test]
fn errors_name_what_is_wrong_and_the_line() {
    let nested = format!("root ::= {}\"a\"{}", "(".repeat(70), ")".repeat(70));
    let repeated = format!("root ::= \"a\"{}", "?".repeat(60_000));
    let counted = format!("root ::= [a]{}", "{1}".repeat(20_000));
    let rules = (0..600).map(|rule| format!("r{rule} ::= \"a\"\n")).collect::<Vec<_>>().concat();
    for (text, message, line) in [
        ("root ::= x", "the rule x is not defined", 1),
        ("x ::= \"a\"", "the rule root is missing", 1),
        ("root ::= \"a\"\nroot ::= \"b\"", "the rule root is defined twice", 2),
        ("root ::= \"a\n\"", "expected \" at the end of a string", 2),
        ("root ::= (\"a\"", "expected )", 1),
        ("root ::= \"a\")", "expected the name of a rule", 1),
        ("root ::= \"a\"{2,1}", "the second number is less than the first one", 1),
        ("root ::= \"a\"{5000}", "at most 4096 repetitions", 1),
        ("root ::= [b-a]", "the range of characters is empty", 1),
        ("root ::= []", "the class of characters is empty", 1),
        ("root ::= \"\\q\"", "unknown escape", 1),
        ("root ::= \"\\ud800\"", "unknown escape", 1),
        ("root ::= %x", "unexpected '%'", 1),
        ("root = \"a\"", "expected ::=", 1),
        (&nested, "more than 64 nested groups", 1),
        (&repeated, "more than 4 repetition operators of one part", 1),
        (&counted, "more than 4 repetition operators of one part", 1),
        (&rules, "more than 512 rules", 513),
    ] {
        let error = ebnf_to_lark(text).unwrap_err();
        assert_eq!((error.message.as_str(), error.line), (message, line), "{text}");
    }
}

#[test]
fn lark_is_not_ebnf() {
    for lark in ["start: \"a ::= b\"", "// a ::= b\nstart: /::=/", "", "::= \"a\""] {
        assert!(!is_ebnf(lark), "{lark}");
    }
}
