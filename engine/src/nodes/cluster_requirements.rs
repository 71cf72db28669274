//! Requirements that node 0 checks when another node joins the cluster.

use protocol::{NodeInfo, ParallelConfig};

/// Properties that all nodes of the cluster must share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterRequirements {
    /// Number of nodes.
    pub nodes: u16,
    /// Parallel configuration, such as the tensor parallel and data parallel sizes.
    pub parallel: ParallelConfig,
    /// Digest of the model folder, which must be equal on all nodes.
    pub manifest: u64,
}

impl ClusterRequirements {
    /// Checks that a node has the required properties.
    ///
    /// Errors: a description of the difference.
    pub(super) fn check(&self, info: &NodeInfo) -> Result<(), String> {
        let node = info.node;
        let same = |what: &str, theirs: String, ours: String| {
            if theirs == ours {
                return Ok(());
            }
            Err(format!("node {node} has {what} {theirs}, node 0 {ours}"))
        };
        let sizes = |p: ParallelConfig| {
            let experts = if p.expert_parallel { ", expert-parallel" } else { "" };
            format!("tensor-parallel {}, data-parallel {}{experts}", p.tp_size, p.dp_size)
        };
        let digest = |of: u64| format!("{of:016x}");
        same("build", info.build.clone(), env!("CARGO_PKG_VERSION").to_owned())?;
        same("--nnodes", info.nodes.to_string(), self.nodes.to_string())?;
        same("parallel sizes", sizes(info.parallel), sizes(self.parallel))?;
        same("model digest", digest(info.model_digest), digest(self.manifest))?;
        if node == 0 || node >= self.nodes {
            return Err(format!("node {node} is not in the range 1 to {}", self.nodes - 1));
        }
        Ok(())
    }
}
