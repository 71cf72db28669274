//! Tests of downloads from a mock hub on loopback: byte ranges, interrupted transfers, error responses.

mod mock_hub;

use crate::deadlines::BoundedJoin as _;
use mock_hub::MockHub;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::*;

fn weights() -> Vec<u8> {
    (0..100_000_u32).map(|i| (i % 251) as u8).collect()
}

fn small() -> BTreeMap<&'static str, &'static [u8]> {
    BTreeMap::from([
        ("config.json", &b"{}"[..]),
        ("tokenizer.json", b"{\"a\":1}"),
        ("README.md", b"no"),
    ])
}

#[test]
fn only_files_needed_for_serving_are_fetched() {
    let weights = weights();
    let mut files = small();
    files.insert("model.safetensors", &weights);
    files.insert("consolidated.safetensors", &weights);
    files.insert("pytorch_model.bin", b"pickle");
    let mock = MockHub::start(&files);
    let dir = tempfile::tempdir().unwrap();
    let folder = mock.fetch(dir.path(), None).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights);
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    assert!(mock.state.lock().unwrap().tokens.iter().all(|token| token == "bearer secret"));

    // A second download transfers no file again, and offline mode returns the same folder.
    let sent = mock.state.lock().unwrap().sent.len();
    assert_eq!(mock.fetch(dir.path(), None).unwrap(), folder);
    assert_eq!(mock.state.lock().unwrap().sent.len(), sent);
    assert_eq!(mock.fetch_as(dir.path(), None, HubFileSet::Everything, true).unwrap(), folder);
}

#[test]
fn other_tokenizer_files_are_fetched_without_tokenizer_json() {
    let files = BTreeMap::from([
        ("config.json", &b"{}"[..]),
        ("vocab.json", b"{}"),
        ("merges.txt", b"#version: 0.2"),
        ("added_tokens.json", b"{}"),
        ("tiktoken.model.bak", b""),
    ]);
    let mock = MockHub::start(&files);
    let dir = tempfile::tempdir().unwrap();
    let folder = mock.fetch_as(dir.path(), None, HubFileSet::Tokenizer, false).unwrap();
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["added_tokens.json", "merges.txt", "vocab.json"]);
    assert_eq!(mock.fetch_as(dir.path(), None, HubFileSet::Tokenizer, true).unwrap(), folder);
}

#[test]
fn broken_transfer_is_resumed() {
    let weights = weights();
    let mut files = small();
    files.insert("model.safetensors", &weights);
    let mock = MockHub::start(&files);
    mock.set(|s| {
        s.cuts.insert("model.safetensors".to_owned(), vec![30_000, 0, 20_000]);
    });
    let dir = tempfile::tempdir().unwrap();
    let folder = mock.fetch(dir.path(), None).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights);
    let sent: Vec<String> = mock.state.lock().unwrap().sent.clone();
    let sent: Vec<&str> =
        sent.iter().filter_map(|s| s.strip_prefix("model.safetensors@")).collect();
    assert_eq!(sent, ["0", "30000", "30000", "50000"]);
}

