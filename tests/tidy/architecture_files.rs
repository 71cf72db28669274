//! Checks that few source files name an architecture: what differs between architectures is data in shared tables.

use crate::source_tree::{SourceFile, code_lines, rust_files};
use models::ModelArchitecture;

/// Maximum number of source files that name one architecture. Tests and generated pages are not counted.
const FILES_MAX: usize = 8;

/// Whether the code of a file names the architecture: by its string, or as a variant of `ModelArchitecture`.
fn names_architecture(file: &SourceFile, architecture: ModelArchitecture) -> bool {
    let variant = format!("{architecture:?}");
    let in_type = file.path.starts_with("models/src/config/architecture");
    let in_type = in_type || file.path == "models/src/support.rs";
    code_lines(file).any(|(_, line)| {
        let has = |prefix: &str| {
            line.split(prefix).skip(1).any(|rest| {
                let name = rest.split(|c: char| !c.is_alphanumeric()).next();
                name == Some(variant.as_str())
            })
        };
        has("ModelArchitecture::")
            || in_type && has("Self::")
            || line.contains(&format!("\"{}\"", architecture.name()))
    })
}

#[test]
fn few_source_files_name_an_architecture() {
    let files = rust_files();
    let is_test = |path: &str| path.contains("tests") || path.contains("/benches/");
    let sources: Vec<_> = files.iter().filter(|file| !is_test(&file.path)).collect();
    for architecture in ModelArchitecture::ALL {
        let found: Vec<_> = sources
            .iter()
            .filter(|file| names_architecture(file, architecture))
            .map(|file| file.path.as_str())
            .collect();
        assert!(found.len() >= 3, "{architecture}: only {found:?} are found");
        assert!(found.len() <= FILES_MAX, "{architecture}: {found:?}");
    }
}
