//! Flags for servers on several nodes: number of nodes, index of this node, rendezvous address, cluster
//! secret.
//!
//! Flags that are not given are taken from the environment variables of the cluster launcher
//! (`launcher_env.rs`).

mod launcher_env;
mod secret;
mod slurm_hostlist;

use std::path::PathBuf;

use clap::Args;
use engine::nodes::{ClusterConfig, ClusterSecret};

pub use launcher_env::LauncherEnvVariables;
use launcher_env::NumericEnvVariable;
pub(crate) use secret::CLUSTER_SECRET_VARIABLE as SECRET_VARIABLE;
use secret::{check_secret, read_secret};

use super::{CommandLineError, ParallelArgs, ProcessEnvironment, rejected};

/// Default host of node 0.
const MASTER_ADDR_DEFAULT: &str = "127.0.0.1";
/// Default port of node 0.
const MASTER_PORT_DEFAULT: u16 = 29_500;

/// Flags for servers on several nodes.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Nodes")]
pub struct NodeArgs {
    /// Number of nodes (short: -n) [default: from the launcher's environment, else 1]
    #[arg(long, value_name = "COUNT")]
    nnodes: Option<u16>,
    /// Index of this node (short: -r); node 0 runs the scheduler and the HTTP server [default: from the
    /// launcher's environment, else 0]
    #[arg(long, value_name = "INDEX")]
    node_rank: Option<u16>,
    /// Replicas per node; alternative to --nnodes (short: -dpl)
    #[arg(long, value_name = "COUNT")]
    data_parallel_size_local: Option<u16>,
    /// First replica of this node; alternative to --node-rank (short: -dpr)
    #[arg(long, value_name = "INDEX")]
    data_parallel_start_rank: Option<u16>,
    /// Address of node 0 for the other nodes (short: -dpa) [default: from the launcher's environment, else
    /// 127.0.0.1]
    #[arg(long, alias = "data-parallel-address", value_name = "HOST")]
    master_addr: Option<String>,
    /// Port of node 0 for the other nodes (short: -dpp) [default: from the launcher's environment, else
    /// 29500]
    #[arg(long, alias = "data-parallel-rpc-port", value_name = "PORT")]
    master_port: Option<u16>,
    /// Address and port of node 0 in one flag
    #[arg(long, alias = "nccl-init-addr", value_name = "HOST:PORT")]
    dist_init_addr: Option<String>,
    /// Name or address at which the ranks of other nodes reach those of this node, if a replica has ranks on several nodes
    /// [default: address of the connection to node 0; on node 0: --master-addr]
    #[arg(long, value_name = "HOST")]
    node_address: Option<String>,
    /// Run without an HTTP server; implied on every node but node 0
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    headless: bool,
    /// File with the cluster secret shared by all nodes
    #[arg(long, value_name = "FILE")]
    cluster_secret_file: Option<PathBuf>,
    /// Cluster configuration, set by `resolve`; `None` = a single node.
    #[arg(skip)]
    cluster: Option<ClusterConfig>,
}

impl NodeArgs {
    /// Returns the cluster configuration that `resolve` computed; `None` = a single node.
    pub fn cluster(&self) -> Option<&ClusterConfig> {
        self.cluster.as_ref()
    }

    /// Returns the secret that the nodes of the cluster share.
    ///
    /// Errors: no secret is configured, it cannot be read, or it is too short.
    pub fn secret(
        &self,
        environment: &ProcessEnvironment,
    ) -> Result<ClusterSecret, CommandLineError> {
        match (&self.cluster_secret_file, &environment.cluster_secret) {
            (Some(path), _) => read_secret(path),
            (None, Some(secret)) => check_secret(secret.clone(), SECRET_VARIABLE),
            (None, None) => rejected("nodes need a common secret"), // `resolve` has rejected this case.
        }
    }

    /// Combines flags and environment variables, and rejects invalid combinations.
    pub(super) fn resolve(
        &mut self,
        parallel: &ParallelArgs,
        environment: &ProcessEnvironment,
    ) -> Result<(), CommandLineError> {
        self.resolve_data_parallel_layout(parallel.data_parallel_size)?;
        // With the flag `--nnodes 1`, the environment variables of a launcher are ignored.
        let layout = match self.nnodes {
            Some(1) => launcher_env::NodePosition::default(),
            _ => environment.cluster.node_layout()?,
        };
        let nodes = reconcile("--nnodes", self.nnodes, layout.nodes)?.unwrap_or(1);
        if nodes < 2 {
            let is_explicit = self.nnodes.is_some() || layout.nodes.is_some();
            return self.check_single_node(nodes, is_explicit);
        }
        let node = reconcile("--node-rank", self.node_rank, layout.node)?.unwrap_or(0);
        if node >= nodes {
            return rejected(format!(
                "--node-rank {node}: the last of {nodes} nodes is {}",
                nodes - 1
            ));
        }
        if self.headless && node == 0 {
            return rejected("--headless: node 0 runs the HTTP server");
        }
        let (host, port) = self.address(layout.host, layout.port)?;
        check_rank_placement(nodes, parallel, layout.nodes)?;
        if self.cluster_secret_file.is_none() && environment.cluster_secret.is_none() {
            let source = layout.nodes.map_or(String::new(), |nodes| {
                format!(" ({}; --nnodes 1 serves on this node only)", nodes.name)
            });
            return rejected(format!(
                "{nodes} nodes{source} need a common secret: --cluster-secret-file FILE or \
                 {SECRET_VARIABLE}"
            ));
        }
        let node_address = self.node_address.clone();
        self.cluster = Some(ClusterConfig { nodes, node, host, port, node_address });
        Ok(())
    }

