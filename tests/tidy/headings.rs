//! Limits the prose below each heading of the pages in `docs/`.

use crate::source_tree::{SourceFile, files_with};

/// Maximum number of words below a heading, tables and code blocks not counted.
const WORDS_MAX: usize = 150;

/// Words below a heading of a page.
struct HeadingWords {
    heading: String,
    words: usize,
}

/// Returns the headings of a page with the numbers of words below them, tables and code blocks not counted.
fn heading_words(page: &str) -> Vec<HeadingWords> {
    let mut counts = vec![HeadingWords { heading: "before the first heading".into(), words: 0 }];
    let mut in_code = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code && line.starts_with('#') {
            let heading = line.trim_start_matches('#').trim().to_owned();
            counts.push(HeadingWords { heading, words: 0 });
        } else if !in_code && !line.starts_with('|') {
            counts.last_mut().unwrap().words += line.split_whitespace().count();
        }
    }
    counts
}

#[test]
fn sections_of_pages_are_short() {
    let is_page = |file: &SourceFile| {
        file.path.starts_with("docs/") && !file.path.starts_with("docs/lessons/")
    };
    let pages: Vec<SourceFile> = files_with(&["md"]).into_iter().filter(is_page).collect();
    assert!(pages.len() > 20, "{} pages", pages.len());
    let mut long = Vec::new();
    for page in &pages {
        let too_long = |found: &HeadingWords| found.words > WORDS_MAX;
        for HeadingWords { heading, words } in
            heading_words(&page.text).into_iter().filter(too_long)
        {
            long.push(format!("{}: {heading}: {words} words", page.path));
        }
    }
    assert!(
        long.is_empty(),
        "more than {WORDS_MAX} words:
{}",
        long.join(
            "
"
        )
    );
}

#[test]
fn tables_and_code_are_not_counted() {
    let page = "# A\none two\n| three | four |\n```sh\n# five\n```\n## B\nsix\n";
    let counts: Vec<usize> = heading_words(page).iter().map(|found| found.words).collect();
    assert_eq!(counts, [0, 2, 1]);
}
