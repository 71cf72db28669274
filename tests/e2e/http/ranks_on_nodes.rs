//! Ranks of one replica, and replicas that share experts, on two nodes. Both nodes are processes on this machine.

use super::executor_process::{
    body, complete_text, complete_text_of, finish, is_ready, send, stream_of, wait_until,
};
use super::expert_parallel::{self, SIZES, folder, on, streamed};
use super::nodes::{ClusterAddress, NodeProcess, TIMEOUT, is_running};
use super::parallel_ranks::with_experts;
use super::server_process::ServerProcess;
use crate::emulated_gpu;
use serde_json::Value;
use std::net::SocketAddr;

const EXACT: &[&str] = &["--threads", "1", "--dtype", "float32"];

/// Both nodes of a server, and the HTTP address of node 0.
struct TwoNodes {
    zero: NodeProcess,
    one: NodeProcess,
    address: SocketAddr,
}

impl TwoNodes {
    fn start(place: &ClusterAddress, flags: &[&str]) -> Self {
        let start = |rank| NodeProcess::with_ranks(place, rank, flags);
        let (zero, one) = (start(0), start(1));
        let address = zero.address();
        Self { zero, one, address }
    }
}

#[test]
fn tensor_parallel_ranks_on_two_nodes_survive_failures() {
    const TOKENS: u32 = 800;
    let flags = [EXACT, &["-tp", "2"]].concat();
    let expected = complete_text(ServerProcess::start(&flags).address, TOKENS);
    let place = ClusterAddress::new();
    let TwoNodes { mut zero, mut one, address: at } = TwoNodes::start(&place, &flags);
    assert!(complete_text(at, TOKENS) == expected, "two nodes differ from one");

    // An executor of the other node is killed in mid-stream.
    let former = (zero.executor(), one.executor());
    let streams = [(); 3].map(|()| stream_of(at, &body(TOKENS, true)));
    send(former.1, "-KILL");
    for stream in streams {
        let (text, end) = finish(stream);
        assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    }
    let latter = (zero.executor(), one.executor());
    assert!(latter.0 != former.0 && latter.1 != former.1, "both ranks restart: {latter:?}");
    one.wait_for_log("ended: signal: 9");

    // The other node is killed in mid-stream: its requests wait until it is back.
    let stream = stream_of(at, &body(TOKENS, true));
    one.kill();
    zero.wait_for_log("node failed");
    wait_until(TIMEOUT, "the end of its executor", || !is_running(latter.1));
    assert!(!is_ready(at), "the only replica has lost a rank");
    drop(one);
    one = NodeProcess::with_ranks(&place, 1, &flags);
    let (text, end) = finish(stream);
    assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");

    zero.signal("TERM");
    assert_eq!(zero.exits().code(), Some(0), "{}", zero.log());
    assert_eq!(one.exits().code(), Some(0), "{}", one.log());
}

#[test]
fn executor_that_ends_before_other_nodes_join_fails_the_start() {
    let flags = [EXACT, &["-tp", "2"]].concat();
    let mut zero = NodeProcess::with_ranks(&ClusterAddress::new(), 0, &flags);
    zero.wait_for_log("waiting for the node");
    send(zero.executor(), "-KILL");
    assert_eq!(zero.exits().code(), Some(1), "{}", zero.log());
    assert!(zero.log().contains("ended: signal: 9"), "{}", zero.log());

    // An address that is not one of this node.
    let wrong = [&flags[..], &["--node-address", "203.0.113.7"]].concat();
    let mut zero = NodeProcess::with_ranks(&ClusterAddress::new(), 0, &wrong);
    assert_eq!(zero.exits().code(), Some(1), "{}", zero.log());
    assert!(zero.log().contains("cannot listen at 203.0.113.7 (--node-address"), "{}", zero.log());
}

#[test]
fn expert_parallel_ranks_on_two_nodes_match_one() {
    const TOKENS: u32 = 300;
    let model = with_experts();
    let baseline = expert_parallel::serve(&model, &[]);
    let request = |which: u32| expert_parallel::body(which, TOKENS);
    let expected: Vec<String> =
        (0..3).map(|which| complete_text_of(baseline.address, &request(which))).collect();
    drop(baseline);
    let folder = folder(&model);
    for ranks in [&["-dp", "2"][..], &["-tp", "2"], &["-tp", "2", "-dp", "2"]] {
        let own = [folder.as_str(), "--enable-expert-parallel"];
        let flags = [&own, SIZES, EXACT, ranks].concat();
        let nodes = TwoNodes::start(&ClusterAddress::new(), &flags);
        let replicas = if ranks.contains(&"-dp") { 2 } else { 1 };
        let ask = |which: u32| -> Value { on(which as u16 % replicas, request(which)) };
        let streams: Vec<_> =
            (0..3).map(|which| stream_of(nodes.address, &streamed(ask(which)))).collect();
        for (which, stream) in streams.into_iter().enumerate() {
            let (text, end) = finish(stream);
            assert!(
                text == expected[which] && end == "length",
                "{ranks:?}, request {which}: {text}"
            );
        }
    }
}

#[test]
fn emulated_gpus_on_two_nodes_match_one() {
    const TOKENS: u32 = 8;
    let library = emulated_gpu::library();
    let library = library.to_str().unwrap();
    // Driver, compiler, BLAS, warp size and collectives.
    let libraries = format!("{library},{library},{library},64,{library}");
    let small = ["--max-num-batched-tokens", "16", "--max-num-seqs", "4", "--max-model-len", "256"];
    let device = ["--device", "rocm", "--device-libraries", &libraries, "--enforce-eager"];
    let flags = [&device[..], &small, &["--kv-cache-memory-bytes", "16MiB", "-tp", "2"]].concat();
    let expected = complete_text(ServerProcess::start(&flags).address, TOKENS);
    let nodes = TwoNodes::start(&ClusterAddress::new(), &flags);
    assert_eq!(complete_text(nodes.address, TOKENS), expected);
}
