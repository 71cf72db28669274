//! Replicas that share experts (DP attention): each replica has its own requests, all replicas run their
//! steps together (lockstep), and the failure of one replica restarts all.

use super::executor_process::{complete_text_of, finish, send, stream_of, wait_until};
use super::grammar_worker::stop;
use super::parallel_ranks::{metric, ranks, start, with_experts};
use crate::deadlines::BoundedJoin as _;
use crate::http_client::{HttpClient, get, post};
use crate::kv_event_replay;
use metrics::kv_events::{ExternalBlockHash, SubscriberBlocks, decode};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::Range;
use std::thread;
use std::time::Duration;

/// Request number `which`. Each number has a distinct prompt; odd numbers are sampled, even numbers are
/// greedy.
pub(super) fn body(which: u32, tokens: u32) -> Value {
    let prompt: Vec<u32> =
        (0..10 + which * 13).map(|i| 3 + (i * i * 7 + which * 31) % 250).collect();
    json!({"prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "seed": which,
           "temperature": which % 2})
}

pub(super) fn on(replica: u16, mut body: Value) -> Value {
    body["data_parallel_rank"] = replica.into();
    body
}

pub(super) fn streamed(mut body: Value) -> Value {
    body["stream"] = true.into();
    body
}

/// Sizes and name of the MoE model in these tests.
pub(super) const SIZES: &[&str] = &[
    "--max-model-len",
    "4096",
    "--num-gpu-blocks-override",
    "1024",
    "--served-model-name",
    "model",
];

/// Folder of the MoE model.
pub(super) fn folder(model: &tempfile::TempDir) -> String {
    model.path().join("model").to_str().unwrap().to_owned()
}

/// Starts a server of the MoE model in f32.
pub(super) fn serve(
    model: &tempfile::TempDir,
    flags: &[&str],
) -> super::server_process::ServerProcess {
    start(&[&[folder(model).as_str()], SIZES, flags].concat())
}

/// Output token ids of a request.
fn ids(at: SocketAddr, mut body: Value) -> Value {
    body["return_token_ids"] = true.into();
    let reply = post(at, "/v1/completions", &body).json();
    let ids = &reply["choices"][0]["token_ids"];
    assert_eq!(
        ids.as_array().map(Vec::len),
        body["max_tokens"].as_u64().map(|n| n as usize),
        "{reply}"
    );
    ids.clone()
}

