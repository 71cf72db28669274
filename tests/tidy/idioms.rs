//! Counts idioms in comments, error messages and pages.

use crate::source_tree::{SourceFile, files_with};

/// Words that count as idioms, because technical documentation does not use them in this sense.
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
    "knows",
];

/// Returns the prose of a file with line numbers: comments of sources, error messages, and pages without code
/// blocks. Help texts of flags are doc comments. Code spans are removed.
fn prose(file: &SourceFile) -> Vec<(usize, String)> {
    let mut in_code_block = false;
    let extension = file.path.rsplit('.').next().unwrap_or_default();
    let mut prose_of = |line: &str| match extension {
        "rs" | "h" | "hip" | "cpp" => {
            let comment = line.split_once("//").map(|(_, comment)| comment.to_owned());
            comment.or_else(|| line.contains("#[error(\"").then(|| line.to_owned()))
        }
        "md" => {
            let is_fence = line.trim_start().starts_with("```");
            in_code_block ^= is_fence;
            (!is_fence && !in_code_block).then(|| line.to_owned())
        }
        _ => match line.trim_start().strip_prefix('#') {
            Some(comment) => Some(comment.to_owned()),
            None => line.split_once(" # ").map(|(_, comment)| comment.to_owned()),
        },
    };
    let lines = file.text.lines().enumerate();
    let found = lines.filter_map(|(i, line)| Some((i + 1, without_code_spans(&prose_of(line)?))));
    found.filter(|(_, text)| !text.is_empty()).collect()
}

fn without_code_spans(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// Returns the number of idioms in `text`.
fn idioms(text: &str) -> usize {
    let plain = |c: char| if c.is_alphanumeric() { c } else { ' ' };
    let padded = format!(" {} ", text.to_lowercase().chars().map(plain).collect::<String>());
    IDIOMS.iter().map(|idiom| padded.matches(&format!(" {idiom} ")).count()).sum()
}

#[test]
fn prose_uses_the_words_of_the_field() {
    let (mut lines, mut count, mut places) = (0, 0, Vec::new());
    for file in files_with(&["rs", "h", "hip", "cpp", "md", "sh", "py", "yaml", "toml"]) {
        for (line, text) in prose(&file) {
            lines += 1;
            let found = idioms(&text);
            if found > 0 {
                count += found;
                places.push(format!("{}:{line}: {}", file.path, text.trim()));
            }
        }
    }
    println!("{count} idioms in {lines} lines of prose");
    let places = places.join("\n  ");
    assert_eq!(count, 0, "idioms:\n  {places}");
}

#[test]
fn idioms_are_found_in_each_kind_of_prose() {
    let count = |path: &str, text: &str| {
        let file = SourceFile { path: path.to_owned(), text: text.to_owned() };
        prose(&file).iter().map(|(_, text)| idioms(text)).sum::<usize>()
    };
    let slashes = "//"; // The text below must not be a comment of this file.
    assert_eq!(count("a.rs", &format!("let told = 1; {slashes} Nobody is told.\n")), 2);
    assert_eq!(count("a.rs", "#[error(\"{0} is behind\")]\n"), 1);
    assert_eq!(count("a.md", "`told` stands\n```sh\necho told\n```\nis told\n"), 2);
    assert_eq!(count("a.sh", "told=1 # is told\n# a node knows\n"), 2);
}
