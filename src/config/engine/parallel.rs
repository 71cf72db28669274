//! Flags of parallelism: tensor, data and expert parallel sizes.

use super::super::{CommandLineError, rejected};
use super::LoadBalancePolicy;
use clap::Args;
use std::path::PathBuf;

/// Maximum number of executors (ranks) of a server.
const RANKS_MAX: u32 = 256;

/// Flags for the number of replicas and ranks, and for the placement of experts.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Parallelism")]
pub struct ParallelArgs {
    /// Tensor-parallel size (short: -tp)
    #[arg(long, aliases = ["tp", "tp-size"], default_value_t = 1, value_name = "SIZE")]
    pub tensor_parallel_size: u16,
    /// Data-parallel size: number of replicas, each with its own KV cache (short: -dp)
    #[arg(long, alias = "dp", default_value_t = 1, value_name = "SIZE")]
    pub data_parallel_size: u16,
    /// Expert parallelism: store each expert whole on one of all ranks instead of a slice on every
    /// tensor-parallel rank; replicas then run their steps together and share the experts
    #[arg(long, alias = "ep", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value_t = false,
          action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_expert_parallel: bool,
    /// Expert-parallel size; enables expert parallelism and must equal the number of ranks
    #[arg(long, value_name = "SIZE")]
    pub ep_size: Option<u32>,
    /// Expert placement file (EPLB map): {"physical_to_logical_map": [[..], ..]}, for each layer the logical
    /// expert of each physical expert; physical experts are split evenly over the ranks, and a logical expert
    /// may have several; "trivial" = each expert once, in order
    #[arg(long, alias = "init-expert-location", value_name = "FILE")]
    pub expert_placement: Option<PathBuf>,
    /// Data-parallel attention: each rank is a replica and only experts are shared; --tensor-parallel-size
    /// counts as --data-parallel-size
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_dp_attention: bool,
    /// Use RCCL or NCCL for all all-reduces; by default small ones use a one-shot all-reduce over peer memory
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub disable_custom_all_reduce: bool,
    /// Load-balancing policy between replicas
    #[arg(long, alias = "load-balance-method", default_value = "prefix")]
    pub dp_load_balance: LoadBalancePolicy,
}

impl ParallelArgs {
    /// Returns the total number of ranks, each of which is one executor.
    fn world_size(&self) -> u32 {
        u32::from(self.tensor_parallel_size) * u32::from(self.data_parallel_size)
    }

    /// Rejects invalid values of `--tensor-parallel-size` and `--data-parallel-size`.
    fn check_parallel_sizes(&self) -> Result<(), CommandLineError> {
        let (tp, dp, world) =
            (self.tensor_parallel_size, self.data_parallel_size, self.world_size());
        for (name, size) in [("--tensor-parallel-size", tp), ("--data-parallel-size", dp)] {
            if size == 0 {
                return rejected(format!("{name} 0: at least 1"));
            }
        }
        if world > RANKS_MAX {
            return rejected(format!(
                "--tensor-parallel-size {tp} and --data-parallel-size {dp}: {world} executors, \
                 a server runs at most {RANKS_MAX}"
            ));
        }
        if self.enable_dp_attention && tp > 1 && dp > 1 {
            return rejected(format!(
                "--enable-dp-attention with --tensor-parallel-size {tp} and --data-parallel-size {dp}: \
                 {world} executors would each be a replica; use --data-parallel-size only"
            ));
        }
        Ok(())
    }

    /// Applies `--ep-size` and `--enable-dp-attention` to the other flags, and rejects invalid values.
    pub(crate) fn resolve(&mut self) -> Result<(), CommandLineError> {
        self.check_parallel_sizes()?;
        let world = self.world_size();
        if let Some(size) = self.ep_size {
            if size != world {
                return rejected(format!(
                    "--ep-size {size}: must equal the number of ranks, {world}"
                ));
            }
            self.enable_expert_parallel = true;
        }
        if self.enable_dp_attention && world > 1 {
            if !self.enable_expert_parallel {
                return rejected(format!(
                    "--enable-dp-attention with {world} ranks: needs --enable-expert-parallel, \
                     only experts are shared"
                ));
            }
            (self.tensor_parallel_size, self.data_parallel_size) = (1, world as u16);
        }
        self.check_expert_placement(world)
    }

    fn check_expert_placement(&mut self, world: u32) -> Result<(), CommandLineError> {
        // In SGLang, the value `trivial` means that experts are placed in order, which is the default here.
        self.expert_placement.take_if(|file| file.as_os_str() == "trivial");
        if self.expert_placement.is_some() && !(self.enable_expert_parallel && world > 1) {
            return rejected(
                "--expert-placement: experts are placed whole on one of several executors only with \
                 --enable-expert-parallel and a size above 1",
            );
        }
        Ok(())
    }
}
