//! Tests of the command line with the flag spellings of vLLM, SGLang and ATOM.

use std::ffi::OsString;

use scheduler::LifetimeSampleRate;

use super::*;

fn run(line: &str) -> Result<CliInvocation, CommandLineError> {
    let argv = std::iter::once("hadron").chain(line.split(' ').filter(|word| !word.is_empty()));
    parse(argv.map(OsString::from).collect(), ProcessEnvironment::default())
}

fn serve(line: &str) -> ServeArgs {
    match run(&format!("serve {line}")).unwrap().command {
        CliCommand::Serve(args) => *args,
        other => panic!("{other:?}"),
    }
}

fn error(line: &str) -> (u8, String) {
    let error = run(line).unwrap_err();
    (error.exit_code(), error.to_string())
}

#[test]
fn clap_flag_table_is_consistent() {
    CliArgs::command().debug_assert();
}

#[test]
fn defaults_fit_cpu_serving() {
    let args = serve("");
    assert_eq!(args.model.model, None);
    assert_eq!(args.engine.tokens_per_step(), 512);
    assert_eq!(args.engine.kv_bytes(8 << 30), 2 << 30);
    assert_eq!(args.engine.kv_bytes(64 << 30), 4 << 30);
    assert_eq!(args.engine.requests_in_flight_max(1, 1024), 1536);
    assert_eq!((args.http.host.as_str(), args.http.port), ("127.0.0.1", 8000));
    assert!(args.engine.enable_prefix_caching && args.engine.mixed);
}

#[test]
fn aliases_of_three_engines_are_equivalent() {
    for (line, check) in [
        ("M --max-num-seqs 4", "seqs"),
        ("M --max_num_seqs=4", "seqs"),
        ("M --max-running-requests 4", "seqs"),
        ("--model M --max_running_requests 4", "seqs"),
        ("--model-path M --chunked-prefill-size 16 -tp 1", "budget"),
        ("M --max-num-batched-tokens=16 -dp=1 --ep-size 1", "budget"),
        ("M --no-enable-prefix-caching", "cache"),
        ("M --no_enable_prefix_caching", "cache"),
        ("M --disable-radix-cache", "cache"),
        ("M --enable-prefix-caching=false", "cache"),
    ] {
        let args = serve(line);
        assert_eq!(args.model.model.as_deref(), Some("M"), "{line}");
        let right = match check {
            "seqs" => args.engine.max_num_seqs == 4,
            "budget" => args.engine.tokens_per_step() == 16,
            _ => !args.engine.enable_prefix_caching,
        };
        assert!(right, "{line}");
    }
}

#[test]
fn flag_values_are_parsed() {
    let args = serve("M --cuda-graph-bs 1 2,4 --device-ids=3");
    assert_eq!(
        (args.engine.cudagraph_capture_sizes, args.engine.device_ids),
        (vec![1, 2, 4], vec![3])
    );
    let args = serve("M --load_dummy --dtype float32 --max-model-len 32K --served-model-name a b");
    assert_eq!(args.model.load_format, LoadFormatArg::Synth);
    assert_eq!(args.model.max_model_len.tokens(), Some(32_768));
    assert_eq!(serve("M --max-model-len -1 --port 1").model.max_model_len.tokens(), None);
    assert_eq!(args.model.served_model_name, ["a", "b"]);
    assert_eq!(serve("M --port 1 --port 2").http.port, 2);
    for half in ["float16", "half", "fp16"] {
        assert_eq!(serve(&format!("M --dtype {half}")).model.dtype, DtypeArg::Float16);
    }
}

#[test]
fn short_names_and_switches_of_other_engines_are_read() {
    let args = serve("M -tp 1 -n 1 -r 0 -ep -O3 -asc 2 --device-memory-utilization 0.5");
    assert!(args.parallel.enable_expert_parallel && !args.parallel.disable_custom_all_reduce);
    assert!(serve("M --disable_custom_all_reduce").parallel.disable_custom_all_reduce);
    assert!((args.engine.gpu_memory_utilization - 0.5).abs() < 1e-9);
    for (line, caches) in [
        ("M --disable-radix-cache=true", false),
        ("M --disable_radix_cache=false", true),
        ("M --no-disable-radix-cache", true),
        ("M --disable-radix-cache --enable-prefix-caching", true),
    ] {
        assert_eq!(serve(line).engine.enable_prefix_caching, caches, "{line}");
    }
    assert_eq!(serve("M --load-dummy=false").model.load_format, LoadFormatArg::Auto);
    assert_eq!(error("serve M --disable-radix-cache=perhaps").0, 2);
}

