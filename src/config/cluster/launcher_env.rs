//! Reads the environment variables that cluster launchers (Slurm, MPI, torchrun, LeaderWorkerSet) set on each
//! node.

use std::collections::BTreeMap;

use super::slurm_hostlist;
use crate::config::{CommandLineError, rejected};

/// Names of all environment variables that `LauncherEnvVariables` reads. Launchers set them on the nodes that
/// they start.
const VARIABLES: &[&str] = &[
    "LWS_GROUP_SIZE",
    "LWS_WORKER_INDEX",
    "LWS_LEADER_ADDRESS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE",
    "PMI_RANK",
    "PMIX_RANK",
    "MPI_LOCALNRANKS",
    "GROUP_WORLD_SIZE",
    "GROUP_RANK",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
];

/// Values of the environment variables in `VARIABLES`, by which cluster launchers configure nodes.
#[derive(Debug, Clone, Default)]
pub struct LauncherEnvVariables(BTreeMap<&'static str, String>);

/// Name and value of a launcher's environment variable that contains a number, such as a number of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NumericEnvVariable {
    pub(super) name: &'static str,
    pub(super) value: u16,
}

/// Position of this node in a cluster, from the environment variables of one launcher.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodePosition {
    /// Number of nodes in the cluster.
    pub(super) nodes: Option<NumericEnvVariable>,
    /// Index of this node.
    pub(super) node: Option<NumericEnvVariable>,
    /// Host name or address of node 0.
    pub(super) host: Option<String>,
    /// Port on which node 0 accepts the connections of the other nodes.
    pub(super) port: Option<u16>,
}

impl LauncherEnvVariables {
    /// Reads the variables with `text`, which returns the value of an environment variable.
    pub fn read(text: impl Fn(&str) -> Option<String>) -> Self {
        Self(VARIABLES.iter().filter_map(|name| Some((*name, text(name)?))).collect())
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns the value of the first variable in `names` that is set.
    fn number(
        &self,
        names: &[&'static str],
    ) -> Result<Option<NumericEnvVariable>, CommandLineError> {
        let Some((name, text)) = names.iter().find_map(|name| Some((*name, self.text(name)?)))
        else {
            return Ok(None);
        };
        match text.trim().parse() {
            Ok(value) => Ok(Some(NumericEnvVariable { name, value })),
            Err(_) => rejected(format!("{name} is {text:?}, not a number of nodes or tasks")),
        }
    }

    /// Returns the node layout from the first launcher that has set its variables. Without a launcher, only
    /// the host is set, to `MASTER_ADDR`.
    pub(super) fn node_layout(&self) -> Result<NodePosition, CommandLineError> {
        let systems = [Self::lws, Self::slurm, Self::mpi, Self::torchrun];
        for system in systems {
            if let Some(layout) = system(self)? {
                return Ok(layout);
            }
        }
        Ok(NodePosition {
            host: self.text("MASTER_ADDR").map(str::to_owned),
            ..NodePosition::default()
        })
    }

    /// Returns the node layout from Kubernetes LeaderWorkerSet, which starts a group of pods; the leader has
    /// index 0.
    fn lws(&self) -> Result<Option<NodePosition>, CommandLineError> {
        let Some(nodes) = self.number(&["LWS_GROUP_SIZE"])? else { return Ok(None) };
        let host = self.text("LWS_LEADER_ADDRESS").map(str::to_owned);
        let node = self.number(&["LWS_WORKER_INDEX"])?;
        Ok(Some(NodePosition { nodes: Some(nodes), node, host, port: None }))
    }

    /// Returns the node layout from the Slurm variables of the job step or, if there is no job step, of the
    /// job.
    fn slurm(&self) -> Result<Option<NodePosition>, CommandLineError> {
        let Some(nodes) = self.number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])? else {
            return Ok(None);
        };
        let tasks = self.number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
        check_one_server_per_node(
            nodes,
            tasks.filter(|tasks| tasks.value > nodes.value),
            "srun --ntasks-per-node=1",
        )?;
        let node = self.number(&["SLURM_NODEID"])?;
        let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
        let list = names.iter().find_map(|name| Some((*name, self.text(name)?)));
        let host = match list.map(|(name, list)| (name, list, slurm_hostlist::hosts(list))) {
            Some((name, list, Err(error))) => {
                return rejected(format!("{name} is {list:?}: {error}"));
            }
            Some((name, list, Ok(hosts))) if hosts.len() != usize::from(nodes.value) => {
                let (count, NumericEnvVariable { name: nodes_name, value }) = (hosts.len(), nodes);
                return rejected(format!(
                    "{name} is {list:?}, {count} hosts, but {nodes_name} is {value}"
                ));
            }
            Some((.., Ok(hosts))) => hosts.into_iter().next(),
            None => None,
        };
        Ok(Some(NodePosition { nodes: Some(nodes), node, host, port: None }))
    }

