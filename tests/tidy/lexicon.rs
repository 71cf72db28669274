//! Checks the names of types and tests. The maximum values may be lowered, but not raised.

use crate::source_tree::{SourceFile, rust_files};
use std::collections::BTreeMap;

/// Maximum number of type definitions whose name is a single word.
const ONE_WORD_MAX: usize = 14;
/// Maximum length of a test's name in characters.
const TEST_NAME_MAX: usize = 60;

/// Forbidden type names: single words that are not nouns.
const NO_NOUNS: &[&str] = &[
    "By",
    "Held",
    "Kept",
    "Told",
    "Made",
    "Sent",
    "Lost",
    "Gone",
    "Those",
    "Others",
    "Here",
    "Elsewhere",
];

/// Returns the name of the type that a line of code defines. Associated types are excluded, because traits
/// determine their names.
fn defined_type(line: &str) -> Option<&str> {
    let is_indented = line.starts_with(' ');
    let mut rest = line.trim_start();
    if let Some(public) = rest.strip_prefix("pub") {
        rest = public
            .strip_prefix('(')
            .map_or(public, |scope| scope.split_once(')').map_or(scope, |(_, rest)| rest));
        rest = rest.trim_start();
    }
    rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (keyword, rest) = rest.split_once(' ')?;
    let is_type = matches!(keyword, "struct" | "enum" | "trait" | "union")
        || keyword == "type" && !is_indented;
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (is_type && name.starts_with(|c: char| c.is_ascii_uppercase())).then_some(name)
}

/// Returns the number of words in a type name, such as 2 for `KvCache` and `SSEBody`.
fn words(name: &str) -> usize {
    let chars: Vec<char> = name.chars().collect();
    let begins = |i: usize| {
        let upper = chars[i].is_ascii_uppercase();
        let after_lower = i > 0 && !chars[i - 1].is_ascii_uppercase();
        let before_lower = chars.get(i + 1).is_some_and(char::is_ascii_lowercase);
        upper && (i == 0 || after_lower || before_lower)
    };
    (0..chars.len()).filter(|&i| begins(i)).count()
}

/// Returns the names of all defined types, each with the paths of the files that define it.
fn types(files: &[SourceFile]) -> BTreeMap<&str, Vec<&str>> {
    let mut types = BTreeMap::<_, Vec<_>>::new();
    for file in files {
        for name in file.text.lines().filter_map(defined_type) {
            types.entry(name).or_default().push(file.path.as_str());
        }
    }
    types
}

#[test]
fn type_names_have_two_words_and_are_unique() {
    let files = rust_files();
    let types = types(&files);
    let all: usize = types.values().map(Vec::len).sum();
    let count = |wanted: &dyn Fn(&str, &[&str]) -> bool| -> usize {
        types.iter().filter(|(name, at)| wanted(name, at)).map(|(_, at)| at.len()).sum()
    };
    let one_word = count(&|name, _| words(name) == 1);
    let shared = count(&|_, at| at.len() > 1);
    println!("{all} types: {one_word} have one word, {shared} share their name");
    assert!(one_word <= ONE_WORD_MAX, "{one_word} types have one word, at most {ONE_WORD_MAX}");
    assert_eq!(shared, 0, "types that share their name");
    let is_participle = |name: &str| {
        words(name) == 1
            && (name.ends_with("ed") || name.ends_with("ing") || NO_NOUNS.contains(&name))
    };
    let participles: Vec<_> = types.keys().filter(|name| is_participle(name)).collect();
    assert!(participles.is_empty(), "names that are no nouns: {participles:?}");
}

#[test]
fn test_names_are_short() {
    let files = rust_files();
    let mut long = Vec::new();
    for file in &files {
        for part in file.text.split("#[test]").skip(1) {
            let name = part.split_once("fn ").and_then(|(_, rest)| rest.split_once('('));
            let name = name.map(|(name, _)| name).unwrap_or_default();
            if name.len() > TEST_NAME_MAX && !name.contains(char::is_whitespace) {
                long.push(format!("{}: {name}", file.path));
            }
        }
    }
    assert!(long.is_empty(), "names above {TEST_NAME_MAX} characters:\n  {}", long.join("\n  "));
}

#[test]
fn words_and_definitions_are_counted() {
    assert_eq!([words("Batch"), words("KvCache"), words("SSEBody"), words("Eagle3")], [1, 2, 2, 1]);
    assert_eq!(defined_type("pub(super) struct PeerTable<S> {"), Some("PeerTable"));
    assert_eq!(defined_type("    type Item = u32;"), None);
    assert_eq!(defined_type("type EncodeFn = fn();"), Some("EncodeFn"));
}
