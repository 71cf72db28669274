//! Checks that flags, probes and timeouts in the files of `deploy/` agree with the server.

use crate::bounded_child::{run_if_installed, run_to_end};
use crate::source_tree::{read_file, root};
use hadron::config::{
    CliCommand as Parsed, LauncherEnvVariables, ProcessEnvironment, ServeArgs, parse,
};
use serde_json::Value;
use server::RouteAccess;
use server::routes::table;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

const DOCKERFILES: &[&str] = &["cpu", "cuda", "rocm"];
const MANIFESTS: &[&str] = &["deployment", "leader_worker_set"];
/// Time in seconds that the server needs to write its logs and to exit, after the preStop hook and the drain
/// (wait for running requests).
const MARGIN_S: u64 = 5;

/// Slurm's default time (`KillWait`) in seconds between SIGTERM and SIGKILL.
const SLURM_KILL_WAIT_S: u64 = 30;

/// Parses the arguments of `hadron serve` as the server does. `place`: source of the arguments, for messages.
fn serve(words: &[String], place: &str) -> ServeArgs {
    serve_in(words, &BTreeMap::new(), place)
}

/// Parses the arguments of `hadron serve` as the server does, with environment variables that the cluster
/// sets. `place`: source of the arguments, for messages.
fn serve_in(words: &[String], variables: &BTreeMap<&str, String>, place: &str) -> ServeArgs {
    let argv = std::iter::once("hadron".to_owned()).chain(words.iter().cloned());
    let text = |name: &str| variables.get(name).cloned();
    let secret = text("HADRON_CLUSTER_SECRET").map(|text| engine::nodes::ClusterSecret::new(&text));
    let cluster = LauncherEnvVariables::read(text);
    let environment =
        ProcessEnvironment { cluster, cluster_secret: secret, ..ProcessEnvironment::default() };
    let parsed = parse(argv.map(OsString::from).collect(), environment);
    match parsed.unwrap_or_else(|error| panic!("{place}: {error}")).command {
        Parsed::Serve(args) => *args,
        other => panic!("{place}: {other:?}"),
    }
}

