//! Tests of the flags for several nodes, with launcher variables.

use super::*;

/// Command line with the parallelism flags only.
#[derive(clap::Parser)]
struct ClusterTestArgs {
    #[command(flatten)]
    parallel: ParallelArgs,
}

fn parallel(tp: u16, dp: u16) -> ParallelArgs {
    let line = format!("x --tensor-parallel-size={tp} --data-parallel-size={dp}");
    <ClusterTestArgs as clap::Parser>::parse_from(line.split(' ')).parallel
}

/// Returns an environment with `variables`, a list such as `A=1 B=2`.
fn environment(variables: &str) -> ProcessEnvironment {
    let text = |name: &str| {
        let mut assignments = variables.split(' ').filter_map(|text| text.split_once('='));
        assignments.find(|(variable, _)| *variable == name).map(|(_, text)| text.to_owned())
    };
    let cluster_secret = Some(ClusterSecret::new("0123456789abcdef"));
    ProcessEnvironment {
        cluster: LauncherEnvVariables::read(text),
        cluster_secret,
        ..ProcessEnvironment::default()
    }
}

fn resolve(mut args: NodeArgs, dp: u16, variables: &str) -> Result<Option<ClusterConfig>, String> {
    let result = args.resolve(&parallel(2, dp), &environment(variables));
    result.map(|()| args.cluster).map_err(|error| error.to_string())
}

fn cluster(nodes: u16, node: u16, host: &str, port: u16) -> ClusterConfig {
    ClusterConfig { nodes, node, host: host.to_owned(), port, node_address: None }
}

const SLURM: &str = "SLURM_NNODES=2 SLURM_NODEID=1 SLURM_JOB_NODELIST=n[1-2]";

#[test]
fn flags_override_launcher_variables() {
    let none = NodeArgs::default;
    assert_eq!(resolve(none(), 2, "").unwrap(), None);
    assert_eq!(resolve(none(), 2, SLURM).unwrap(), Some(cluster(2, 1, "n1", MASTER_PORT_DEFAULT)));
    let alone = NodeArgs { nnodes: Some(1), ..none() };
    assert_eq!(resolve(alone, 1, SLURM).unwrap(), None, "--nnodes 1 overrides the job");
    let two = || NodeArgs { nnodes: Some(2), ..none() };
    assert_eq!(
        resolve(two(), 2, "").unwrap(),
        Some(cluster(2, 0, MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT))
    );
    let explicit = NodeArgs { master_addr: Some("m".to_owned()), master_port: Some(7), ..two() };
    assert_eq!(resolve(explicit, 4, SLURM).unwrap(), Some(cluster(2, 1, "m", 7)));
    for (text, host) in [("10.0.0.1:5000", "10.0.0.1"), ("tcp://[fe80::1]:5000", "fe80::1")] {
        let args = NodeArgs { dist_init_addr: Some(text.to_owned()), ..two() };
        assert_eq!(resolve(args, 2, "").unwrap(), Some(cluster(2, 0, host, 5_000)));
    }
    let local = |size, start| NodeArgs {
        data_parallel_size_local: size,
        data_parallel_start_rank: start,
        ..none()
    };
    let second = Some(cluster(2, 1, MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT));
    assert_eq!(resolve(local(Some(2), Some(2)), 4, "").unwrap(), second, "vLLM's flags");
    let first = Some(cluster(4, 0, MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT));
    assert_eq!(resolve(local(Some(1), None), 4, "").unwrap(), first);
    assert_eq!(
        resolve(local(Some(4), Some(0)), 4, SLURM).unwrap(),
        None,
        "all replicas on this node"
    );
    assert_eq!(
        resolve(local(Some(2), None), 4, SLURM).unwrap(),
        Some(cluster(2, 1, "n1", MASTER_PORT_DEFAULT))
    );
    let alone = NodeArgs { nnodes: Some(1), master_addr: Some("m".to_owned()), ..none() };
    assert_eq!(resolve(alone, 1, "").unwrap(), None, "explicitly one node");
    let last = NodeArgs { node_rank: Some(1), headless: true, ..two() };
    assert_eq!(
        resolve(last, 2, "").unwrap(),
        Some(cluster(2, 1, MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT))
    );
}

#[test]
fn conflicting_node_counts_are_rejected_with_both_numbers() {
    let two = || NodeArgs { nnodes: Some(2), ..NodeArgs::default() };
    let addresses = NodeArgs {
        dist_init_addr: Some("h:1".to_owned()),
        master_addr: Some("h".to_owned()),
        ..two()
    };
    let bare = |text: &str| NodeArgs { dist_init_addr: Some(text.to_owned()), ..two() };
    for (args, dp, variables, reason) in [
        (NodeArgs { nnodes: Some(4), ..two() }, 4, SLURM, "--nnodes 4, but SLURM_NNODES is 2"),
        (
            NodeArgs { node_rank: Some(0), ..two() },
            2,
            SLURM,
            "--node-rank 0, but SLURM_NODEID is 1",
        ),
        (NodeArgs { node_rank: Some(2), ..two() }, 2, "", "the last of 2 nodes is 1"),
        (NodeArgs { headless: true, ..two() }, 2, "", "node 0 runs the HTTP server"),
        (NodeArgs { nnodes: Some(0), ..two() }, 2, "", "--nnodes 0"),
        (two(), 3, "", "Use --data-parallel-size 4"),
        (
            NodeArgs { nnodes: Some(4), ..two() },
            1,
            "",
            "--nnodes 4 with --data-parallel-size 1 and --tensor-parallel-size 2",
        ),
        (NodeArgs::default(), 3, SLURM, "SLURM_NNODES 2 with --data-parallel-size 3"),
        (addresses, 2, "", "excludes --master-addr"),
        (bare("nowhere"), 2, "", "--dist-init-addr nowhere: not HOST:PORT"),
        (bare(":1"), 2, "", "not HOST:PORT"),
    ] {
        let error = resolve(args, dp, variables).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    let mut args = two();
    let bare =
        args.resolve(&parallel(1, 2), &ProcessEnvironment::default()).unwrap_err().to_string();
    assert!(bare.contains("--cluster-secret-file FILE or HADRON_CLUSTER_SECRET"), "{bare}");
    let cluster_secret = Some(ClusterSecret::new("short"));
    let environment = ProcessEnvironment { cluster_secret, ..ProcessEnvironment::default() };
    let short = two().secret(&environment).unwrap_err().to_string();
    assert!(short.starts_with("HADRON_CLUSTER_SECRET: 5 bytes"), "{short}");
}

#[test]
fn ranks_are_assigned_to_nodes_in_order() {
    let cluster = cluster(2, 0, "h", 1);
    assert_eq!([0, 1].map(|node| cluster.ranks_of(node, 2)), [0..1, 1..2]);
    assert_eq!([0, 1].map(|node| cluster.ranks_of(node, 12)), [0..6, 6..12]);
}
