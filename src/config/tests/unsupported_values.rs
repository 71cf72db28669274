//! Tests of flags and values that are rejected or have no effect.

use super::*;

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
    for name in include_str!("../../../tests/data/vllm_flags.txt").lines().skip(1) {
        let is_unsupported = compat_flags::unsupported_reason(name).is_some();
        let kinds = [supported.iter().any(|flag| flag == name), inert(name), is_unsupported];
        assert_eq!(kinds.iter().filter(|is_kind| **is_kind).count(), 1, "--{name}");
    }
    let mut unsupported: Vec<&str> = compat_flags::UNSUPPORTED_FLAGS
        .iter()
        .flat_map(compat_flags::unsupported_flags::UnsupportedFlags::names)
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
        ("M -n 2 -dp 2 --ep", "2 nodes need a common secret"),
        ("M -n 2 -dp 2 --ep --enable-dp-attention", "2 nodes need a common secret"),
        ("M -n 2 -tp 2 --ep-size 2", "2 nodes need a common secret"),
        ("M -n 2 -tp 3", "--nnodes 2 with --data-parallel-size 1 and --tensor-parallel-size 3"),
        ("M -n 2 -tp 2 -dp 3 --ep", "either whole replicas or an equal part of one"),
        (
            "M -n 3 -tp 3 -dp 2",
            "an equal number of ranks, and either whole replicas or an equal part",
        ),
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
        (
            "M --per-request-spec-decode-metrics summary",
            "--per-request-spec-decode-metrics: needs --speculative-config",
        ),
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

/// The flag enables the render routes of vLLM, which need no flag here.
#[test]
fn scale_out_is_accepted_because_render_routes_are_always_on() {
    let notes = run("serve M --enable-scale-out").unwrap().notes;
    assert!(notes.len() == 1 && notes[0].contains("/v1/completions/render"), "{notes:?}");
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