    /// Derives the number of nodes and the index of this node from vLLM's data-parallel flags.
    fn resolve_data_parallel_layout(&mut self, replicas: u16) -> Result<(), CommandLineError> {
        let Some(local) = self.data_parallel_size_local else {
            return match self.data_parallel_start_rank {
                None => Ok(()),
                Some(start) => rejected(format!(
                    "--data-parallel-start-rank {start}: needs --data-parallel-size-local"
                )),
            };
        };
        if local == 0 || !replicas.is_multiple_of(local) {
            return rejected(format!(
                "--data-parallel-size-local {local} of --data-parallel-size {replicas}: each node, including \
                 node 0, has an equal number of replicas"
            ));
        }
        let nodes = Some(NumericEnvVariable {
            name: "--data-parallel-size-local",
            value: replicas / local,
        });
        self.nnodes = reconcile("--nnodes", self.nnodes, nodes)?;
        self.resolve_node_rank(replicas, local)
    }

    /// Derives the index of this node from its first replica. `local`: number of replicas per node.
    fn resolve_node_rank(&mut self, replicas: u16, local: u16) -> Result<(), CommandLineError> {
        let Some(start) = self.data_parallel_start_rank else { return Ok(()) };
        if start >= replicas || !start.is_multiple_of(local) {
            return rejected(format!(
                "--data-parallel-start-rank {start}: nodes with {local} of {replicas} replicas start at multiples of {local}"
            ));
        }
        let node =
            Some(NumericEnvVariable { name: "--data-parallel-start-rank", value: start / local });
        self.node_rank = reconcile("--node-rank", self.node_rank, node)?;
        Ok(())
    }

    /// Returns the name of a flag that is valid only for several nodes, if such a flag is given.
    fn multi_node_flag(&self) -> Option<&'static str> {
        let flags = [
            ("--master-addr", self.master_addr.is_some()),
            ("--master-port", self.master_port.is_some()),
            ("--dist-init-addr", self.dist_init_addr.is_some()),
            ("--node-address", self.node_address.is_some()),
            ("--cluster-secret-file", self.cluster_secret_file.is_some()),
        ];
        flags.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    /// Checks the flags for a server on a single node. `is_explicit`: a flag or an environment variable
    /// states the number of nodes.
    fn check_single_node(&self, nodes: u16, is_explicit: bool) -> Result<(), CommandLineError> {
        if let Some(flag) = self.multi_node_flag().filter(|_| !is_explicit) {
            return rejected(format!("{flag}: has no effect on a single node; set --nnodes"));
        }
        match self.node_rank {
            _ if nodes == 0 => rejected("--nnodes 0: at least 1"),
            Some(node) if node > 0 => {
                rejected(format!("--node-rank {node}: with --nnodes 1 only rank 0 exists"))
            }
            _ if self.headless => rejected("--headless: the only node runs the HTTP server"),
            _ => Ok(()),
        }
    }

    /// Returns host name (or address) and port of node 0.
    fn address(
        &self,
        host: Option<String>,
        port: Option<u16>,
    ) -> Result<(String, u16), CommandLineError> {
        let Some(both) = &self.dist_init_addr else {
            let host =
                self.master_addr.clone().or(host).unwrap_or_else(|| MASTER_ADDR_DEFAULT.to_owned());
            return Ok((host, self.master_port.or(port).unwrap_or(MASTER_PORT_DEFAULT)));
        };
        if self.master_addr.is_some() || self.master_port.is_some() {
            return rejected("--dist-init-addr: excludes --master-addr and --master-port");
        }
        let bare = both.strip_prefix("tcp://").unwrap_or(both);
        let parts = bare.rsplit_once(':').and_then(|(host, port)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            (!host.is_empty()).then_some((host.to_owned(), port.parse().ok()?))
        });
        parts.ok_or_else(|| {
            CommandLineError::Rejected(format!("--dist-init-addr {both}: not HOST:PORT"))
        })
    }
}

/// Returns the value of a flag or, if the flag is not given, of an environment variable.
///
/// Errors: the two values differ.
fn reconcile(
    flag: &str,
    given: Option<u16>,
    variable: Option<NumericEnvVariable>,
) -> Result<Option<u16>, CommandLineError> {
    match (given, variable) {
        (Some(given), Some(NumericEnvVariable { name, value })) if given != value => {
            rejected(format!("{flag} {given}, but {name} is {value}"))
        }
        (given, variable) => Ok(given.or(variable.map(|variable| variable.value))),
    }
}

/// Rejects numbers of ranks that cannot be distributed evenly over the nodes.
fn check_rank_placement(
    nodes: u16,
    parallel: &ParallelArgs,
    nodes_variable: Option<NumericEnvVariable>,
) -> Result<(), CommandLineError> {
    let (tp, dp) = (parallel.tensor_parallel_size, parallel.data_parallel_size);
    let ranks = tp * dp;
    let per_node = ranks / nodes;
    let is_even = ranks.is_multiple_of(nodes)
        && per_node > 0
        && (per_node.is_multiple_of(tp) || tp.is_multiple_of(per_node));
    if is_even {
        return Ok(());
    }
    let source = nodes_variable.map_or("--nnodes", |variable| variable.name);
    let more = dp.next_multiple_of(nodes);
    rejected(format!(
        "{source} {nodes} with --data-parallel-size {dp} and --tensor-parallel-size {tp}: each node has an equal \
         number of ranks, and either whole replicas or an equal part of one. Use --data-parallel-size {more}, or a \
         --tensor-parallel-size that is a multiple of {nodes}"
    ))
}

#[cfg(test)]
mod tests;
