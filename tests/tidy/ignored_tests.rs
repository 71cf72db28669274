//! Checks that each ignored test is run by a `just` recipe or by another test.

use crate::source_tree::{read_file, rust_files};

/// A test with the attribute `#[ignore]`.
#[derive(Debug)]
struct IgnoredTest {
    name: String,
    reason: String,
}

/// If the reason in an `#[ignore]` attribute contains one of these phrases, another test or program runs the
/// ignored test.
const RUN_BY_OTHER_TESTS: &[&str] = &["run by", "runs it", "started by", "starts it"];

/// Returns the ignored tests in the text of a source file.
fn ignored_tests(text: &str) -> Vec<IgnoredTest> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(rest) = line.trim().strip_prefix("#[ignore") else { continue };
        let reason = rest.trim_start_matches(" = ").trim_end_matches(']').trim_matches('"');
        let name = lines.by_ref().find_map(|line| line.trim().strip_prefix("fn "));
        let name = name.and_then(|rest| rest.split('(').next()).unwrap_or_default();
        found.push(IgnoredTest { name: name.to_owned(), reason: reason.to_owned() });
    }
    found
}

/// Whether a `just` recipe, another test or a program runs an ignored test.
fn has_runner(test: &IgnoredTest, justfile: &str) -> bool {
    let named =
        test.reason.split("`just ").skip(1).filter_map(|rest| rest.split([' ', '`']).next());
    let is_recipe = |recipe: &str| {
        let starts = |line: &str| line.split([' ', ':']).next() == Some(recipe);
        justfile.lines().any(starts)
    };
    let in_recipe = |line: &str| {
        line.starts_with(' ')
            && line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == test.name)
    };
    named.into_iter().any(is_recipe)
        || justfile.lines().any(in_recipe)
        || RUN_BY_OTHER_TESTS.iter().any(|words| test.reason.contains(words))
}

#[test]
fn every_ignored_test_has_a_recipe_or_a_runner() {
    let justfile = read_file("justfile");
    let mut count = 0;
    let mut without = Vec::new();
    for file in rust_files().iter().filter(|file| file.path != "tests/tidy/ignored_tests.rs") {
        for test in ignored_tests(&file.text).into_iter().filter(|test| test.name != "a") {
            count += 1;
            if !has_runner(&test, &justfile) {
                without.push(format!("{}: {} ({})", file.path, test.name, test.reason));
            }
        }
    }
    assert!(count > 40, "only {count} ignored tests are found");
    assert!(without.is_empty(), "ignored tests that nothing runs:\n{}", without.join("\n"));
}

#[test]
fn ignored_test_without_recipe_is_detected() {
    let text = "#[test]\n#[ignore = \"measures\"]\nfn lonely() {}\n\n#[test]\n#[ignore = \"minutes: `just long N`\"]\nfn b() {}";
    let tests = ignored_tests(text);
    let ways =
        |justfile: &str| tests.iter().map(|test| has_runner(test, justfile)).collect::<Vec<_>>();
    assert_eq!(ways("long N=\"1\":\n    x"), [false, true]);
    assert_eq!(ways("# lonely\nall:\n    cargo test lonely"), [true, false]);
    assert_eq!(ways("longer:\n    cargo test lonely_not"), [false, false]);
}
