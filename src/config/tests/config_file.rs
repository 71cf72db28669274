//! Tests of configuration files.

use super::*;

#[test]
fn config_overrides_have_dotted_forms() {
    let args = serve(
        "--hf-overrides.rope_scaling.rope_type yarn --hf_overrides.rope_scaling.factor=4 \
         --hf-overrides {\"vocab_size\":8} --hf-overrides.sliding_window null",
    );
    let expected = serde_json::json!({
        "rope_scaling.rope_type": "yarn", "rope_scaling.factor": 4, "vocab_size": 8, "sliding_window": null
    });
    assert_eq!(Value::Object(args.model.config_overrides()), expected);
    for (line, reason) in [
        ("--hf-overrides.rope_theta", "the value is missing"),
        ("--hf-overrides.rope_scaling. 1", "a name between the dots is empty"),
        ("--hf-overrides.=1", "a name between the dots is empty"),
    ] {
        let error = run(&format!("serve {line}")).unwrap_err().to_string();
        assert!(error.contains(reason), "{line}: {error}");
    }
}

#[test]
fn command_line_overrides_config_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("serve.toml");
    let text = "model = \"F\"\nport = 1\nmax_num_seqs = 3\nserved-model-name = [\"a\", \"b\"]\n\
                disable-radix-cache = true\ntrust-remote-code = true\nenable-lora = false\n\
                [hf-overrides]\nrope_theta = 1.0\n";
    std::fs::write(&path, text).unwrap();
    let args = serve(&format!("--config {} --port 2 --served-model-name c", path.display()));
    assert_eq!(args.model.model.as_deref(), Some("F"));
    assert_eq!((args.http.port, args.engine.max_num_seqs()), (2, 3));
    assert_eq!(args.model.served_model_name, ["c"]);
    assert!(!args.engine.enable_prefix_caching);
    assert_eq!(args.model.config_overrides()["rope_theta"], 1.0);
    std::fs::write(&path, "served-model-name = [\"a\", \"b\"]").unwrap();
    let args = serve(&format!("--config {}", path.display()));
    assert_eq!(
        args.model.served_model_name,
        ["a", "b"],
        "names from the file apply to the demo model"
    );
}

#[test]
fn invalid_config_files_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("serve.toml");
    for (text, reason) in [
        ("nope = 1", "nope"),
        ("max-num-seq = 1", "did you mean max-num-seqs?"),
        ("port = [", "serve.toml"),
        ("port = 99999", "99999"),
        ("port = 2026-01-01", "port"),
    ] {
        std::fs::write(&path, text).unwrap();
        let (code, message) = error(&format!("serve M --config {}", path.display()));
        assert!(code == 1 || code == 2, "{message}");
        assert!(message.contains(reason), "{message}");
    }
    assert!(error("serve --config /no/such.toml").1.contains("/no/such.toml"));
}

#[test]
fn config_file_may_be_yaml() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("serve.yaml");
    let text = "# vLLM's form\nmodel: F\nport: 1\nmax_num_seqs: 3\nserved-model-name: [a, b]\n\
                enable-log-requests: true\nchat-template:\nhf-overrides:\n  rope_theta: 1.0\n\
                uvicorn-log-level: \"info\"\n";
    std::fs::write(&path, text).unwrap();
    let args = serve(&format!("M --config {} --port 2", path.display()));
    assert_eq!(args.model.model.as_deref(), Some("M"), "MODEL overrides the file");
    assert_eq!((args.http.port, args.engine.max_num_seqs()), (2, 3));
    assert_eq!(args.model.served_model_name, ["a", "b"]);
    assert!(args.log.enable_log_requests);
    assert_eq!(args.model.config_overrides()["rope_theta"], 1.0);
    for (text, reason) in
        [("- port", "flag: value"), ("port: [", "serve.yaml"), ("prt: 1", "did you mean port?")]
    {
        std::fs::write(&path, text).unwrap();
        let (code, message) = error(&format!("serve M --config {}", path.display()));
        assert!(code == 1 && message.contains(reason), "{message}");
    }
    std::fs::write(&path, "").unwrap();
    assert_eq!(serve(&format!("M --config {}", path.display())).model.model.as_deref(), Some("M"));
}
