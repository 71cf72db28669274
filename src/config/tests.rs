//! Tests of the command line with the flag spellings of vLLM, SGLang and ATOM.

mod config_file;
mod unsupported_values;

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
    let recurrent = |line| {
        let mut args = serve(line);
        args.engine.set_default_max_num_seqs(true);
        args.engine.max_num_seqs()
    };
    assert_eq!(["", "M --max-num-seqs 300"].map(recurrent), [128, 300]);
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
            "seqs" => args.engine.max_num_seqs == Some(4),
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
