//! Fuzz target: grammars of requests, compiled as the server's grammar worker does to check them (dry run).
//! The first byte selects the kind of grammar.

use grammar::{
    GrammarCompiler, GrammarSpec, GrammarVocabulary, JsonWhitespace, OutputConstraint,
    TEXT_BYTES_MAX, ebnf_to_lark, lark_pattern,
};
use protocol::Token;
use std::cell::OnceCell;
use std::sync::Arc;

/// A grammar compiler for a vocabulary with one token per byte and one end-of-sequence token.
fn compiler_of_bytes() -> GrammarCompiler {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    let vocabulary = GrammarVocabulary { tokens, special: vec![256], end_ids: vec![256], encode };
    GrammarCompiler::new(vocabulary).unwrap()
}

pub(crate) fn run(data: &[u8]) {
    thread_local! {
        static COMPILER: OnceCell<GrammarCompiler> = const { OnceCell::new() };
    }
    let Some((form, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    if text.len() > TEXT_BYTES_MAX {
        return;
    }
    let form = match form {
        0xfe => match ebnf_to_lark(text) {
            Ok(lark) => GrammarSpec::Lark(lark),
            Err(_) => return,
        },
        0xff => match lark_pattern(text) {
            Some(pattern) => GrammarSpec::Regex(pattern),
            None => return,
        },
        form if form % 4 == 0 => match serde_json::from_str(text) {
            Ok(schema) => GrammarSpec::Json { schema, whitespace: JsonWhitespace::Any },
            Err(_) => return,
        },
        form if form % 4 == 1 => GrammarSpec::Regex(text.to_owned()),
        form if form % 4 == 2 => GrammarSpec::Lark(text.to_owned()),
        _ => GrammarSpec::Choice(text.lines().map(str::to_owned).collect()),
    };
    // The compilation has no time limit here; the server kills a worker process that takes too long. Both in
    // the server and here, a panic of the grammar library is converted to a validation error.
    COMPILER.with(|compiler| {
        let compiler = compiler.get_or_init(compiler_of_bytes);
        let _ = compiler.dry_run(&OutputConstraint::new(form, "x"));
    });
}