#[test]
fn partial_download_of_a_killed_process_is_resumed() {
    let weights = weights();
    let mut files = small();
    files.insert("model.safetensors", &weights);
    let mock = MockHub::start(&files);
    let dir = tempfile::tempdir().unwrap();
    let blobs = dir.path().join("models--owner--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let part = |bytes: &[u8]| {
        let path = blobs.join("etag-model.safetensors").with_extension("part");
        std::fs::write(path, bytes).unwrap();
    };
    part(&weights[..40_000]);
    let folder = mock.fetch(dir.path(), None).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights);
    assert!(mock.state.lock().unwrap().sent.contains(&"model.safetensors@40000".to_owned()));

    // Cache state after the process was killed between the last byte of a file and its rename: a `.part` file
    // of the full size.
    let other = tempfile::tempdir().unwrap();
    let blobs = other.path().join("models--owner--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let path = blobs.join("etag-model.safetensors").with_extension("part");
    std::fs::write(path, &weights).unwrap();
    let folder = mock.fetch(other.path(), None).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn server_without_ranges_cannot_corrupt_a_file() {
    let weights = weights();
    let mut files = small();
    files.insert("model.safetensors", &weights);
    let mock = MockHub::start(&files);
    mock.set(|s| {
        s.ignore_ranges = true;
        s.cuts.insert("model.safetensors".to_owned(), vec![30_000]);
    });
    let dir = tempfile::tempdir().unwrap();
    let folder = mock.fetch(dir.path(), None).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn repository_in_another_format_is_named() {
    let files = BTreeMap::from([("README.md", &b"x"[..]), ("model-Q4_K_M.gguf", b"GGUF")]);
    let mock = MockHub::start(&files);
    let dir = tempfile::tempdir().unwrap();
    let error = mock.fetch(dir.path(), None).unwrap_err().to_string();
    let expected = "owner/name: the repository has no tokenizer.json; GGUF is not supported: serve the original \
                    model, which has safetensors files";
    assert_eq!(error, expected);
}

#[test]
fn shards_come_from_the_index() {
    let index = br#"{"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#;
    let mut files = small();
    files.insert(INDEX_FILE, index);
    files.insert("model-1.safetensors", b"one");
    let mock = MockHub::start(&files);
    let dir = tempfile::tempdir().unwrap();
    let error = mock.fetch(dir.path(), None).unwrap_err().to_string();
    assert_eq!(error, "owner/name: the repository has no model-2.safetensors");
    mock.set(|s| {
        s.files.insert("model-2.safetensors".to_owned(), b"two".to_vec());
    });
    let folder = mock.fetch(dir.path(), Some("v1")).unwrap();
    assert_eq!(std::fs::read(folder.join("model-2.safetensors")).unwrap(), b"two");
    for bad in ["../x.safetensors", "x.bin"] {
        let text = format!(r#"{{"weight_map":{{"a":"{bad}"}}}}"#);
        assert!(shards(text.as_bytes()).unwrap_err().contains(bad));
    }
}

#[test]
fn http_errors_name_the_requested_file() {
    let mock = MockHub::start(&small());
    let dir = tempfile::tempdir().unwrap();
    let error = |revision| mock.fetch(dir.path(), revision).unwrap_err().to_string();
    assert_eq!(error(None), "owner/name: the repository has no model.safetensors");
    assert!(error(Some("v9")).contains("no such model or revision (v9)"));
    mock.set(|s| s.status = Some(403));
    assert!(error(None).contains("status 403"));
    mock.set(|s| s.status = Some(410));
    assert!(error(None).contains("file list: status 410"));
    let offline = mock.fetch_as(dir.path(), Some("v2"), HubFileSet::Tokenizer, true);
    assert!(matches!(offline, Err(HubError::Offline { .. })));
}

#[test]
fn invalid_ids_are_never_requested() {
    let environment = ProcessEnvironment::default();
    let error_of =
        |model| resolve(model, None, HubFileSet::Everything, &environment, None).unwrap_err();
    for path in ["./none", "/no/such", "a/b/c", "~/x"] {
        assert!(matches!(error_of(path), HubError::FolderMissing(_)), "{path}");
    }
    for name in ["a b", "owner/", "a/..", "own?er/x"] {
        assert!(matches!(error_of(name), HubError::InvalidId(_)), "{name}");
    }
    assert!(matches!(error_of("Cargo.toml"), HubError::NotAFolder(_)));
    assert!(matches!(error_of("owner/name"), HubError::CacheFolderUnknown));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let found = resolve(path, None, HubFileSet::Everything, &environment, None).unwrap();
    assert_eq!(found, dir.path());
}

/// Starts a thread that closes each connection without a response, and ends at the first connection that sends
/// nothing; it returns the number of earlier connections.
fn close_connections(listener: TcpListener) -> std::thread::JoinHandle<usize> {
    std::thread::spawn(move || {
        let streams = listener.incoming().map_while(Result::ok);
        let received = streams.map(|mut stream| {
            let mut first = [0];
            std::io::Read::read(&mut stream, &mut first).unwrap_or(0)
        });
        received.take_while(|&count| count > 0).count()
    })
}

#[test]
fn names_without_owner_are_requested_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let connections = close_connections(listener);
    let dir = tempfile::tempdir().unwrap();
    let environment = |hub_offline| ProcessEnvironment {
        hub_endpoint: Some(endpoint.clone()),
        hub_cache: Some(dir.path().to_owned()),
        hub_offline,
        ..ProcessEnvironment::default()
    };
    let error_of = |hub_offline| {
        resolve("no-such-name", None, HubFileSet::Everything, &environment(hub_offline), None)
            .unwrap_err()
    };
    for (is_offline, reason) in [(false, "cannot be reached"), (true, "HF_HUB_OFFLINE")] {
        let error = error_of(is_offline);
        assert!(matches!(error, HubError::OwnerMissing { .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains("owner/name") && message.contains(reason), "{message}");
    }
    drop(std::net::TcpStream::connect(endpoint.trim_start_matches("http://")).unwrap());
    assert_eq!(connections.join_bounded(), 1);
}