/// Returns the number of steps that a replica has finished.
fn steps(at: SocketAddr, replica: u16) -> f64 {
    metric(at, &format!(r#"hadron:eager_steps_total{{engine="{replica}",model_name="model"}}"#))
}

#[test]
fn expert_parallel_replicas_match_one_and_stay_lockstep() {
    let model = with_experts();
    let baseline = serve(&model, &[]);
    let expected: Vec<Value> =
        (0..4).map(|which| ids(baseline.address, body(which, 120))).collect();
    drop(baseline);
    for flags in [
        &["--data-parallel-size", "2", "--enable-expert-parallel"][..],
        &["-tp", "2", "-dp", "2", "--enable-expert-parallel"],
    ] {
        let process = serve(&model, flags);
        let at = process.address;
        // One replica has a request; the other replica runs empty batches in lockstep.
        assert_eq!(ids(at, on(1, body(0, 120))), expected[0], "{flags:?}");
        assert_eq!(get(at, "/v1/loads").json()["dp_rank_count"], 2);
        // The replica without requests may report its last step later than the replica with a request.
        let in_step = || steps(at, 0) == steps(at, 1) && steps(at, 1) >= 120.0;
        wait_until(Duration::from_secs(10), "as many steps of both", in_step);
        // Both replicas run several requests concurrently.
        let ask = |which: u32| {
            let body = on(which as u16 % 2, body(which, 120));
            thread::spawn(move || ids(at, body))
        };
        let asked: Vec<_> = (0..4).map(ask).collect();
        for (which, reply) in asked.into_iter().enumerate() {
            assert_eq!(reply.join_bounded(), expected[which], "{flags:?}, request {which}");
        }
    }
}

#[test]
fn rank_kill_stalls_the_group_and_loses_no_token() {
    const TOKENS: u32 = 1_500;
    let model = with_experts();
    let mut process = serve(&model, &["-dp", "2", "--enable-expert-parallel"]);
    let at = process.address;
    let expected: Vec<String> =
        (0..3).map(|which| complete_text_of(at, &on(0, body(which, TOKENS)))).collect();
    let former = ranks(&process);
    assert_eq!(former.keys().collect::<Vec<_>>(), [&0, &1]);
    let ask = |which: u32| stream_of(at, &streamed(on(which as u16 % 2, body(which, TOKENS))));
    let streams: Vec<_> = (0..3).map(ask).collect();
    send(former[&1], "-KILL");
    // The server reports the failure either as the killed rank's exit or as its peer's failed collective.
    let restarts = |replica: u16| {
        let of = |cause: &str| {
            let labels = format!(r#"cause="{cause}",engine="{replica}",model_name="model""#);
            metric(at, &format!("hadron:executor_restarts_total{{{labels}}}"))
        };
        of("exited") + of("fault")
    };
    wait_until(Duration::from_secs(30), "the failure", || restarts(0) == 1.0 && restarts(1) == 1.0);
    for (which, stream) in streams.into_iter().enumerate() {
        let (text, end) = finish(stream);
        let same = text == expected[which] && end == "length";
        assert!(same, "request {which} differs from an undisturbed run: {end} {text}");
    }
    let latter = ranks(&process);
    assert_eq!(latter.len(), 2);
    assert!(former.iter().all(|(rank, pid)| latter[rank] != *pid), "{former:?} {latter:?}");

    // A hanging rank blocks all other ranks at a collective: all ranks are replaced.
    stop(&[latter[&0]]);
    assert!(expected[1].starts_with(&complete_text_of(at, &on(1, body(1, 40)))));
    assert!(ranks(&process).iter().all(|(rank, pid)| latter[rank] != *pid));
    process.signal("TERM");
    assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(0));
}

/// Returns the block hashes of a replica's prefix index as a subscriber rebuilds it from replayed KV events
/// only, without live batches.
fn replayed(at: SocketAddr, replica: u16) -> BTreeSet<String> {
    let sources = get(at, "/kv_event_sources").json();
    let source = &sources[replica.to_string()];
    assert_eq!(source["data_parallel_rank"], replica, "{sources}");
    let (endpoint, start) = (source["replay_endpoint"].as_str(), source["epoch"].as_u64());
    let batches = kv_event_replay::replay(endpoint.unwrap(), start.unwrap(), 60_000);
    let (mut set, mut broken) = (SubscriberBlocks::default(), Vec::new());
    for ((seq, payload), expected) in batches.iter().zip(start.unwrap()..) {
        assert_eq!(*seq, expected, "a gap");
        let payload = decode(payload).unwrap();
        assert_eq!(payload.data_parallel_rank, Some(replica.into()), "batch {seq}");
        payload.events.iter().for_each(|event| set.apply(event, &mut broken));
        assert_eq!(broken, [], "batch {seq}");
    }
    set.hashes().map(ExternalBlockHash::to_string).collect()
}

/// Returns the block hashes of a replica's prefix index, as its scheduler lists them.
fn resident(at: SocketAddr, replica: u16) -> BTreeSet<String> {
    let mut client = HttpClient::connect(at);
    client.send("GET", "/debug/kv", "Authorization: Bearer root\r\n", b"");
    let kv = client.read().unwrap().json();
    let hashes = kv["replicas"][usize::from(replica)]["resident"].as_array().unwrap();
    hashes.iter().map(|hash| hash.as_str().unwrap().to_owned()).collect()
}

/// Waits until the index built from each replica's replay equals the scheduler's index. Returns both indexes.
fn check_replays(at: SocketAddr) -> [BTreeSet<String>; 2] {
    [0, 1].map(|replica| {
        let same = || replayed(at, replica) == resident(at, replica);
        wait_until(Duration::from_mins(1), "the index by replay", same);
        resident(at, replica)
    })
}

#[test]
fn replica_kv_event_replay_survives_group_failure() {
    let model = with_experts();
    let keys = json!({"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0",
                      "replay_endpoint": "tcp://127.0.0.1:0"});
    let flags = ["-dp", "2", "--enable-expert-parallel", "--admin-key", "root"];
    let keys = ["--kv-events-config", &keys.to_string()];
    let process = serve(&model, &[&flags[..], &keys].concat());
    let at = process.address;
    // Both replicas run concurrently; the KV events of a replica contain only blocks of that replica.
    let ask_all = |whiches: Range<u32>| {
        let ask =
            |which: u32| thread::spawn(move || ids(at, on(which as u16 % 2, body(which, 60))));
        for asked in whiches.map(ask).collect::<Vec<_>>() {
            asked.join_bounded();
        }
    };
    ask_all(0..4);
    let [first, second] = check_replays(at);
    assert!(!first.is_empty() && !second.is_empty() && first.is_disjoint(&second));

    // One failed rank clears the caches of both replicas. Each replica publishes a clear event and continues
    // its sequence numbers.
    send(ranks(&process)[&1], "-KILL");
    let lost = |cause: &str| {
        let labels = format!(r#"cause="{cause}",engine="0",model_name="model""#);
        metric(at, &format!("hadron:executor_restarts_total{{{labels}}}"))
    };
    wait_until(Duration::from_mins(1), "the failure", || lost("exited") + lost("fault") == 1.0);
    ask_all(4..6);
    for (replica, (former, latter)) in [first, second].iter().zip(check_replays(at)).enumerate() {
        assert!(!latter.is_empty() && latter.is_disjoint(former), "replica {replica}");
    }
}