    /// Returns the node layout from Open MPI and other launchers with PMI. None of these launchers reports
    /// the host of the first process.
    fn mpi(&self) -> Result<Option<NodePosition>, CommandLineError> {
        let nodes = self.number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])?;
        let node = self.number(&["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"])?;
        if nodes.is_none() && node.is_none() {
            return Ok(None);
        }
        if let Some(nodes) = nodes.filter(|nodes| nodes.value > 1) {
            let local_size = self.number(&["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"])?;
            check_one_server_per_node(
                nodes,
                local_size.filter(|size| size.value > 1),
                "mpirun --map-by ppr:1:node",
            )?;
        }
        let host = self.text("MASTER_ADDR").map(str::to_owned);
        Ok(Some(NodePosition { nodes, node, host, port: None }))
    }

    /// Returns the node layout from torchrun, or from Kubernetes operators that set the variables of
    /// torchrun.
    fn torchrun(&self) -> Result<Option<NodePosition>, CommandLineError> {
        let world = self.number(&["WORLD_SIZE"])?;
        let (group_rank, local_size) =
            (self.number(&["GROUP_RANK"])?, self.number(&["LOCAL_WORLD_SIZE"])?);
        let (nodes, node) = match (group_rank, world) {
            (Some(node), Some(world)) => {
                let per_node = local_size.map_or(1, |size| size.value.max(1));
                let nodes = self.number(&["GROUP_WORLD_SIZE"])?;
                let world_nodes = NumericEnvVariable { value: world.value / per_node, ..world };
                (nodes.unwrap_or(world_nodes), Some(node))
            }
            (None, Some(world)) => (world, self.number(&["RANK"])?),
            (_, None) => return Ok(None),
        };
        if nodes.value > 1 {
            check_one_server_per_node(
                nodes,
                local_size.filter(|size| size.value > 1),
                "torchrun --nproc-per-node 1",
            )?;
        }
        // If torchrun listens on `MASTER_PORT` itself, node 0 uses the next port.
        let port_in_use = self.text("TORCHELASTIC_USE_AGENT_STORE") == Some("True");
        let port = self.number(&["MASTER_PORT"])?.map(|port| port.value);
        let port = port.and_then(|port| port.checked_add(u16::from(port_in_use)));
        let host = self.text("MASTER_ADDR").map(str::to_owned);
        Ok(Some(NodePosition { nodes: Some(nodes), node, host, port }))
    }
}

