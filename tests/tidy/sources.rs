//! Checks for required and forbidden contents of source files.

use crate::source_tree::{SourceFile, code_lines, read_file, root, rust_files};

/// Panics if `hits` (the lines that violate `rule`) is not empty, with all of these lines.
fn forbid(rule: &str, hits: &[String]) {
    assert!(hits.is_empty(), "{rule}:\n  {}", hits.join("\n  "));
}

fn hits(files: &[SourceFile], wanted: impl Fn(&str, &str) -> bool) -> Vec<String> {
    let line =
        |file: &SourceFile, n: usize, code: &str| format!("{}:{n}: {}", file.path, code.trim());
    files
        .iter()
        .flat_map(|f| code_lines(f).map(move |(n, code)| (f, n, code)))
        .filter(|(f, _, code)| wanted(&f.path, code))
        .map(|(f, n, code)| line(f, n, code))
        .collect()
}

fn in_tests(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.contains("/benches/")
}

#[test]
fn every_file_has_a_module_doc() {
    let bare = rust_files().into_iter().filter(|f| !f.text.starts_with("//!")).map(|f| f.path);
    forbid("files without an opening `//!`", &bare.collect::<Vec<_>>());
}

#[test]
fn environment_is_read_in_config_only() {
    let reads = |path: &str, code: &str| {
        !in_tests(path)
            && !path.starts_with("src/config")
            && (code.contains("env::var") || code.contains("env::vars") || code.contains("getenv"))
    };
    forbid("environment variables are read in src/config only", &hits(&rust_files(), reads));
}

#[test]
fn no_static_holds_mutable_state() {
    let cells =
        ["Mutex", "RwLock", "Atomic", "OnceLock", "LazyLock", "OnceCell", "RefCell", "Cell<"];
    let global = |path: &str, code: &str| {
        let code = code.trim_start();
        !in_tests(path)
            && (code.starts_with("static ")
                || code.starts_with("pub static ")
                || code.starts_with("pub(crate) static ")
                || code.starts_with("thread_local!"))
            && (code.starts_with("thread_local!") || cells.iter().any(|c| code.contains(c)))
    };
    forbid("state belongs to an owner, not to a static", &hits(&rust_files(), global));
}

#[test]
fn only_device_edge_crates_have_unsafe_code() {
    for name in [
        "protocol",
        "kvcache",
        "scheduler",
        "models",
        "ops",
        "executor",
        "grammar",
        "text",
        "metrics",
        "engine",
        "server",
        ".",
    ] {
        let lib = read_file(&format!("{name}/src/lib.rs"));
        assert!(lib.contains("#![forbid(unsafe_code)]"), "{name} must forbid unsafe code");
    }
    assert!(read_file("src/main.rs").contains("#![forbid(unsafe_code)]"));
}

#[test]
fn scheduling_crates_read_no_clock() {
    let clock = |path: &str, code: &str| {
        let deciding = ["protocol/src", "kvcache/src", "scheduler/src"];
        deciding.iter().any(|d| path.starts_with(d))
            && (code.contains("Instant::now") || code.contains("SystemTime"))
    };
    forbid("the scheduler gets the time as an argument", &hits(&rust_files(), clock));
}

/// Timeouts, waits and ordering must use a monotonic clock. Only times that are displayed may use the wall
/// clock.
#[test]
fn wall_clock_is_read_for_display_only() {
    let shown = [
        "server/src/loads.rs",
        "server/src/request_spans.rs",
        "server/src/openai/endpoint.rs",
        "text/src/template/engine.rs",
        "text/src/strftime.rs",
        "metrics/src/process.rs",
        "metrics/src/unsupported_features.rs",
        "metrics/src/kv_events/feed.rs",
        "executor/src/trace/session.rs",
    ];
    let reads = |path: &str, code: &str| {
        !in_tests(path)
            && !path.starts_with("kernels/emu")
            && !shown.contains(&path)
            && (code.contains("SystemTime") || code.contains("UNIX_EPOCH"))
    };
    forbid("a jump of the wall clock must change no decision", &hits(&rust_files(), reads));
}

#[test]
fn release_builds_keep_checks() {
    let manifest: toml::Table = read_file("Cargo.toml").parse().unwrap();
    let release = &manifest["profile"]["release"];
    assert_eq!(release["overflow-checks"].as_bool(), Some(true));
    let packages = release["package"].as_table().unwrap().iter();
    let unchecked = packages.filter(|(_, settings)| settings.get("overflow-checks").is_some());
    let without: Vec<&String> = unchecked.map(|(name, _)| name).collect();
    assert_eq!(without, ["kernels"], "the one whose loops are checked at their edge");
    // `debug_assert` is forbidden in scheduling code and in parsers of requests, model folders and network
    // messages, because release builds do not check it.
    let reads = [
        "protocol/src",
        "kvcache/src",
        "scheduler/src",
        "src/",
        "grammar/src",
        "text/src",
        "metrics/src",
        "engine/src",
        "server/src",
        "models/src/weights",
    ];
    let vanishes = |path: &str, code: &str| {
        reads.iter().any(|part| path.starts_with(part))
            && path != "src/config/tests.rs"
            && path != "src/doctor/mod.rs" // It reports how the binary was built.
            && code.contains("debug_assert")
    };
    forbid("a check that a release build leaves out", &hits(&rust_files(), vanishes));
}

