//! Checks the vocabulary of the code: names of types and tests, and idioms in comments. The maximum values
//! may be lowered, but not raised.

use crate::source_tree::{SourceFile, files_with, rust_files};
use std::collections::BTreeMap;

/// Maximum percentage of type definitions whose name is a single word.
const ONE_WORD_PERCENT_MAX: f64 = 1.2;
/// Maximum percentage of type definitions whose name is also the name of another type.
const SHARED_NAME_PERCENT_MAX: f64 = 0.1;
/// Maximum number of idioms (`IDIOMS`) per thousand comment lines.
const IDIOMS_PER_THOUSAND_MAX: f64 = 0.2;
/// Maximum length of a test's name in characters.
const TEST_NAME_MAX: usize = 60;

/// Words that count as idioms in comments, because technical documentation does not use them in this sense.
const IDIOMS: &[&str] = &[
    "behind",
    "nobody",
    "so many",
    "told",
    "whoever",
    "beside",
    "under way",
    "hear",
    "in front of",
    "somebody",
    "likeliest",
    "sign of life",
    "stands",
    "news",
    "seat",
    "seats",
    "guess",
    "guesses",
    "guessed",
    "everybody",
    "anybody",
    "latents",
    "unturned",
];

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

fn percent(part: usize, all: usize) -> f64 {
    100.0 * part as f64 / all as f64
}

#[test]
fn type_names_have_two_words_and_are_unique() {
    let files = rust_files();
    let types = types(&files);
    let all: usize = types.values().map(Vec::len).sum();
    let count = |wanted: &dyn Fn(&str, &[&str]) -> bool| -> usize {
        types.iter().filter(|(name, at)| wanted(name, at)).map(|(_, at)| at.len()).sum()
    };
    let one_word = percent(count(&|name, _| words(name) == 1), all);
    let shared = percent(count(&|_, at| at.len() > 1), all);
    println!("{all} types: {one_word:.1} % have one word, {shared:.1} % share their name");
    assert!(one_word <= ONE_WORD_PERCENT_MAX, "{one_word:.1} % of types have one word");
    assert!(shared <= SHARED_NAME_PERCENT_MAX, "{shared:.1} % of types share their name");
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
fn comments_use_the_words_of_the_field() {
    let (mut lines, mut idioms) = (0, 0);
    for file in files_with(&["rs", "h", "hip", "cpp"]) {
        for line in file.text.lines() {
            let Some((_, comment)) = line.split_once("//") else { continue };
            lines += 1;
            let plain: String = comment
                .to_lowercase()
                .chars()
                .map(|c| if c.is_alphanumeric() { c } else { ' ' })
                .collect();
            let padded = format!(" {plain} ");
            idioms += IDIOMS
                .iter()
                .map(|idiom| padded.matches(&format!(" {idiom} ")).count())
                .sum::<usize>();
        }
    }
    let rate = 1_000.0 * idioms as f64 / f64::from(lines);
    println!("{idioms} idioms in {lines} lines of comments: {rate:.1} in a thousand");
    assert!(rate <= IDIOMS_PER_THOUSAND_MAX, "{rate:.1} idioms in a thousand lines of comments");
}

/// Whether a function has an anonymous tuple parameter. `signature`: text from the function's name to its
/// body.
fn has_tuple_parameter(signature: &str) -> bool {
    let Some((_, parameters)) = signature.split_once('(') else { return false };
    let parameters = parameters.rsplit_once("->").map_or(parameters, |(before, _)| before);
    [": (", ": &(", ": &mut ("].iter().any(|opening| {
        parameters
            .split(opening)
            .skip(1)
            .any(|tuple| tuple.split(')').next().is_some_and(|inside| inside.contains(',')))
    })
}

#[test]
fn parameters_have_names() {
    let mut found = Vec::new();
    for file in rust_files() {
        for part in file.text.split("fn ").skip(1) {
            let signature = part.split(['{', ';']).next().unwrap_or_default();
            if has_tuple_parameter(signature) {
                let name = signature.split(['(', '<']).next().unwrap_or_default();
                found.push(format!("{}: {name}", file.path));
            }
        }
    }
    println!("{} functions take a tuple", found.len());
    assert!(found.is_empty(), "{} functions take a tuple:\n  {}", found.len(), found.join("\n  "));
}

#[test]
fn words_and_definitions_are_counted() {
    assert_eq!([words("Batch"), words("KvCache"), words("SSEBody"), words("Eagle3")], [1, 2, 2, 1]);
    assert_eq!(defined_type("pub(super) struct PeerTable<S> {"), Some("PeerTable"));
    assert_eq!(defined_type("    type Item = u32;"), None);
    assert_eq!(defined_type("type EncodeFn = fn();"), Some("EncodeFn"));
    assert!(has_tuple_parameter("f(a: u32, b: (u32, u32)) -> u32 "));
    assert!(!has_tuple_parameter("f(a: u32) -> (u32, u32) "));
}