/// The first line of the list names the vLLM release from which the flags were taken.
#[test]
fn every_vllm_flag_is_supported_or_explained() {
    let command = CliArgs::command();
    let serve = command.find_subcommand("serve").unwrap();
    let supported: Vec<String> = serve
        .get_arguments()
        .flat_map(|flag| {
            let names = flag.get_all_aliases().unwrap_or_default();
            names.into_iter().chain(flag.get_long()).map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    let inert = |name: &str| compat_flags::INERT_FLAGS.iter().any(|flag| flag.name == name);
    for name in include_str!("../../tests/data/vllm_flags.txt").lines().skip(1) {
        let is_unsupported = compat_flags::unsupported_reason(name).is_some();
        let kinds = [supported.iter().any(|flag| flag == name), inert(name), is_unsupported];
        assert_eq!(kinds.iter().filter(|is_kind| **is_kind).count(), 1, "--{name}");
    }
    let mut unsupported: Vec<&str> = compat_flags::UNSUPPORTED_FLAGS
        .iter()
        .flat_map(compat_flags::UnsupportedFlags::names)
        .collect();
    let count = unsupported.len();
    unsupported.sort_unstable();
    unsupported.dedup();
    assert_eq!(unsupported.len(), count, "no flag has two reasons");
    let is_supported = |name: &str| supported.iter().any(|flag| flag == name);
    assert!(unsupported.iter().all(|name| !is_supported(name) && !inert(name)));
}

#[test]
fn missing_features_may_be_disabled() {
    for line in ["M --no-enable-lora", "M --enable-lora=false", "M --no_enable_eplb"] {
        let notes = run(&format!("serve {line}")).unwrap().notes;
        assert!(notes.len() == 1 && notes[0].contains("has no effect"), "{line}: {notes:?}");
    }
    assert_eq!(error("serve M --enable-lora").0, 1);
    assert_eq!(error("serve M --enable-lora=true").0, 1);
}

#[test]
fn unsupported_flags_accept_no_op_values() {
    for (flag, values) in compat_flags::NO_OP_VALUES {
        assert!(
            compat_flags::unsupported_reason(flag).is_some(),
            "--{flag} is not rejected with other values"
        );
        for value in *values {
            for line in [format!("--{flag} {value} M"), format!("M --{flag}={value}")] {
                let invocation = run(&format!("serve {line}")).unwrap();
                assert!(
                    invocation.notes.len() == 1 && invocation.notes[0].contains(value),
                    "{line}"
                );
                assert_eq!(serve(&line).model.model.as_deref(), Some("M"), "{line}");
            }
        }
        for line in [format!("M --{flag} other"), format!("M --{flag}")] {
            assert_eq!(error(&format!("serve {line}")).0, 1, "{line}");
        }
    }
    assert_eq!(serve("M -pp 1 --tp 1").parallel.tensor_parallel_size, 1);
    assert_eq!(error("serve M -pp 2").0, 1);
}

#[test]
fn inert_flags_reject_values_with_an_effect() {
    for line in ["M --distributed-executor-backend mp", "M --distributed_executor_backend=uni"] {
        let notes = run(&format!("serve {line}")).unwrap().notes;
        assert!(notes.len() == 1 && notes[0].contains("has no effect"), "{line}: {notes:?}");
    }
    let (code, message) = error("serve M --distributed-executor-backend ray");
    assert!(
        code == 1 && message.contains("--distributed-executor-backend ray is not"),
        "{message}"
    );
}

#[test]
fn an_unknown_flag_is_a_usage_error() {
    assert_eq!(error("serve M --no-such-flag").0, 2);
    let (_, message) = error("serve M --max-num-seq 4");
    assert!(message.contains("--max-num-seqs"), "the nearest name is suggested: {message}");
    assert_eq!(error("serve M --max-num-seqs x").0, 2);
    assert_eq!(error("fly").0, 2);
    assert_eq!(error("bench serve --nope").0, 2);
    assert_eq!(error("--help").0, 0);
    assert_eq!(error("--version").0, 0);
    assert_eq!(error("serve --help").0, 0);
}

#[test]
fn unsupported_values_are_rejected_with_reason() {
    for (line, reason) in [
        ("M --quantization fp8", "--quantization is not supported: weights"),
        ("M --kv-events-format array", "events are disabled"),
        ("M -pp 2", "--pipeline-parallel-size is not supported"),
        ("M --nnodes 2", "--nnodes 2 with --data-parallel-size 1 and --tensor-parallel-size 1"),
        ("M -n 2 -dp 2", "2 nodes need a common secret: --cluster-secret-file FILE"),
        ("M -n 2 -dp 2 --ep", "ranks on several nodes cannot run steps together yet"),
        (
            "M -n 2 -dp 2 --ep --enable-dp-attention",
            "ranks on several nodes cannot run steps together yet",
        ),
        ("M -n 2 -tp 2 --ep-size 2", "ranks on several nodes cannot run steps together yet"),
        ("M -r 1", "--node-rank 1: with --nnodes 1 only rank 0 exists"),
        ("M --headless", "the only node runs the HTTP server"),
        ("M -tp 0", "--tensor-parallel-size 0"),
        ("M -tp 16 -dp 17", "272 executors, a server runs at most 256"),
        ("M -tp 2 --enable-dp-attention", "--enable-dp-attention with 2 ranks"),
        ("M -tp 2 -dp 2 --ep --enable-dp-attention", "use --data-parallel-size only"),
        ("M -tp 2 --expert-placement f", "only with --enable-expert-parallel and a size above 1"),
        (
            "M --ep --init-expert-location f",
            "--expert-placement: experts are placed whole on one of several",
        ),
        ("M -tp 2 --ep-size 3", "must equal the number of ranks, 2"),
        ("M -dpl 2", "--data-parallel-size-local 2 of --data-parallel-size 1: each node"),
        ("M -dp 4 -dpl 0", "--data-parallel-size-local 0 of --data-parallel-size 4"),
        ("M -dp 4 -dpl 2", "2 nodes need a common secret"),
        ("M -dp 4 -dpl 2 -n 4", "--nnodes 4, but --data-parallel-size-local is 2"),
        ("M -dp 4 -dpr 2", "--data-parallel-start-rank 2: needs --data-parallel-size-local"),
        ("M -dp 4 -dpl 2 -dpr 1", "start at multiples of 2"),
        ("M -dp 4 -dpl 2 -dpr 4", "start at multiples of 2"),
        ("M -dp 4 -dpl 2 -dpr 2 -r 0", "--node-rank 0, but --data-parallel-start-rank is 1"),
        ("M -dpb ray", "--data-parallel-backend is not supported: replicas are distributed evenly"),
        ("M --master-addr 10.0.0.1", "--master-addr: has no effect on a single node"),
        ("M -dpa 10.0.0.1", "--master-addr: has no effect on a single node"),
        ("M --cluster-secret-file f", "--cluster-secret-file: has no effect on a single node"),
        ("M -q fp8", "--quantization is not supported"),
        ("M --uds /tmp/socket", "HTTP/1.1 over TCP"),
        ("M --attention-backend FLASHINFER", "built in and selected"),
        ("M --cudagraph-capture-sizes 4,0", "at least 1"),
        ("M --restart-backoff 0", "--restart-backoff 0s: at least 10ms"),
        ("M --restart-backoff 31", "at most --restart-backoff-max, which is 30s"),
        ("M --cudagraph-capture-sizes 4 8 --max-cudagraph-capture-size 4", "capture-sizes is 8"),
        ("M --device-ids 1,2,1", "1 is given twice"),
        ("M --kv-cache-dtype bf16 --dtype float32", "--dtype bfloat16"),
        ("M --kv-cache-dtype bf16 --dtype half", "--dtype bfloat16"),
        ("M --no_mmap", "always memory-mapped"),
        (
            "M --spec-method eagle",
            "--spec-method eagle: supported methods are ngram, mtp, draft_model and eagle3",
        ),
        ("M --spec-method ngram --spec-tokens 99", "--spec-tokens 99: 1 to 16"),
        ("M --tool-call-parser unknown", "hermes, qwen3_coder, qwen3_xml, llama3_json"),
        ("M --model N", "two models"),
        ("M --block-size 0", "--block-size 0"),
        ("M --block-size 7", "--block-size 7: an even number"),
        ("M --max-model-len 1", "at least 2"),
        ("M --ep-size 8", "--ep-size 8"),
        ("M --metrics-require-key", "needs --api-key"),
        ("M --metrics-require-key --admin-key k", "needs --api-key"),
    ] {
        let (code, text) = error(&format!("serve {line}"));
        assert_eq!(code, 1, "{line}: {text}");
        assert!(text.contains(reason), "{line}: {text}");
    }
}

#[test]
fn sizes_have_the_spellings_of_other_engines() {
    for (line, sizes, experts) in [
        ("M", (1, 1), false),
        ("M -tp 2 -dp=3", (2, 3), false),
        ("M --tp-size 2 --data_parallel_size 3", (2, 3), false),
        ("M --tp 4 --ep", (4, 1), true),
        ("M --tensor-parallel-size=4 --ep-size 4", (4, 1), true),
        ("M --data-parallel-size 2 --enable-expert-parallel", (1, 2), true),
        ("M -tp 2 -dp 2 --ep-size 4", (2, 2), true),
        ("M -tp 2 --ep --enable-dp-attention", (1, 2), true),
        ("M -dp 4 --ep-size 4 --enable-dp-attention", (1, 4), true),
    ] {
        let args = serve(line).parallel;
        let parsed = (args.tensor_parallel_size, args.data_parallel_size);
        assert_eq!((parsed, args.enable_expert_parallel), (sizes, experts), "{line}");
    }
    let placement = serve("M -dp 2 --load-balance-method round_robin").parallel.dp_load_balance;
    assert_eq!(placement, LoadBalancePolicy::RoundRobin);
}

#[test]
fn invalid_histogram_bounds_are_a_usage_error() {
    let args =
        serve(r#"M --custom_histogram_buckets {"request_latency":[1,2]} --metrics-aggregate"#);
    assert!(args.metrics.metrics_aggregate && args.metrics.custom_histogram_buckets.is_some());
    let (code, text) = error(r#"serve M --custom-histogram-buckets {"nope":[1]}"#);
    assert!(code == 2 && text.contains("unknown bucket family"), "{text}");
}

#[test]
fn block_lifetimes_are_sampled_on_request() {
    let sample_rate = |line: &str| serve(line).metrics.block_lifetime_sample_rate();
    assert_eq!(sample_rate("M"), None);
    assert_eq!(
        sample_rate("M --kv-cache-metrics-sample 0.5"),
        LifetimeSampleRate::new(0.5),
        "a sample rate implies --kv-cache-metrics"
    );
    assert_eq!(sample_rate("M --kv-cache-metrics-sample 0.5 --no-kv-cache-metrics"), None);
    assert_eq!(sample_rate("M --kv-cache-metrics"), LifetimeSampleRate::new(0.01));
    let all = "M --kv_cache_metrics --kv-cache-metrics-sample=1 --custom-histogram-buckets";
    assert_eq!(
        sample_rate(&format!(r#"{all} {{"kv_cache_residency":[1,60]}}"#)),
        LifetimeSampleRate::new(1.0)
    );
    assert_eq!(sample_rate("M --kv-cache-metrics --no-kv-cache-metrics"), None);
    for wrong in ["0", "1.01", "-1", "nan", "half"] {
        let (code, text) = error(&format!("serve M --kv-cache-metrics-sample={wrong}"));
        assert!(code == 2 && text.contains("above 0 and at most 1"), "{wrong}: {text}");
    }
}

#[test]
fn model_argument_is_not_a_served_name() {
    let dir = env!("CARGO_MANIFEST_DIR");
    for line in [
        format!("--served-model-name one {dir}"),
        "--served-model-name one org/hub-id".to_owned(),
        format!("--served-model-name {dir}"),
        format!("--port 9 --served-model-name one two {dir} --seed 3"),
    ] {
        let (code, text) = error(&format!("serve {line}"));
        assert!(code == 1 && text.contains("No MODEL is given"), "{line}: {text}");
    }
    let names = |line: &str| serve(line).model.served_model_name;
    assert_eq!(names("M --served-model-name a b --port 1"), ["a", "b"]);
    assert_eq!(names("--served-model-name a b --model M"), ["a", "b"]);
    assert_eq!(
        names("--served-model-name tiny"),
        ["tiny"],
        "the demo model may be served under another name"
    );
    let args = serve("--api-key k M --api-key l");
    assert_eq!(args.model.model.as_deref(), Some("M"));
    assert_eq!(args.access.api_key, ["k", "l"]);
}

#[test]
fn a_device_may_be_named_with_its_libraries() {
    let args = serve("M --device cuda --device-libraries /a/emu.so,,/b/blas.so,64").engine;
    let libraries = args.device_libraries.unwrap();
    assert_eq!(libraries.driver, std::path::Path::new("/a/emu.so"));
    assert_eq!((libraries.compiler, libraries.blas), (None, Some("/b/blas.so".into())));
    assert_eq!((libraries.emulated_warp_size, libraries.collectives), (Some(64), None));
    let args = serve("M --device cuda --device-libraries /a/cuda.so,,,,/b/nccl.so").engine;
    let libraries = args.device_libraries.unwrap();
    assert_eq!(
        (libraries.emulated_warp_size, libraries.collectives),
        (None, Some("/b/nccl.so".into()))
    );
    assert_eq!((args.device, args.executor), (DeviceArg::Cuda, ExecutorModeArg::Embedded));
    assert_eq!(
        (args.max_num_batched_tokens, serve("M --device rocm").engine.tokens_per_step()),
        (None, 8192)
    );
    assert_eq!(error("serve M --device-libraries ,x").0, 2);
    assert_eq!(error("serve M --device-libraries a,b,c,wide").0, 2);
}

#[test]
fn internal_commands_are_parsed_but_not_documented() {
    let CliCommand::Executor(args) = run("executor --rank 1 --epoch 4").unwrap().command else {
        panic!("not executor")
    };
    assert_eq!((args.rank, args.epoch), (1, 4));
    let worker = run("grammar-worker --log-format json").unwrap().command;
    assert!(
        matches!(worker, CliCommand::GrammarWorker(args) if args.log_format == LogFormat::Json)
    );
    for hidden in ["hadron executor", "hadron grammar-worker"] {
        assert!(!reference().contains(hidden), "internal commands are not documented");
    }
}

#[test]
fn inert_flags_only_log_a_note() {
    let line = "serve M --trust-remote-code --api-server-count 4 --uvicorn-log-level=info \
                --no-enable-chunked-prefill --disable_log_requests --port 9";
    let invocation = run(line).unwrap();
    assert_eq!(invocation.notes.len(), 4, "{:?}", invocation.notes);
    let CliCommand::Serve(args) = invocation.command else { panic!("not serve") };
    assert_eq!((args.model.model.as_deref(), args.http.port), (Some("M"), 9));
}

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
    assert_eq!((args.http.port, args.engine.max_num_seqs), (2, 3));
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
    assert_eq!((args.http.port, args.engine.max_num_seqs), (2, 3));
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

#[test]
fn log_flags_have_the_names_of_vllm() {
    let log = |line: &str| serve(line).log;
    assert!(!log("M").enable_log_requests && !log("M").disable_log_stats);
    assert!(log("M --enable-log-requests --disable-log-stats").enable_log_requests);
    assert!(!log("M --no-enable-log-requests").enable_log_requests);
    assert!(!log("M --disable-log-requests").enable_log_requests);
    assert!(log("M --disable_log_stats").disable_log_stats);
}

#[test]
fn api_key_may_come_from_the_environment() {
    let environment =
        ProcessEnvironment { api_key: Some("k".to_owned()), ..ProcessEnvironment::default() };
    let line = |words: &[&str]| {
        let argv = words.iter().map(OsString::from).collect();
        match parse(argv, environment.clone()).unwrap().command {
            CliCommand::Serve(args) => args.access.api_key,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(line(&["hadron", "serve"]), ["k"]);
    assert_eq!(line(&["hadron", "serve", "--api-key", "x", "--api-key", "y"]), ["x", "y"]);
}

#[test]
fn nodes_have_the_spellings_of_other_engines() {
    let cluster = |line: &str| {
        let args = serve(&format!("M -dp 2 --cluster-secret-file /s {line}"));
        let cluster = args.nodes.cluster().unwrap_or_else(|| panic!("{line}: no cluster"));
        (cluster.nodes, cluster.node, cluster.host.clone(), cluster.port)
    };
    let at = |node: u16, host: &str, port: u16| (2, node, host.to_owned(), port);
    assert_eq!(cluster("-n 2"), at(0, "127.0.0.1", 29_500));
    assert_eq!(cluster("--nnodes 2 --node_rank=1 --headless"), at(1, "127.0.0.1", 29_500));
    assert_eq!(cluster("-n 2 -r 1 --master-addr h --master-port 1"), at(1, "h", 1));
    assert_eq!(cluster("--nnodes 2 --node-rank 1 --dist-init-addr h:5"), at(1, "h", 5));
    assert_eq!(cluster("--nnodes 2 --nccl_init_addr h:5"), at(0, "h", 5));
    let CliCommand::Serve(args) = run("launch M --port 9").unwrap().command else {
        panic!("not serve")
    };
    assert!(args.http.port == 9 && args.nodes.cluster().is_none(), "launch is serve");
}

/// `docs/cli.md` equals the page that is generated from the flags. `UPDATE_EXPECT=1 cargo test` updates the
/// file.
#[test]
fn the_reference_page_is_current() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(reference_path());
    expect_test::expect_file![path].assert_eq(&reference());
}