fn documents(name: &str) -> Vec<Value> {
    let text = read_file(&format!("deploy/kubernetes/{name}.yaml"));
    let parts = text.split("\n---\n").map(yaml_serde::from_str);
    parts.collect::<Result<_, _>>().unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Returns the pod spec in a Kubernetes manifest: for a LeaderWorkerSet, that of the leader.
fn pod(document: &Value) -> &Value {
    match document["kind"].as_str() {
        Some("Deployment") => &document["spec"]["template"]["spec"],
        Some("LeaderWorkerSet") => {
            &document["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
        }
        other => panic!("{other:?}"),
    }
}

fn words(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

fn seconds(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number of seconds"))
}

#[test]
fn manifests_match_server_flags_probes_and_timeouts() {
    for name in MANIFESTS {
        let documents = documents(name);
        let pod = pod(&documents[0]);
        let container = &pod["containers"][0];
        // These checks do not depend on the number of nodes, so one node is assumed.
        let leader_env = BTreeMap::from([("LWS_GROUP_SIZE", "1".to_owned())]);
        let args = serve_in(&words(&container["args"]), &leader_env, name);
        assert_eq!(args.http.host, "0.0.0.0", "{name}");
        assert!(args.access.api_key_file.is_some(), "{name}: open to the cluster without a key");
        let port = container["ports"][0]["containerPort"].as_u64().unwrap();
        assert_eq!(port, u64::from(args.http.port), "{name}");

        let (drain, start) = (args.http.shutdown_timeout.0, args.engine.startup_timeout.0);
        let pre_stop = seconds(&container["lifecycle"]["preStop"]["sleep"]["seconds"]);
        let grace = seconds(&pod["terminationGracePeriodSeconds"]);
        assert!(grace > pre_stop + drain.as_secs() + MARGIN_S, "{name}: killed in its drain");
        let probe = |kind: &str| &container[kind];
        let startup = probe("startupProbe");
        let startup_limit =
            seconds(&startup["periodSeconds"]) * seconds(&startup["failureThreshold"]);
        assert!(startup_limit >= start.as_secs(), "{name}: killed in its start");
        for (kind, path) in [
            ("startupProbe", "/readyz"),
            ("readinessProbe", "/readyz"),
            ("livenessProbe", "/livez"),
        ] {
            assert_eq!(probe(kind)["httpGet"]["path"], path, "{name}");
            let open =
                |r: &server::routes::HttpRoute| r.path == path && r.access == RouteAccess::Open;
            assert!(table().iter().any(open), "{path} asks for a key");
        }
        let shm = pod["volumes"].as_array().unwrap().iter().find(|v| v["name"] == "shm").unwrap();
        assert_eq!(shm["emptyDir"]["medium"], "Memory", "{name}");
        check_mounts(name, pod, container);
        assert_eq!(documents[1]["spec"]["ports"][0]["targetPort"], container["ports"][0]["name"]);
    }
}

/// Checks that every mount has a volume, every volume has a mount, and secrets are mounted read-only.
fn check_mounts(name: &str, pod: &Value, container: &Value) {
    let names = |list: &Value| {
        let mut names: Vec<String> = list
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v["name"].as_str().unwrap().to_owned())
            .collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names(&pod["volumes"]), names(&container["volumeMounts"]), "{name}");
    let keys = container["volumeMounts"].as_array().unwrap().iter().find(|m| m["name"] == "keys");
    assert_eq!(keys.unwrap()["readOnly"], true, "{name}");
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{name}");
}

/// All pods of a LeaderWorkerSet group must run the same command line. Environment variables that the
/// controller sets give each pod a different node index.
#[test]
fn leader_worker_set_is_one_server() {
    let documents = documents("leader_worker_set");
    let group = &documents[0]["spec"]["leaderWorkerTemplate"];
    let size = group["size"].as_u64().unwrap();
    assert!(size > 1, "a group of one is a deployment");
    let (leader, worker) = (&group["leaderTemplate"], &group["workerTemplate"]);
    let container = |pod: &Value| pod["spec"]["containers"][0].clone();
    for same in ["image", "args", "env", "volumeMounts", "securityContext"] {
        assert_eq!(container(leader)[same], container(worker)[same], "{same}");
    }
    for same in ["volumes", "securityContext", "terminationGracePeriodSeconds"] {
        assert_eq!(leader["spec"][same], worker["spec"][same], "{same}");
    }
    let asks = |pod: &Value| pod.to_string().contains("httpGet");
    assert!(asks(leader) && !asks(worker), "only the leader serves HTTP");
    check_mounts("workers", &worker["spec"], &container(worker));
    let selector = &documents[1]["spec"]["selector"];
    assert_eq!(selector, &leader["metadata"]["labels"], "clients go to the leader");
    assert_ne!(selector, &worker["metadata"]["labels"]);
    let taken = &documents[0]["metadata"]["name"];
    assert_ne!(
        &documents[1]["metadata"]["name"], taken,
        "the controller makes a service of that name"
    );

    let args = words(&container(leader)["args"]);
    let port = container(leader)["ports"][1]["containerPort"].as_u64().unwrap();
    for index in 0..size {
        let variables = BTreeMap::from([
            ("LWS_GROUP_SIZE", size.to_string()),
            ("LWS_WORKER_INDEX", index.to_string()),
            ("LWS_LEADER_ADDRESS", "hadron-0.hadron.default".to_owned()),
        ]);
        let args = serve_in(&args, &variables, "leader_worker_set");
        let cluster = args.nodes.cluster().expect("several nodes");
        let told = (u64::from(cluster.nodes), u64::from(cluster.node), u64::from(cluster.port));
        assert_eq!(told, (size, index, port));
        assert_eq!(cluster.host, "hadron-0.hadron.default");
    }
    let secret = args.iter().find_map(|arg| arg.strip_prefix("--cluster-secret-file="));
    assert!(secret.is_some_and(|path| path.starts_with("/etc/hadron/")), "{secret:?}");
}

#[test]
fn slurm_job_is_one_server() {
    let text = read_file("deploy/slurm/hadron.sbatch");
    let option = |name: &str| {
        let found =
            text.lines().find_map(|line| line.strip_prefix("#SBATCH --")?.strip_prefix(name));
        found.unwrap_or_else(|| panic!("no {name}")).trim_start_matches('=').to_owned()
    };
    let nodes = option("nodes");
    assert_eq!(option("ntasks-per-node"), "1");
    let line = text.split_once("exec srun").unwrap().1.replace("\\\n", " ");
    let (srun, line) = line.split_once("hadron serve").unwrap();
    assert!(srun.contains("--ntasks-per-node=1"), "{srun}");
    // A replica per node unless the flags set the number of replicas; two_hosts.sh runs a job for each case.
    let default = "replicas=(--data-parallel-size=\"$SLURM_NNODES\")";
    assert!(text.contains(default), "{text}");
    let replicas = format!("--data-parallel-size={nodes}");
    let line = line.replace("\"${replicas[@]}\"", &replicas).replace("\"$@\"", "MODEL");
    assert_eq!(line.matches('"').count(), 2, "one path in quotes: {line}");
    let words: Vec<String> =
        std::iter::once("serve").chain(line.split_whitespace()).map(str::to_owned).collect();
    for node in 0..nodes.parse::<u16>().unwrap() {
        let variables = BTreeMap::from([
            ("SLURM_NNODES", nodes.clone()),
            ("SLURM_NTASKS", nodes.clone()),
            ("SLURM_NODEID", node.to_string()),
            ("SLURM_JOB_NODELIST", "n[7-8]".to_owned()),
            ("HADRON_CLUSTER_SECRET", "0".repeat(64)),
        ]);
        let args = serve_in(&words, &variables, "hadron.sbatch");
        let cluster = args.nodes.cluster().expect("several nodes");
        assert_eq!((cluster.nodes.to_string(), cluster.node), (nodes.clone(), node));
        assert_eq!(cluster.host, "n7");
        assert!(
            args.http.host == "0.0.0.0" && args.access.api_key_file.is_some(),
            "open without a key"
        );
        let drain = args.http.shutdown_timeout.0;
        assert!(drain + Duration::from_secs(MARGIN_S) < Duration::from_secs(SLURM_KILL_WAIT_S));
    }
    let mut bash = Command::new("bash");
    let read = run_to_end(bash.arg("-n").arg(root().join("deploy/slurm/hadron.sbatch")));
    assert!(read.status.success());
}

#[test]
fn images_start_the_server_without_root() {
    for name in DOCKERFILES {
        let text = read_file(&format!("deploy/docker/{name}.Dockerfile"));
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let value = |word: &str| {
            let found = lines.iter().rev().find_map(|line| line.strip_prefix(word));
            found.unwrap_or_else(|| panic!("{name}: no {word}")).trim()
        };
        let list = |word: &str| words(&serde_json::from_str(value(word)).unwrap());
        assert_eq!(list("ENTRYPOINT"), ["hadron"], "{name}");
        let args = serve(&list("CMD"), name);
        let device = format!("{:?}", args.engine.device).to_lowercase();
        assert_eq!((args.http.host.as_str(), device.as_str()), ("0.0.0.0", *name));
        assert_eq!(value("EXPOSE"), args.http.port.to_string(), "{name}");
        assert_eq!(value("STOPSIGNAL"), "SIGTERM", "{name}");
        assert!(value("USER").parse::<u32>().is_ok_and(|id| id > 0), "{name}: runAsNonRoot");
        for base in lines.iter().filter_map(|line| line.strip_prefix("FROM ")) {
            let tag = base.split(' ').next().unwrap().split_once(':').map(|(_, tag)| tag);
            assert!(tag.is_some_and(|tag| tag != "latest"), "{name}: {base} may change");
        }
        let builds = lines.iter().find_map(|line| line.strip_prefix("FROM rust:")).unwrap();
        let toolchain = read_file("rust-toolchain.toml");
        let version = builds.split('-').next().unwrap();
        assert!(toolchain.contains(&format!("\"{version}")), "{name}: rust {version}");
    }
}

#[test]
fn systemd_unit_leaves_time_for_the_drain() {
    let text = read_file("deploy/systemd/hadron.service");
    let value = |key: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {key}")).to_owned()
    };
    let command: Vec<String> = value("ExecStart").split(' ').map(str::to_owned).collect();
    // The configuration file does not exist here, because the operator writes it, so the command line is
    // parsed without `--config`.
    let file = command.iter().position(|word| word == "--config").unwrap();
    let flags = [&command[1..file], &command[file + 2..]].concat();
    let args = serve(&flags, "hadron.service");
    let stop: u64 = value("TimeoutStopSec").parse().unwrap();
    let drain = args.http.shutdown_timeout.0;
    assert!(Duration::from_secs(stop) > drain + Duration::from_secs(MARGIN_S));
    assert_eq!(value("KillSignal"), "SIGTERM");
    verify(&text, &command[0]);
}

/// Verifies a systemd unit with `systemd-analyze`, if it is installed.
fn verify(text: &str, binary: &str) {
    let folder = tempfile::tempdir().unwrap();
    let unit = folder.path().join("hadron.service");
    let there = std::env::current_exe().unwrap();
    std::fs::write(&unit, text.replace(binary, there.to_str().unwrap())).unwrap();
    let verified = run_if_installed(Command::new("systemd-analyze").arg("verify").arg(&unit));
    let Some(output) = verified else { return }; // `systemd-analyze` is not installed everywhere.
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let about: Vec<&str> = message.lines().filter(|line| line.contains("hadron.service")).collect();
    assert!(about.is_empty(), "{about:?}");
}

#[test]
fn every_deploy_file_is_documented() {
    let page = read_file("deploy/README.md");
    for folder in ["docker", "systemd", "kubernetes", "slurm"] {
        for entry in std::fs::read_dir(root().join("deploy").join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(
                page.contains(&format!("`{folder}/{name}`")),
                "deploy/README.md: {folder}/{name}"
            );
        }
    }
}