/// Rejects a launch with several servers per node on more than one node.
fn check_one_server_per_node(
    nodes: NumericEnvVariable,
    too_many: Option<NumericEnvVariable>,
    advice: &str,
) -> Result<(), CommandLineError> {
    let Some(NumericEnvVariable { name, value: count }) = too_many else { return Ok(()) };
    let nodes = nodes.value;
    if nodes < 2 {
        return Ok(());
    }
    rejected(format!(
        "{name} is {count}, on {nodes} nodes: hadron serve starts the executors of a node itself, \
         so it must run once per node: {advice}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the layout for the environment `variables`, a list such as `A=1 B=2`.
    fn node_layout(variables: &str) -> Result<NodePosition, String> {
        let text = |name: &str| {
            let mut assignments = variables.split(' ').filter_map(|text| text.split_once('='));
            assignments.find(|(variable, _)| *variable == name).map(|(_, text)| text.to_owned())
        };
        LauncherEnvVariables::read(text).node_layout().map_err(|error| error.to_string())
    }

    fn expected_layout(
        nodes: u16,
        node: u16,
        host: &str,
        port: Option<u16>,
    ) -> (u16, u16, String, Option<u16>) {
        (nodes, node, host.to_owned(), port)
    }

    fn resolved_layout(variables: &str) -> (u16, u16, String, Option<u16>) {
        let NodePosition { nodes, node, host, port } = node_layout(variables).unwrap();
        (nodes.unwrap().value, node.unwrap().value, host.unwrap_or_default(), port)
    }

    #[test]
    fn every_launcher_is_understood() {
        let lws = "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1 LWS_LEADER_ADDRESS=hadron-0.hadron.default";
        assert_eq!(resolved_layout(lws), expected_layout(2, 1, "hadron-0.hadron.default", None));
        let slurm = "SLURM_NNODES=4 SLURM_JOB_NODELIST=gpu[05-08] SLURM_NODEID=1";
        let job = format!("{slurm} SLURM_NTASKS=4");
        assert_eq!(resolved_layout(&job), expected_layout(4, 1, "gpu05", None));
        let step = "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=gpu[07-08] SLURM_STEP_NUM_TASKS=2";
        assert_eq!(
            resolved_layout(&format!("{slurm} {step}")),
            expected_layout(2, 1, "gpu07", None),
            "a step on some of the job's nodes"
        );
        let ompi = "OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 \
                    PMIX_RANK=2";
        assert_eq!(resolved_layout(ompi), expected_layout(3, 2, "", None));
        let pmi = "PMI_SIZE=3 PMI_RANK=0 MASTER_ADDR=h";
        assert_eq!(resolved_layout(pmi), expected_layout(3, 0, "h", None));
        let operator = "WORLD_SIZE=2 RANK=1 MASTER_ADDR=job-master-0 MASTER_PORT=23456";
        assert_eq!(resolved_layout(operator), expected_layout(2, 1, "job-master-0", Some(23_456)));
        let torchrun = "GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 \
                        TORCHELASTIC_USE_AGENT_STORE=True";
        assert_eq!(
            resolved_layout(&format!("{operator} {torchrun}")),
            expected_layout(2, 1, "job-master-0", Some(23_457))
        );
    }

    #[test]
    fn first_launcher_found_wins() {
        let nested = "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=0 SLURM_NNODES=9 WORLD_SIZE=16 RANK=7";
        assert_eq!(resolved_layout(nested), expected_layout(2, 0, "", None));
        assert_eq!(node_layout("").unwrap(), NodePosition::default());
        let partial = node_layout("RANK=3 MASTER_PORT=1 MASTER_ADDR=h").unwrap();
        let expected = NodePosition { host: Some("h".to_owned()), ..NodePosition::default() };
        assert_eq!(partial, expected, "an address alone makes no cluster");
    }

    #[test]
    fn several_servers_per_node_and_bad_values_are_rejected() {
        for (variables, reason) in [
            ("SLURM_NNODES=2 SLURM_NTASKS=16", "SLURM_NTASKS is 16, on 2 nodes"),
            ("OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4", "ppr:1:node"),
            ("WORLD_SIZE=8 RANK=3 LOCAL_WORLD_SIZE=4", "--nproc-per-node 1"),
            ("LWS_GROUP_SIZE=two", "LWS_GROUP_SIZE is \"two\""),
            ("SLURM_NNODES=2 SLURM_JOB_NODELIST=n[1-3]", "3 hosts, but SLURM_NNODES is 2"),
            ("SLURM_NNODES=2 SLURM_JOB_NODELIST=n[1", "unmatched opening"),
        ] {
            let error = node_layout(variables).unwrap_err();
            assert!(error.contains(reason), "{variables}: {error}");
        }
        // On a single node, the number of tasks has no effect.
        let one = "WORLD_SIZE=1 RANK=0 SLURM_NNODES=1 SLURM_NTASKS=8";
        assert_eq!(
            node_layout(one).unwrap().nodes,
            Some(NumericEnvVariable { name: "SLURM_NNODES", value: 1 })
        );
    }
}