#[test]
fn front_respects_the_layering() {
    let front = ["src/", "grammar/src", "text/src", "metrics/src", "engine/src", "server/src"];
    let wrong = |path: &str, code: &str| {
        let names = |word: &str| code.contains(word);
        front.iter().any(|part| path.starts_with(part))
            && (names("kernels::")
                || names("ops::") && !names("std::ops::") && !names("core::ops::"))
    };
    forbid("the front reaches devices through the executor", &hits(&rust_files(), wrong));
}

/// Names of decisions about launches: predicates of fusion, the secondary stream, prefetch and the kind of device.
const LAUNCH_DECISIONS: &[&str] = &[
    ".fuses_",
    ".is_fused",
    ".packs_",
    ".has_fp8_tma_",
    ".supports(",
    "SharedExpertPlan",
    "LinearFusionPlan",
    "SecondaryStream",
    "secondary_stream",
    "stream_wait",
    "prefetch",
    ".gpu()",
    "on_gpu",
];

#[test]
fn models_decide_no_launches() {
    let decides = |path: &str, code: &str| {
        path.starts_with("models/src") && LAUNCH_DECISIONS.iter().any(|name| code.contains(name))
    };
    forbid("fusion, streams and prefetch are decided in ops", &hits(&rust_files(), decides));
}

#[test]
fn vague_file_names_are_rejected() {
    let vague = ["util", "utils", "common", "base", "misc", "manager", "core", "helper", "helpers"];
    let stem =
        |path: &str| path.rsplit('/').next().unwrap_or(path).trim_end_matches(".rs").to_owned();
    let named = rust_files().into_iter().map(|f| f.path).filter(|p| {
        vague.contains(&stem(p).as_str()) || p.split('/').any(|part| vague.contains(&part))
    });
    forbid("vague file names", &named.collect::<Vec<_>>());
}

#[test]
fn no_file_is_left_out_of_the_build() {
    let files = rust_files();
    let orphan = |file: &&SourceFile| {
        let path = &file.path;
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let stem = name.trim_end_matches(".rs");
        let root_file = ["lib", "main", "build"].contains(&stem)
            || path.contains("/benches/")
            || path.contains("/examples/")
            || path.starts_with("fuzz/fuzz_targets/")
            || path.starts_with("tests/support/")
            || dir.ends_with("/tests") && !path.contains("/src/")
            || files.iter().any(|f| {
                f.text
                    .lines()
                    .any(|l| l.starts_with("#[path") && l.ends_with(&format!("{name}\"]")))
            });
        if root_file {
            return false;
        }
        let (module, parents) = if stem == "mod" {
            let (up, module) = dir.rsplit_once('/').unwrap_or(("", dir));
            (
                module.to_owned(),
                vec![
                    format!("{up}/mod.rs"),
                    format!("{up}/lib.rs"),
                    format!("{up}/main.rs"),
                    format!("{up}.rs"),
                ],
            )
        } else {
            (
                stem.to_owned(),
                vec![
                    format!("{dir}/mod.rs"),
                    format!("{dir}/lib.rs"),
                    format!("{dir}/main.rs"),
                    format!("{dir}.rs"),
                ],
            )
        };
        let declared = |f: &SourceFile| {
            parents.contains(&f.path)
                && f.text.lines().any(|l| {
                    l.trim_end().trim_end_matches(';').ends_with(&format!("mod {module}"))
                        || l.contains(&format!("mod {module} {{"))
                })
        };
        !files.iter().any(declared)
    };
    let found: Vec<String> = files.iter().filter(orphan).map(|f| f.path.clone()).collect();
    forbid("files no module declares", &found);
}

#[test]
fn every_op_is_documented() {
    let page = read_file("kernels/KERNELS.md");
    let ops = rust_files().into_iter().filter(|f| f.path.starts_with("kernels/src/op/"));
    let names: Vec<String> = ops
        .flat_map(|f| f.text.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|l| Some(l.strip_prefix("pub struct ")?.split('<').next()?.to_owned()))
        .collect();
    assert!(names.len() > 30, "{names:?}");
    let missing = names.into_iter().filter(|name| !page.contains(&format!("`{name}`")));
    forbid("ops without a row in KERNELS.md", &missing.collect::<Vec<_>>());
}

#[test]
fn readme_shows_run_and_test_commands() {
    let page = read_file("README.md");
    for command in ["cargo run --release -- serve", "cargo test"] {
        assert!(page.contains(command), "README.md must show `{command}`");
    }
    assert!(root().join(".ci/run").exists());
}
